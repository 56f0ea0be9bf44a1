'use strict';
/** The card behind the state of the link: why it is as it is, what can be done, and a report to copy. */

import { byId, make } from './dom.js';
import { current, showLink } from './sheets.js';
import { sentence } from './words.js';

const KEEP_NOTES = 40;
/** What a browser reports when the other side did not close (RFC 6455, 7.4.1). */
const CLOSED_ABNORMALLY = 1006;

export class LinkCard {
  /**
   * @param {object} options
   * @param {() => [string, string][]} options.facts    Of the session, in words.
   * @param {() => void} options.retry                  Try again at once.
   */
  constructor({ facts, retry }) {
    this._facts = facts;
    this._notes = /** @type {string[]} */ ([]);
    this._isOpenedByItself = false;
    byId('link').addEventListener('click', () => this._show(byId('link-card').hidden, false));
    byId('link-retry').addEventListener('click', retry);
    for (const id of ['link-copy', 'trouble-copy']) byId(id).addEventListener('click', () => void this.copy(byId(id)));
    addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && !byId('link-card').hidden) this._show(false, false);
    });
  }

  /**
   * The link is in another state.
   * @param {import('./connection.js').LinkState} state
   * @param {import('./connection.js').LinkDetail} detail
   */
  note(state, detail) {
    const { attempt, delayMs, position, error, closeCode } = detail;
    const facts = Object.entries({ attempt, delayMs, position, closeCode, error: error?.code });
    const known = facts.filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${value}`);
    this._notes.push([new Date().toISOString(), state, ...known].join(' '));
    this._notes = this._notes.slice(-KEEP_NOTES);
    const isBroken = state === 'waiting';
    byId('link-retry').hidden = !isBroken && state !== 'lost';
    byId('link-reason').textContent = reasonOf(state, detail);
    const inShort = shortOf(state, detail);
    if (inShort !== null) showLink(...inShort);
    // What is in the middle of the page says more, and has a button of its own.
    if (isBroken && current() !== 'trouble') this._show(true, true);
    else if (this._isOpenedByItself && state !== 'connecting') this._show(false, false);
    else if (!byId('link-card').hidden) this._fill();
  }

  /**
   * Put a report into the clipboard. It has no token and no prompt.
   * @param {HTMLElement} button  Says so for a moment.
   */
  async copy(button) {
    const facts = [...this._facts(), ['Browser', navigator.userAgent], ['Page', location.origin]];
    const lines = [...facts.map(([name, value]) => `${name}: ${value}`), '', 'Link:', ...this._notes];
    await copyText(['worldserve diagnostics', ...lines].join('\n'), button);
  }

  /**
   * @param {boolean} shown
   * @param {boolean} byItself
   */
  _show(shown, byItself) {
    this._isOpenedByItself = shown && byItself;
    byId('link-card').hidden = !shown;
    byId('link').ariaExpanded = String(shown);
    if (shown) this._fill();
  }

  _fill() {
    const rows = this._facts().map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', {}, value)));
    byId('link-facts').replaceChildren(...rows);
  }
}

/**
 * The state for the bar. Null: what is on the page says it better.
 * @param {import('./connection.js').LinkState} state
 * @param {import('./connection.js').LinkDetail} detail
 * @returns {[string, 'busy' | 'bad'] | null}
 */
function shortOf(state, { attempt, delayMs }) {
  switch (state) {
    case 'connecting':
      return [attempt ? 'Reconnecting' : 'Connecting', 'busy'];
    case 'queued':
      return ['In the queue', 'busy'];
    case 'waiting':
      return [`Link lost, again in ${(delayMs ?? 0) / 1000} s`, 'busy'];
    case 'lost':
      return ['Link lost', 'bad'];
    default:
      return null;
  }
}

/**
 * @param {import('./connection.js').LinkState} state
 * @param {import('./connection.js').LinkDetail} detail
 */
function reasonOf(state, { attempt, delayMs, position, error, closeCode }) {
  const isCut = closeCode === undefined || closeCode === CLOSED_ABNORMALLY;
  const cause = sentence(error?.message ?? (isCut ? 'The link broke.' : `The server closed the link (${closeCode}).`));
  switch (state) {
    case 'connecting':
      return attempt ? 'Coming back to the world.' : 'Opening the link.';
    case 'queued':
      return `All worlds are taken; number ${position} in the queue.`;
    case 'live':
      return 'Everything is well.';
    case 'waiting':
      return `${cause} Trying again in ${(delayMs ?? 0) / 1000} s, attempt ${attempt} of 3. The world waits.`;
    case 'lost':
      return `${cause} Three attempts failed.`;
    case 'ended':
      return sentence(error?.message ?? 'The session is over.');
    default:
      return 'Not connected yet.';
  }
}

/**
 * Put text into the clipboard, or show it where the browser does not allow that.
 * @param {string} text
 * @param {HTMLElement} button  Says so for a moment.
 */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    byId('copy-text').value = text;
    byId('copy').showModal();
    byId('copy-text').select();
    return;
  }
  const label = button.querySelector('span') ?? button;
  const before = label.dataset.label ?? label.textContent ?? '';
  label.dataset.label = before;
  label.textContent = 'Copied';
  setTimeout(() => (label.textContent = before), 1500);
}
