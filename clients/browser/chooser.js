'use strict';
/** Where a world begins: the start images on offer, an image of one's own, and a prompt. */

import { Cropper } from './crop.js';
import { byId, make } from './dom.js';
import { show, toast } from './sheets.js';

const UPLOAD_ICON = 'M12 16V5M7.5 9.5L12 5l4.5 4.5M5 19.5h14';

/**
 * @typedef {{prompt: string, image: import('./protocol.js').ImageReference}} Choice
 * @typedef {{kind: 'offered', image: import('./info.js').StartImage} | {kind: 'own', image: Blob}} Picked
 */

export class Chooser {
  /**
   * @param {object} options
   * @param {import('./info.js').ServerApi} options.api
   * @param {(choice: Choice) => void} options.onBegin
   */
  constructor({ api, onBegin }) {
    /** Pixels of a first frame. */
    this.size = { width: 0, height: 0 };
    this._cropper = new Cropper();
    this._api = api;
    this._onBegin = onBegin;
    this._picked = /** @type {Picked | null} */ (null);
    this._ownUrl = '';
    /** Which press of Begin counts: an upload that ends after the visitor went back begins nothing. */
    this._turn = 0;
    this._tiles = /** @type {HTMLButtonElement[]} */ ([]);
    byId('upload').addEventListener('change', () => {
      const [file] = byId('upload').files;
      // The same file can be chosen again.
      byId('upload').value = '';
      void this._takeFile(file);
    });
    byId('chooser-form').addEventListener('submit', (/** @type {Event} */ event) => {
      event.preventDefault();
      void this._begin();
    });
    byId('tiles').addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => this._walk(event));
    const sheet = byId('chooser');
    sheet.addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
      if (event.key === 'Escape' && !byId('chooser-cancel').hidden) byId('chooser-cancel').click();
    });
    sheet.addEventListener('dragover', (/** @type {Event} */ event) => event.preventDefault());
    sheet.addEventListener('drop', (/** @type {DragEvent} */ event) => {
      event.preventDefault();
      void this._takeFile(event.dataTransfer?.files[0]);
    });
  }

  /** @param {import('./info.js').StartImage[]} images */
  offer(images) {
    const tiles = images.map((image) => this._tile(image));
    const words = make('span', {}, icon(UPLOAD_ICON), 'Your own image');
    const own = make('button', { type: 'button', className: 'tile own' }, words);
    own.addEventListener('click', () => byId('upload').click());
    this._tiles = [...tiles, own];
    for (const tile of this._tiles) tile.setAttribute('role', 'radio');
    byId('tiles').replaceChildren(...this._tiles);
    // Whole rows where that can be.
    byId('tiles').classList.toggle('by-three', images.length % 4 !== 0 && images.length % 3 === 0);
    if (images.length > 0) this._pick(0, { kind: 'offered', image: images[0] });
  }

  /** @param {(() => void) | null} cancel  Null: there is no world to go back to. */
  open(cancel) {
    byId('chooser-cancel').hidden = cancel === null;
    byId('chooser-cancel').onclick = () => {
      this._turn += 1;
      cancel?.();
    };
    show('chooser');
    byId('begin').disabled = false;
    byId('begin').focus({ preventScroll: true });
  }

  /** @param {import('./info.js').StartImage} image */
  _tile(image) {
    const picture = make('img', { src: image.url, alt: '' });
    const tile = make('button', { type: 'button', className: 'tile' }, picture, make('span', {}, image.name));
    tile.addEventListener('click', () => this._pick(this._tiles.indexOf(tile), { kind: 'offered', image }));
    tile.addEventListener('dblclick', () => void this._begin());
    return tile;
  }

  /**
   * @param {number} index
   * @param {Picked} picked
   */
  _pick(index, picked) {
    this._picked = picked;
    this._tiles.forEach((tile, at) => {
      tile.setAttribute('aria-checked', String(at === index));
      tile.tabIndex = at === index ? 0 : -1;
    });
    if (picked.kind === 'offered') byId('chooser-prompt').value = picked.image.prompt;
  }

  /** @param {File | undefined} file */
  async _takeFile(file) {
    if (file === undefined) return;
    const picture = await createImageBitmap(file).catch(() => null);
    if (picture === null) {
      toast(`${file.name} is no picture that this browser can read.`, 'bad');
      return;
    }
    const image = await this._cropper.ask(picture, this.size);
    if (image !== null) this._takeImage(image);
  }

  /** @param {Blob} image */
  _takeImage(image) {
    URL.revokeObjectURL(this._ownUrl);
    this._ownUrl = URL.createObjectURL(image);
    const own = this._tiles[this._tiles.length - 1];
    own.querySelector('img')?.remove();
    own.prepend(make('img', { src: this._ownUrl, alt: '' }));
    this._pick(this._tiles.length - 1, { kind: 'own', image });
    byId('chooser-prompt').select();
    byId('chooser-prompt').focus();
  }

  /**
   * Arrow keys move between the tiles, as in any group of radio buttons.
   * @param {KeyboardEvent} event
   */
  _walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const from = this._tiles.indexOf(/** @type {HTMLButtonElement} */ (document.activeElement));
    if (step === undefined || from < 0) return;
    event.preventDefault();
    const next = this._tiles[(from + step + this._tiles.length) % this._tiles.length];
    next.focus();
    if (!next.classList.contains('own')) next.click();
  }

  async _begin() {
    const picked = this._picked;
    const prompt = byId('chooser-prompt').value.trim();
    if (picked === null) {
      toast('Pick a first frame, or bring your own image.', 'bad');
      return;
    }
    const turn = (this._turn += 1);
    byId('begin').disabled = true;
    try {
      const image = picked.kind === 'own' ? { upload_id: await this._api.upload(picked.image) } : { name: picked.image.name };
      if (turn === this._turn) this._onBegin({ prompt, image });
    } catch (error) {
      if (turn === this._turn) toast(`The image was not taken: ${error instanceof Error ? error.message : error}`, 'bad');
    } finally {
      byId('begin').disabled = false;
    }
  }
}

/** @param {string} path */
function icon(path) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 24 24');
  svg.setAttribute('aria-hidden', 'true');
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  line.setAttribute('d', path);
  svg.append(line);
  return svg;
}
