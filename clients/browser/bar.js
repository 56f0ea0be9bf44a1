'use strict';
/** The buttons of the bar and the keys that do the same. */

import { byId } from './dom.js';

/**
 * @typedef {object} BarActions
 * @property {() => void} pause
 * @property {() => void} reset
 * @property {() => void} choose
 * @property {() => void} share
 * @property {() => void} save
 * @property {() => void} leave
 * @property {() => void} prompt   Write a prompt.
 */

/**
 * @param {BarActions} actions
 * @param {() => boolean} isSteering  Whether the keys belong to the world.
 * @param {() => void} focus          Give them to it.
 */
export function listenToBar(actions, isSteering, focus) {
  byId('pause').addEventListener('click', actions.pause);
  byId('reset').addEventListener('click', actions.reset);
  byId('worlds').addEventListener('click', actions.choose);
  byId('share').addEventListener('click', actions.share);
  byId('save').addEventListener('click', actions.save);
  byId('close').addEventListener('click', actions.leave);
  document.querySelector('.actions')?.addEventListener('click', (event) => {
    // After a click of the mouse the keys belong to the world again; a keyboard's focus stays where it is.
    const isPointer = /** @type {MouseEvent} */ (event).detail > 0;
    if (isPointer && isSteering()) focus();
  });
  const byKey = /** @type {Record<string, (() => void) | undefined>} */ ({
    KeyP: actions.pause,
    KeyR: actions.reset,
    KeyT: actions.prompt,
  });
  addEventListener('keydown', (event) => {
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.repeat;
    const isTyping = event.target instanceof HTMLElement && event.target.matches('input, textarea');
    const action = byKey[event.code];
    if (action === undefined || !isPlain || isTyping || !isSteering()) return;
    // The key must not end up in the box that it opens.
    event.preventDefault();
    action();
  });
}
