'use strict';
/** What lies around the picture: its colours in the margin, lit keys, and the quiet after a while without a stir. */

import { byId } from './dom.js';

const IDLE_AFTER_MS = 5000;
const AMBIENT_EVERY_FRAMES = 3;

let framesSinceAmbient = 0;

/**
 * Let the picture's colours reach around it, from a handful of pixels; a few times a second are enough.
 * @param {HTMLVideoElement | HTMLCanvasElement} surface
 */
export function paintAmbient(surface) {
  framesSinceAmbient += 1;
  if (framesSinceAmbient < AMBIENT_EVERY_FRAMES) return;
  framesSinceAmbient = 0;
  const canvas = byId('ambient');
  canvas.getContext('2d').drawImage(surface, 0, 0, canvas.width, canvas.height);
}

/**
 * Light the keys that are pressed, or those that the frame on screen had applied.
 * @param {'held' | 'applied'} kind
 * @param {string[]} actions
 */
export function lightKeys(kind, actions) {
  for (const key of document.querySelectorAll('[data-action]')) {
    key.classList.toggle(kind, actions.includes(/** @type {HTMLElement} */ (key).dataset.action ?? ''));
  }
}

/** Mark the page idle after a while without pointer, finger or focus. Steering does not disturb the view. */
export function watchIdle() {
  let timer = 0;
  const stir = () => {
    document.body.classList.remove('is-idle');
    clearTimeout(timer);
    timer = window.setTimeout(() => document.body.classList.add('is-idle'), IDLE_AFTER_MS);
  };
  for (const kind of ['pointermove', 'pointerdown', 'focusin']) addEventListener(kind, stir);
  stir();
}
