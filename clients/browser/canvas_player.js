'use strict';
/**
 * Plays access units through WebCodecs on a canvas, by a clock of its own: a few frames are decoded ahead, the one that is due
 * is drawn, and when the page falls behind (a hidden tab, a busy machine) whole chunks are passed over, since each begins
 * with a key frame. It knows no session rules and no keys.
 */

import { cutUnits } from './annexb.js';

/** Frames in the decoder and decoded but not drawn: enough to never wait, few enough for decoders with a small pool. */
const AHEAD_FRAMES = 6;
const KEEP_BEHIND_S = 10;
/** Nothing is drawn in a hidden tab, but what would be seen is still reported. */
const WATCH_EVERY_MS = 250;
const MICROSECONDS = 1e6;
/** Timestamps are rounded; less than half a frame at any rate we play. */
const CLOCK_ERROR_S = 0.004;

/** @typedef {{bytes: Uint8Array, mediaS: number, isKey: boolean}} Unit */

/**
 * Why this browser can't play through WebCodecs; null if it can.
 * @returns {string | null}
 */
export function missingReason() {
  if (window.VideoDecoder !== undefined) return null;
  return window.isSecureContext
    ? 'This browser has no VideoDecoder.'
    : 'Browsers offer WebCodecs only over https or on localhost.';
}

