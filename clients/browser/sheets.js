'use strict';
/** The sheets that lie over the stage when there is no world to see yet, or no longer: one at a time. */

import { byId, make } from './dom.js';
import { STAGES } from './info.js';
import { sentence } from './words.js';

/** @typedef {'loading' | 'chooser' | 'waiting' | 'trouble' | 'world'} View */

/** @param {View} view */
export function show(view) {
  for (const id of ['loading', 'chooser', 'waiting', 'trouble']) byId(id).hidden = id !== view;
  document.body.dataset.view = view;
}

/** @returns {View} */
export function current() {
  return /** @type {View} */ (document.body.dataset.view);
}

/**
 * Show how far loading has come.
 * @param {import('./info.js').ServerInfo | null} info  Null: the server is not reachable.
 */
export function showLoading(info) {
  if (byId('loading').hidden) show('loading');
  byId('loading-lead').textContent = loadingLead(info);
  byId('loading-stages').hidden = info === null;
  const names = Object.keys(STAGES);
  const load = info?.load ?? { stage: names[0], fraction: 0, detail: '' };
  const reached = load.stage === 'ready' ? names.length : names.indexOf(load.stage);
  const done = Math.min(1, (reached + (load.stage === 'ready' ? 0 : load.fraction)) / names.length);
  byId('loading-bar').style.setProperty('--done', String(done));
  byId('loading-bar').ariaValueNow = String(Math.round(done * 100));
  const rows = Object.values(STAGES).map((words, index) => {
    const state = index < reached ? 'Done' : index === reached ? `${Math.round(load.fraction * 100)} %` : '';
    const row = make('li', { className: index < reached ? 'done' : '' }, make('span', {}, words), make('span', {}, state));
    if (index === reached) row.setAttribute('aria-current', 'step');
    return row;
  });
  byId('loading-stages').replaceChildren(...rows);
}

/** @param {import('./info.js').ServerInfo | null} info */
function loadingLead(info) {
  if (info === null) return 'The server does not answer yet. Asking again.';
  if (info.status === 'loading' || info.reason === null) return 'The model is loading. This happens once.';
  return `Not yet: ${info.reason}.`;
}

/**
 * @param {string} title
 * @param {string} text
 * @param {(() => void) | null} cancel
 */
export function showWaiting(title, text, cancel) {
  byId('waiting-title').textContent = title;
  byId('waiting-lead').textContent = text;
  byId('waiting-cancel').hidden = cancel === null;
  byId('waiting-cancel').onclick = cancel;
  const isNew = byId('waiting').hidden;
  show('waiting');
  // Else the focus would be nowhere, with the button that led here hidden. Not on Cancel, which a second Enter would press.
  if (isNew) byId('waiting').focus({ preventScroll: true });
}

/**
 * Say what went wrong and what can be done.
 * @param {object} trouble
 * @param {string} trouble.title
 * @param {string} trouble.text
 * @param {{label: string, run: () => void}} trouble.retry
 * @param {{label: string, run: () => void} | null} trouble.choose
 */
export function showTrouble({ title, text, retry, choose }) {
  byId('trouble-title').textContent = title;
  byId('trouble-text').textContent = sentence(text);
  byId('trouble-retry').textContent = retry.label;
  byId('trouble-retry').onclick = retry.run;
  byId('trouble-new').hidden = choose === null;
  byId('trouble-new').textContent = choose?.label ?? '';
  byId('trouble-new').onclick = choose?.run ?? null;
  show('trouble');
  byId('trouble-retry').focus();
}

let toastTimer = 0;

/**
 * Say something in passing.
 * @param {string} text
 * @param {'plain' | 'bad'} [tone]
 */
export function toast(text, tone = 'plain') {
  const element = byId('toast');
  element.textContent = text;
  element.dataset.tone = tone;
  element.classList.add('is-shown');
  clearTimeout(toastTimer);
  toastTimer = window.setTimeout(() => element.classList.remove('is-shown'), 4000);
}

/**
 * State of the link in the top corner.
 * @param {string} text
 * @param {'good' | 'busy' | 'bad' | 'none'} tone
 */
export function showLink(text, tone) {
  if (byId('link-text').textContent !== text) byId('link-text').textContent = text;
  byId('link').dataset.tone = tone;
}
