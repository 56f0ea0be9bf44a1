'use strict';
/**
 * What outlives a reload of the page, kept per tab: how to resume the session or start it anew, and the token of a
 * protected server.
 *
 * @typedef {object} Bookmark
 * @property {string} token         Resume token.
 * @property {string} sessionId
 * @property {number} run
 * @property {number} shownChunk    Last chunk of the run whose first frame was on screen, -1 for none.
 * @property {number} nextEventId   Smallest event id not used yet.
 */

const BOOKMARK = 'worldserve.session';
const START = 'worldserve.start';
const ACCESS = 'worldserve.token';

/** @returns {Bookmark | null} */
export function loadBookmark() {
  const text = sessionStorage.getItem(BOOKMARK);
  return text === null ? null : JSON.parse(text);
}

/** @param {Bookmark} bookmark */
export function saveBookmark(bookmark) {
  sessionStorage.setItem(BOOKMARK, JSON.stringify(bookmark));
}

export function clearBookmark() {
  sessionStorage.removeItem(BOOKMARK);
}

/** @returns {Record<string, unknown> | null}  The message that started the last world. */
export function loadStart() {
  const text = sessionStorage.getItem(START);
  return text === null ? null : JSON.parse(text);
}

/** @param {Record<string, unknown>} start */
export function saveStart(start) {
  sessionStorage.setItem(START, JSON.stringify(start));
}

/**
 * Access token of the server: taken from `#token=...` once, then kept for this tab and removed from the address.
 * @returns {string | null}
 */
export function accessToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get('token');
  if (given !== null) {
    sessionStorage.setItem(ACCESS, given);
    history.replaceState(null, '', location.pathname + location.search);
  }
  return sessionStorage.getItem(ACCESS);
}
