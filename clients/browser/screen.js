'use strict';
/**
 * The screen of the stage: picks the player for a session's format, and covers a change of player or source with a still of
 * the last frame. What it shows on is `surface`.
 *
 * @typedef {object} Arrival
 * @property {Uint8Array} bytes
 * @property {import('./protocol.js').ChunkHeader} header
 * @property {number | null} slackS  Media that was left to show; null for the first chunk after a start.
 * @property {number} chunkS         Length of the chunk.
 *
 * @typedef {object} PlayerParts
 * @property {import('./timeline.js').Timeline} timeline
 * @property {() => void} cover      Put a still of the last frame over the picture.
 * @property {() => void} uncover
 * @property {(arrival: Arrival) => void} onArrival  The browser took a chunk.
 * @property {(error: Error) => void} onError
 */

import { CanvasPlayer } from './canvas_player.js';
import { SourcePlayer } from './player.js';
import { Timeline } from './timeline.js';

export class Screen {
  /**
   * @param {object} options
   * @param {HTMLVideoElement} options.video
   * @param {HTMLCanvasElement} options.canvas
   * @param {HTMLCanvasElement} options.still   Lies over both.
   * @param {(shown: import('./timeline.js').ShownFrame) => void} options.onFrame
   * @param {(arrival: Arrival) => void} options.onArrival
   * @param {(error: Error) => void} options.onError
   */
  constructor({ video, canvas, still, onFrame, onArrival, onError }) {
    this._timeline = new Timeline(onFrame);
    this._still = still;
    this._onError = onError;
    const parts = {
      timeline: this._timeline,
      cover: () => this._cover(),
      uncover: () => (this._still.hidden = true),
      onArrival,
      onError,
    };
    this._players = { fmp4: new SourcePlayer(video, parts), h264: new CanvasPlayer(canvas, parts) };
    this._active = /** @type {SourcePlayer | CanvasPlayer} */ (this._players.fmp4);
  }

  /** Element with the picture. */
  get surface() {
    return this._active.surface;
  }

  get segments() {
    return this._timeline.segments;
  }

  get presentedFrames() {
    return this._active.presentedFrames;
  }

  /** Seconds of media ahead of the frame on screen. */
  get bufferedS() {
    return this._active.bufferedS;
  }

  /** Media time on screen, in seconds of the player's clock. */
  get positionS() {
    return this._active.positionS;
  }

  /** @param {number} leadChunks  Chunks the server may be ahead of the one on screen. */
  set leadChunks(leadChunks) {
    this._timeline.leadChunks = leadChunks;
  }

  /**
   * Begin an epoch: its clock starts at zero, its init segment follows if the format has one.
   * @param {{format: string, mime: string | null, fps: number}} started
   * @param {boolean} keepPicture  Whether what is buffered belongs to the same world and plays on.
   */
  beginEpoch({ format, mime, fps }, keepPicture) {
    const player = /** @type {Record<string, SourcePlayer | CanvasPlayer | undefined>} */ (this._players)[format];
    if (player === undefined || mime === null) {
      this._onError(new Error(`this page plays the formats fmp4 and h264, and this session is in ${format}`));
      return;
    }
    const isOther = player !== this._active;
    if (isOther) {
      this._cover();
      this._active.stop();
      this._active.surface.hidden = true;
      this._active = player;
      player.surface.hidden = false;
    }
    player.beginEpoch({ mime, fps }, keepPicture && !isOther);
  }

  /** @param {Uint8Array} bytes */
  appendInit(bytes) {
    this._active.appendInit(bytes);
  }

  /**
   * @param {Uint8Array} bytes
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {boolean} jump  Show this chunk as soon as it is there, whatever is still queued before it.
   */
  appendChunk(bytes, header, jump) {
    this._active.appendChunk(bytes, header, jump);
  }

  /**
   * Freeze the picture, or go on.
   * @param {boolean} isHeld
   */
  hold(isHeld) {
    this._active.hold(isHeld);
  }

  /** Forget all media but leave the last frame standing. */
  stop() {
    this._active.stop();
  }

  _cover() {
    const { width, height } = this._active.pictureSize;
    if (width === 0) return;
    this._still.width = width;
    this._still.height = height;
    this._still.getContext('2d')?.drawImage(this._active.surface, 0, 0);
    this._still.hidden = false;
  }
}