export class CanvasPlayer {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {import('./screen.js').PlayerParts} parts
   */
  constructor(canvas, { timeline, uncover, onArrival, onError }) {
    this.presentedFrames = 0;
    this.positionS = 0;
    this._canvas = canvas;
    this._timeline = timeline;
    this._uncover = uncover;
    this._onArrival = onArrival;
    this._onError = onError;
    this._mime = '';
    this._fps = 1;
    /** Where the epoch's clock starts on ours. */
    this._offsetS = 0;
    this._decoder = /** @type {VideoDecoder | null} */ (null);
    this._units = /** @type {Unit[]} */ ([]);
    this._frames = /** @type {VideoFrame[]} */ ([]);
    this._hasDrawn = false;
    this._hasShown = false;
    this._isHeld = false;
    this._rate = 1;
    this._lastMs = 0;
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this._catchUp();
    });
    setInterval(() => this._advance(performance.now()), WATCH_EVERY_MS);
    const draw = (/** @type {number} */ now) => {
      this._advance(now);
      requestAnimationFrame(draw);
    };
    requestAnimationFrame(draw);
  }

  get surface() {
    return this._canvas;
  }

  /** Width 0: there is no picture yet. */
  get pictureSize() {
    return { width: this._hasDrawn ? this._canvas.width : 0, height: this._canvas.height };
  }

  get bufferedS() {
    return Math.max(0, this._endS - this.positionS);
  }

  /**
   * @param {{mime: string, fps: number}} started
   * @param {boolean} keepPicture
   */
  beginEpoch({ mime, fps }, keepPicture) {
    if (keepPicture && mime === this._mime && this._decoder?.state === 'configured') {
      this._offsetS = this._endS;
      return;
    }
    this.stop();
    this._fps = fps;
    const reason = missingReason();
    if (reason !== null) {
      this._onError(new Error(reason));
      return;
    }
    this._mime = mime;
    const decoder = new VideoDecoder({
      output: (frame) => {
        if (decoder === this._decoder) this._frames.push(frame);
        else frame.close();
      },
      error: (error) => {
        if (decoder === this._decoder) this._onError(new Error(`the browser could not decode the video: ${error.message}`));
      },
    });
    this._decoder = decoder;
    // Without a `description` the units are Annex B and bring their parameter sets along.
    decoder.configure({ codec: /codecs="([^"]+)"/.exec(mime)?.[1] ?? '', optimizeForLatency: true });
  }

  /** The format has no init segment. */
  appendInit() {
    throw new Error('an init segment in a session of format h264');
  }

  /**
   * @param {Uint8Array} bytes
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {boolean} jump
   */
  appendChunk(bytes, header, jump) {
    if (this._decoder === null) return;
    const units = this._unitsOf(bytes, header);
    if (units === null) return;
    const startS = this._offsetS + header.pts / header.timescale;
    const isFirst = this._timeline.newest === undefined;
    if (isFirst || jump) this._goTo(startS);
    const endS = startS + units.length / this._fps;
    units.forEach((unit, at) => this._units.push({ bytes: unit, mediaS: startS + at / this._fps, isKey: at === 0 }));
    const slackS = isFirst ? null : startS - this.positionS;
    this._timeline.add(header, startS, endS);
    if (slackS !== null) {
      const { rate, isFarBehind } = this._timeline.pace(slackS, endS - startS);
      if (isFarBehind) this._catchUp();
      this._rate = rate;
    }
    this._onArrival({ bytes, header, slackS, chunkS: endS - startS });
    this._timeline.forgetBefore(this.positionS - KEEP_BEHIND_S);
    this._feed();
  }

  /**
   * @param {Uint8Array} bytes
   * @param {import('./protocol.js').ChunkHeader} header
   */
  _unitsOf(bytes, header) {
    try {
      return cutUnits(bytes, header.sizes);
    } catch (error) {
      this._onError(/** @type {Error} */ (error));
      return null;
    }
  }

  /** @param {boolean} isHeld */
  hold(isHeld) {
    this._isHeld = isHeld;
  }

  stop() {
    if (this._decoder !== null && this._decoder.state !== 'closed') this._decoder.close();
    this._decoder = null;
    for (const frame of this._frames) frame.close();
    this._frames = [];
    this._units = [];
    this._timeline.clear();
    this._offsetS = 0;
    this.positionS = 0;
    this._hasShown = false;
    this._rate = 1;
  }

  /** End of the newest chunk. */
  get _endS() {
    return this._timeline.newest?.endS ?? this.positionS;
  }

  /** @param {number} positionS */
  _goTo(positionS) {
    this.positionS = positionS;
    this._lastMs = performance.now();
  }

  /** Go to the newest whole chunk if more than that is waiting. */
  _catchUp() {
    if (this._isHeld) return;
    const edgeS = this._timeline.liveEdge(this.positionS);
    if (edgeS !== null) this._goTo(edgeS);
  }

  /**
   * Move the clock on, draw the frame that is due, and keep the decoder busy.
   * @param {number} nowMs
   */
  _advance(nowMs) {
    const passedS = Math.max(0, nowMs - this._lastMs) / 1000;
    this._lastMs = Math.max(nowMs, this._lastMs);
    // Held, the picture stands; but after a reload there is none yet, and the first one comes.
    if (this._decoder === null || (this._isHeld && this._hasShown) || this._timeline.newest === undefined) return;
    // The clock stands at the end of what has come, and before a first frame that is still being decoded.
    const isWaiting = this._isHeld || (!this._hasShown && this._frames.length === 0);
    if (!isWaiting) this.positionS = Math.min(this.positionS + passedS * this._rate, this._endS);
    this._passOver();
    this._draw(nowMs);
    this._feed();
  }

  /** Drop the units of chunks that are over, as far as the chunk on the clock can still be decoded from its start. */
  _passOver() {
    const segment = this._timeline.segments.findLast(({ startS }) => startS <= this.positionS);
    if (segment === undefined) return;
    const start = this._units.findIndex(({ isKey, mediaS }) => isKey && Math.abs(mediaS - segment.startS) < CLOCK_ERROR_S);
    if (start > 0) this._units.splice(0, start);
  }

  /** @param {number} nowMs */
  _draw(nowMs) {
    let due = /** @type {VideoFrame | undefined} */ (undefined);
    while (this._frames.length > 0 && this._frames[0].timestamp / MICROSECONDS <= this.positionS + CLOCK_ERROR_S) {
      due?.close();
      due = this._frames.shift();
    }
    if (due !== undefined) {
      this._paint(due, nowMs);
      due.close();
    } else if (document.hidden) {
      this._timeline.shown(this.positionS, nowMs);
    }
  }

  /**
   * @param {VideoFrame} frame
   * @param {number} nowMs
   */
  _paint(frame, nowMs) {
    const { displayWidth: width, displayHeight: height } = frame;
    // Setting the size clears a canvas.
    if (this._canvas.width !== width || this._canvas.height !== height) Object.assign(this._canvas, { width, height });
    this._canvas.getContext('2d')?.drawImage(frame, 0, 0, width, height);
    this._hasDrawn = true;
    this._hasShown = true;
    this.presentedFrames += 1;
    this._uncover();
    this._timeline.shown(frame.timestamp / MICROSECONDS, nowMs);
  }

  _feed() {
    const decoder = this._decoder;
    if (decoder === null || decoder.state !== 'configured') return;
    while (this._units.length > 0 && this._frames.length + decoder.decodeQueueSize < AHEAD_FRAMES) {
      const { bytes, mediaS, isKey } = /** @type {Unit} */ (this._units.shift());
      const timestamp = Math.round(mediaS * MICROSECONDS);
      decoder.decode(new EncodedVideoChunk({ type: isKey ? 'key' : 'delta', timestamp, data: bytes }));
    }
  }
}
