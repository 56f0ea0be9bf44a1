'use strict';
/**
 * What outlives a reload of the page. Per tab: how to resume the session or start it anew, and the token of a protected
 * server. For good: what the visitor likes.
 *
 * @typedef {object} Bookmark
 * @property {string} token         Resume token.
 * @property {string} sessionId
 * @property {number} run
 * @property {number} shownChunk    Last chunk of the run whose first frame was on screen, -1 for none.
 * @property {number} nextEventId   Smallest event id not used yet.
 *
 * @typedef {object} Preferences
 * @property {'system' | 'dark' | 'light'} theme
 * @property {'fmp4' | 'h264'} format   Of new sessions.
 * @property {boolean} keys             Whether the key overlay, the map and the numbers are there.
 * @property {boolean} map
 * @property {boolean} numbers
 */

const BOOKMARK = 'worldserve.session';
const START = 'worldserve.start';
const ACCESS = 'worldserve.token';
const PREFERENCES = 'worldserve.preferences';
/** @type {Record<string, unknown[]>} */
const CHOICES = { theme: ['system', 'dark', 'light'], format: ['fmp4', 'h264'] };

/** @typedef {'sessionStorage' | 'localStorage'} Place */

/**
 * What is kept under a name. Null: nothing, or nothing that can be read; a visitor may let pages keep nothing at all.
 * @param {Place} place
 * @param {string} name
 */
function read(place, name) {
  try {
    return JSON.parse(window[place].getItem(name) ?? 'null');
  } catch {
    return null;
  }
}

/**
 * Keep a value where that is possible; elsewhere the page forgets it when it is left.
 * @param {Place} place
 * @param {string} name
 * @param {unknown} value
 */
function write(place, name, value) {
  try {
    window[place].setItem(name, JSON.stringify(value));
  } catch {
    // Nothing is lost but what a reload would find.
  }
}

/** @returns {Bookmark | null} */
export function loadBookmark() {
  const kept = read('sessionStorage', BOOKMARK);
  return typeof kept?.token === 'string' ? kept : null;
}

/** @param {Bookmark} bookmark */
export function saveBookmark(bookmark) {
  write('sessionStorage', BOOKMARK, bookmark);
}

export function clearBookmark() {
  write('sessionStorage', BOOKMARK, null);
}

/** The message that can start the world on screen anew, also after a reload. */
export class KeptStart {
  constructor() {
    this.message = /** @type {Record<string, unknown> | null} */ (read('sessionStorage', START));
  }

  /** @param {Record<string, unknown>} message */
  keep(message) {
    this.message = message;
    write('sessionStorage', START, message);
  }

  /**
   * What starts anew goes on under the prompt it had last.
   * @param {string} prompt
   */
  keepPrompt(prompt) {
    if (this.message !== null) this.keep({ ...this.message, prompt });
  }
}

/**
 * What is kept of each, unless it is no choice of this page: an older or a newer one may have kept it.
 * @param {Preferences} defaults
 * @returns {Preferences}
 */
export function loadPreferences(defaults) {
  const kept = read('localStorage', PREFERENCES) ?? {};
  const known = Object.entries(kept).filter(([name, value]) => (CHOICES[name] ?? [true, false]).includes(value));
  return { ...defaults, ...Object.fromEntries(known) };
}

/** @param {Preferences} preferences */
export function savePreferences(preferences) {
  write('localStorage', PREFERENCES, preferences);
}

/**
 * Watch token from `#watch=...`, which stays in the address: it is what the visitor was given. Null: there is none.
 * @returns {string | null}
 */
export function watchToken() {
  return new URLSearchParams(location.hash.slice(1)).get('watch');
}

/** Whether the address has an access token that was not taken yet. */
export function isTokenGiven() {
  return new URLSearchParams(location.hash.slice(1)).has('token');
}

/**
 * Address at which others watch.
 * @param {string} token  Watch token.
 */
export function watchAddress(token) {
  return `${location.origin}${location.pathname}#${new URLSearchParams({ watch: token })}`;
}

/**
 * Access token of the server: taken from `#token=...` once, then kept for this tab and removed from the address.
 * @returns {string | null}
 */
export function accessToken() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const given = fragment.get('token');
  if (given !== null) {
    write('sessionStorage', ACCESS, given);
    fragment.delete('token');
    const rest = fragment.toString();
    history.replaceState(null, '', location.pathname + location.search + (rest === '' ? '' : `#${rest}`));
  }
  return given ?? read('sessionStorage', ACCESS);
}
