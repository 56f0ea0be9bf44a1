'use strict';
/** Lets the visitor choose the part of a picture that becomes the first frame: drag, zoom, and see exactly what is used. */

import { byId } from './dom.js';

const MOST_ZOOM = 6;
const KEY_STEP = 0.03;
const WHEEL_STEP = 4;
/** The frame is sent at up to this many times the model's size: scaling down again costs little, and softens nothing. */
const MOST_SCALE = 2;
const JPEG_QUALITY = 0.95;

/** The part of a picture with the shape of a frame: `zoom` 1 is the largest, `centreX` and `centreY` are shares. */
export class CropWindow {
  /**
   * @param {{width: number, height: number}} picture
   * @param {{width: number, height: number}} frame
   */
  constructor(picture, frame) {
    this._picture = picture;
    const scale = Math.min(picture.width / frame.width, picture.height / frame.height);
    this._full = { width: frame.width * scale, height: frame.height * scale };
    this._zoom = 1;
    this._centre = { x: picture.width / 2, y: picture.height / 2 };
  }

  /** @param {number} zoom  1 or more. */
  set zoom(zoom) {
    this._zoom = Math.max(1, Math.min(MOST_ZOOM, zoom));
    this.move(0, 0);
  }

  get zoom() {
    return this._zoom;
  }

  /** Pixels of the picture. */
  get box() {
    const width = this._full.width / this._zoom;
    const height = this._full.height / this._zoom;
    return { x: this._centre.x - width / 2, y: this._centre.y - height / 2, width, height };
  }

  /**
   * Move over the picture, never beyond it.
   * @param {number} right  In widths of the window.
   * @param {number} down   In heights of the window.
   */
  move(right, down) {
    const { width, height } = this.box;
    this._centre = {
      x: clamped(this._centre.x + right * width, width / 2, this._picture.width - width / 2),
      y: clamped(this._centre.y + down * height, height / 2, this._picture.height - height / 2),
    };
  }
}

/**
 * @param {number} value
 * @param {number} least
 * @param {number} most
 */
function clamped(value, least, most) {
  return Math.max(least, Math.min(most, value));
}

export class Cropper {
  constructor() {
    this._view = /** @type {HTMLCanvasElement} */ (byId('crop-view'));
    this._picture = /** @type {ImageBitmap | null} */ (null);
    this._window = new CropWindow({ width: 1, height: 1 }, { width: 1, height: 1 });
    this._answer = (/** @type {Blob | null} */ _blob) => {};
    byId('crop-zoom').addEventListener('input', () => {
      this._window.zoom = MOST_ZOOM ** (byId('crop-zoom').value / 100);
      this._draw();
    });
    this._view.addEventListener('keydown', (event) => this._step(event));
    this._view.addEventListener('wheel', (event) => this._turn(event), { passive: false });
    this._view.addEventListener('pointerdown', (event) => this._view.setPointerCapture(event.pointerId));
    this._view.addEventListener('pointermove', (event) => this._drag(event));
    byId('crop-use').addEventListener('click', () => {
      this._view.toBlob((blob) => this._finish(blob), 'image/jpeg', JPEG_QUALITY);
    });
    byId('crop-cancel').addEventListener('click', () => this._finish(null));
    byId('crop').addEventListener('cancel', () => this._finish(null));
  }

  /**
   * Ask which part of a picture to use.
   * @param {ImageBitmap} picture  Closed in the end.
   * @param {{width: number, height: number}} frame  Pixels of a first frame.
   * @returns {Promise<Blob | null>}  A JPEG; null: the visitor did not want to.
   */
  ask(picture, frame) {
    this._picture = picture;
    this._window = new CropWindow(picture, frame);
    const scale = clamped(picture.width / frame.width, 1, MOST_SCALE);
    this._view.width = Math.round(frame.width * scale);
    this._view.height = Math.round(frame.height * scale);
    byId('crop-zoom').value = 0;
    byId('crop-size').textContent = `${picture.width} × ${picture.height} to ${frame.width} × ${frame.height}`;
    this._draw();
    byId('crop').showModal();
    this._view.focus();
    return new Promise((resolve) => (this._answer = resolve));
  }

  /** @param {Blob | null} blob */
  _finish(blob) {
    this._picture?.close();
    this._picture = null;
    byId('crop').close();
    this._answer(blob);
  }

  _draw() {
    const context = this._view.getContext('2d');
    if (this._picture === null || context === null) return;
    const { x, y, width, height } = this._window.box;
    // See-through parts are shown on white by the server, too.
    context.fillStyle = '#fff';
    context.fillRect(0, 0, this._view.width, this._view.height);
    context.imageSmoothingQuality = 'high';
    context.drawImage(this._picture, x, y, width, height, 0, 0, this._view.width, this._view.height);
  }

  /** @param {KeyboardEvent} event */
  _step(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this._window.move(step[0] * KEY_STEP, step[1] * KEY_STEP);
    this._draw();
  }

  /** @param {WheelEvent} event */
  _turn(event) {
    event.preventDefault();
    const slider = byId('crop-zoom');
    slider.value = Number(slider.value) - Math.sign(event.deltaY) * WHEEL_STEP;
    slider.dispatchEvent(new Event('input'));
  }

  /** @param {PointerEvent} event */
  _drag(event) {
    if (!this._view.hasPointerCapture(event.pointerId)) return;
    this._window.move(-event.movementX / this._view.clientWidth, -event.movementY / this._view.clientHeight);
    this._draw();
  }
}
