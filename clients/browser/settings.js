'use strict';
/** What the visitor likes: appearance, how the video is played, and what is shown beside it. */

import { missingReason } from './canvas_player.js';
import { byId } from './dom.js';
import { loadPreferences, savePreferences } from './store.js';

/** A phone has no room for the numbers beside the picture; elsewhere the true rate is in sight from the start. */
const HAS_ROOM = '(min-width: 721px) and (min-height: 521px)';
const FORMAT_NOTES = Object.freeze({
  fmp4: 'Fragments of MP4, buffered by the browser. Works everywhere.',
  h264: 'Frames are decoded one by one and drawn when they are due.',
});

export class Settings {
  /** @param {(preferences: import('./store.js').Preferences) => void} onChange */
  constructor(onChange) {
    this._onChange = onChange;
    const hasRoom = window.matchMedia(HAS_ROOM).matches;
    this._missing = missingReason();
    const defaults = /** @type {const} */ ({ theme: 'system', format: 'fmp4', keys: true });
    this.values = loadPreferences({ ...defaults, map: hasRoom, numbers: hasRoom });
    if (this._missing !== null) this.values = { ...this.values, format: defaults.format };
    this._fill();
    this._apply();
    byId('settings-open').addEventListener('click', () => this.open());
    byId('settings').addEventListener('change', (/** @type {Event} */ event) => {
      this._take(/** @type {HTMLInputElement} */ (event.target));
    });
    byId('settings-help').addEventListener('click', () => {
      byId('settings').close();
      byId('help').showModal();
    });
    for (const [id, name] of /** @type {const} */ ([['map-card', 'map'], ['hud', 'numbers']])) {
      byId(id).addEventListener('toggle', () => this.set(name, byId(id).open));
    }
  }

  open() {
    this._fill();
    byId('settings').showModal();
  }

  /**
   * @template {keyof import('./store.js').Preferences} Name
   * @param {Name} name
   * @param {import('./store.js').Preferences[Name]} value
   */
  set(name, value) {
    if (this.values[name] === value) return;
    // A card says a little later that it was opened or closed; until then it must not be put back for another's sake.
    this.values = { ...this.values, map: byId('map-card').open, numbers: byId('hud').open, [name]: value };
    savePreferences(this.values);
    this._fill();
    this._apply();
    this._onChange(this.values);
  }

  /** @param {HTMLInputElement} input */
  _take(input) {
    const name = /** @type {keyof import('./store.js').Preferences} */ (input.name);
    this.set(name, /** @type {any} */ (input.type === 'checkbox' ? input.checked : input.value));
  }

  _fill() {
    for (const input of byId('settings').querySelectorAll('input')) {
      const value = this.values[/** @type {keyof import('./store.js').Preferences} */ (input.name)];
      input.checked = input.type === 'checkbox' ? value === true : input.value === value;
      if (input.value === 'h264') input.disabled = this._missing !== null;
    }
    byId('format-note').textContent = `${this._missing ?? FORMAT_NOTES[this.values.format]} Counts from the next world on.`;
  }

  _apply() {
    const { theme, keys, map, numbers } = this.values;
    if (theme === 'system') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    document.body.classList.toggle('no-keys', !keys);
    byId('map-card').open = map;
    byId('hud').open = numbers;
  }
}
