'use strict';
/**
 * Plays chunks as they arrive: Media Source Extensions, the place of each chunk on the element's clock, the distance to the
 * live edge, and who has been shown when. It knows no session rules and no keys.
 *
 * An epoch restarts its own clock at zero; `timestampOffset` puts it behind what is already buffered, so the picture goes on
 * without a gap. Only a broken media source is built anew, behind a still of the last frame.
 *
 * @typedef {object} Segment
 * @property {number} epoch
 * @property {number} run
 * @property {number} chunkIndex
 * @property {number} startS      On the element's clock.
 * @property {number} endS
 * @property {number} numFrames
 *
 * @typedef {object} ShownFrame
 * @property {Segment} segment
 * @property {number} frame          Media frame inside the chunk.
 * @property {boolean} isFirstOfChunk  First report of this chunk.
 * @property {number} shownMs        `performance.now()` clock.
 *
 * @typedef {object} Arrival
 * @property {Uint8Array} bytes
 * @property {import('./protocol.js').ChunkHeader} header
 * @property {number | null} slackS  Media that was left to show; null for the first chunk of a media source.
 * @property {number} chunkS         Length of the chunk.
 */

const KEEP_BEHIND_S = 10;
const KEEP_BEHIND_WHEN_FULL_S = 1;
/** Chunks waiting beyond what the server may be ahead, above which playback hurries, or jumps. */
const HURRY_BEYOND_CHUNKS = 0.5;
const JUMP_BEYOND_CHUNKS = 2;
const HURRY_RATE = 1.08;
const SLOWEST_RATE = 0.6;
const RATE_STEP = 0.05;
/** Seconds left when a chunk arrives: below the first, slow down a little; above the second, speed up again. */
const TIGHT_S = 0.06;
const ROOMY_S = 0.3;
const WATCH_EVERY_MS = 250;

export class Player {
  /**
   * @param {object} options
   * @param {HTMLVideoElement} options.video
   * @param {HTMLCanvasElement} options.still   Lies over the video; shows the last frame while the source is replaced.
   * @param {(shown: ShownFrame) => void} options.onFrame
   * @param {(arrival: Arrival) => void} options.onArrival  The browser took a chunk.
   * @param {(error: Error) => void} options.onError
   */
  constructor({ video, still, onFrame, onArrival, onError }) {
    /** Chunks the server may be ahead of the one on screen. */
    this.leadChunks = 1;
    this.segments = /** @type {Segment[]} */ ([]);
    this.presentedFrames = 0;
    this._video = video;
    this._still = still;
    this._onFrame = onFrame;
    this._onArrival = onArrival;
    this._onError = onError;
    this._mime = '';
    this._source = /** @type {MediaSource | null} */ (null);
    this._buffer = /** @type {SourceBuffer | null} */ (null);
    this._jobs = /** @type {Job[]} */ ([]);
    this._offsetS = 0;
    this._shownKey = '';
    this._lastFrameMs = 0;
    this._isHeld = false;
    this._steadyRate = 1;
    video.muted = true;
    video.addEventListener('error', () => {
      this._fail(new Error(`the browser could not decode the video: ${video.error?.message}`));
    });
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this._catchUp();
    });
    setInterval(() => this._watch(), WATCH_EVERY_MS);
    this._requestFrame();
  }

  /** Seconds of media ahead of the frame on screen. */
  get bufferedS() {
    const end = this._bufferedEnd();
    return end === null ? 0 : Math.max(0, end - this._video.currentTime);
  }

  /**
   * Begin an epoch: its init segment follows, and its clock starts at zero.
   * @param {string} mime
   * @param {boolean} keepPicture  Whether what is buffered belongs to the same world and plays on.
   */
  beginEpoch(mime, keepPicture) {
    const isUsable = this._source?.readyState === 'open' && this._video.error === null;
    if (keepPicture && isUsable && mime === this._mime) {
      this._jobs.push({ kind: 'rebase' });
      this._work();
      return;
    }
    this._rebuild(mime);
  }

  /** @param {Uint8Array} bytes */
  appendInit(bytes) {
    this._jobs.push({ kind: 'append', bytes, header: null, jump: false });
    this._work();
  }

  /**
   * @param {Uint8Array} bytes
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {boolean} jump  Show this chunk as soon as it is there, whatever is still queued before it.
   */
  appendChunk(bytes, header, jump) {
    this._jobs.push({ kind: 'append', bytes, header, jump });
    this._work();
  }

  /**
   * Freeze the picture, or go on.
   * @param {boolean} isHeld
   */
  hold(isHeld) {
    this._isHeld = isHeld;
    if (isHeld) this._video.pause();
    else this._play();
  }

  /** Forget all media but leave the last frame standing. */
  stop() {
    this._freeze();
    this._dispose();
  }

  /** @param {string} mime */
  _rebuild(mime) {
    this._freeze();
    this._dispose();
    const Source = window.ManagedMediaSource ?? window.MediaSource;
    if (Source === undefined || !Source.isTypeSupported(mime)) {
      this._fail(new Error(`this browser cannot play ${mime}`));
      return;
    }
    this._mime = mime;
    const source = new Source();
    this._source = source;
    this._video.disableRemotePlayback = true;
    source.addEventListener('sourceopen', () => {
      if (source !== this._source || this._buffer !== null) return;
      URL.revokeObjectURL(this._video.src);
      const buffer = source.addSourceBuffer(mime);
      this._buffer = buffer;
      buffer.addEventListener('updateend', () => this._work());
      this._work();
    });
    this._video.src = URL.createObjectURL(source);
  }

  _dispose() {
    this._jobs = [];
    this._source = null;
    this._buffer = null;
    this.segments = [];
    this._offsetS = 0;
    this._shownKey = '';
    this._steadyRate = 1;
    if (this._video.src !== '') {
      URL.revokeObjectURL(this._video.src);
      this._video.removeAttribute('src');
      this._video.load();
    }
  }

  _freeze() {
    const { videoWidth: width, videoHeight: height } = this._video;
    if (width === 0 || this._video.readyState < HTMLMediaElement.HAVE_CURRENT_DATA) return;
    this._still.width = width;
    this._still.height = height;
    this._still.getContext('2d')?.drawImage(this._video, 0, 0);
    this._still.hidden = false;
  }

  /** Do queued jobs until the source buffer is busy. */
  _work() {
    const buffer = this._buffer;
    while (buffer !== null && !buffer.updating && this._jobs.length > 0 && this._source?.readyState === 'open') {
      const job = this._jobs[0];
      try {
        if (!this._do(job, buffer)) return;
      } catch (error) {
        this._fail(error instanceof Error ? error : new Error(String(error)));
        return;
      }
    }
  }

  /**
   * Start a job and take it off the queue, or put a removal before it when the buffer is full.
   * @param {Job} job
   * @param {SourceBuffer} buffer
   * @returns {boolean}  False: nothing can be done now.
   */
  _do(job, buffer) {
    switch (job.kind) {
      case 'rebase':
        buffer.abort();
        this._offsetS = this._bufferedEnd() ?? 0;
        buffer.timestampOffset = this._offsetS;
        break;
      case 'remove':
        if (job.endS > 0) buffer.remove(0, job.endS);
        break;
      case 'placed':
        this._placed(job.bytes, job.header, job.jump);
        break;
      case 'append':
        try {
          buffer.appendBuffer(/** @type {BufferSource} */ (job.bytes));
        } catch (error) {
          if (!(error instanceof DOMException) || error.name !== 'QuotaExceededError') throw error;
          return this._makeRoom(buffer);
        }
        if (job.header !== null) this._jobs.splice(1, 0, { ...job, kind: 'placed', header: job.header });
        break;
    }
    this._jobs.shift();
    return true;
  }

  /** @param {SourceBuffer} buffer */
  _makeRoom(buffer) {
    const endS = this._video.currentTime - KEEP_BEHIND_WHEN_FULL_S;
    if (buffer.buffered.length === 0 || buffer.buffered.start(0) >= endS) {
      throw new Error('the browser has no room left for the video');
    }
    this._jobs.unshift({ kind: 'remove', endS });
    return true;
  }

  /**
   * A chunk is in the buffer: note its place, start or steady playback, drop what is long past.
   * @param {Uint8Array} bytes
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {boolean} jump
   */
  _placed(bytes, header, jump) {
    const startS = this._offsetS + header.pts / header.timescale;
    const endS = this._bufferedEnd() ?? startS;
    const chunkIndex = /** @type {number} */ (header.chunk_index);
    const { epoch, run, num_frames: numFrames } = header;
    const video = this._video;
    const isFirst = this.segments.length === 0;
    this.segments.push({ epoch, run, chunkIndex, startS, endS, numFrames });
    if (jump && startS > video.currentTime) video.currentTime = startS;
    const slackS = isFirst ? null : startS - video.currentTime;
    if (slackS !== null) this._steady(slackS, endS - startS);
    this._onArrival({ bytes, header, slackS, chunkS: endS - startS });
    if (!this._isHeld) this._play();
    const keepFromS = video.currentTime - KEEP_BEHIND_S;
    const oldest = this._buffer?.buffered;
    if (oldest !== undefined && oldest.length > 0 && oldest.start(0) < keepFromS - 1) {
      this._jobs.splice(1, 0, { kind: 'remove', endS: keepFromS });
      this.segments = this.segments.filter((segment) => segment.endS > keepFromS);
    }
  }

  /**
   * Choose the playback rate. A world made slower than real time plays a little slower instead of stopping at each chunk.
   * @param {number} slackS   Media that was left when the chunk arrived.
   * @param {number} chunkS
   */
  _steady(slackS, chunkS) {
    if (slackS < TIGHT_S) this._steadyRate = Math.max(SLOWEST_RATE, this._steadyRate - RATE_STEP);
    else if (slackS > ROOMY_S) this._steadyRate = Math.min(1, this._steadyRate + RATE_STEP);
    const beyondS = slackS - (this.leadChunks + 1) * chunkS;
    if (beyondS > JUMP_BEYOND_CHUNKS * chunkS) this._catchUp();
    this._video.playbackRate = beyondS > HURRY_BEYOND_CHUNKS * chunkS ? HURRY_RATE : this._steadyRate;
  }

  /** Go to the newest whole chunk if more than that is waiting. */
  _catchUp() {
    if (this._isHeld) return;
    const newest = this.segments.at(-1);
    if (newest !== undefined && newest.startS - this._video.currentTime > newest.endS - newest.startS) {
      this._video.currentTime = newest.startS;
    }
    this._play();
  }

  _play() {
    if (!this._video.paused || this.segments.length === 0) return;
    this._video.play().catch((/** @type {DOMException} */ error) => {
      if (error.name !== 'AbortError') this._fail(error);
    });
  }

  /** Heal what events do not tell: a position outside the buffer, and frames shown while the tab was hidden. */
  _watch() {
    const video = this._video;
    const buffered = this._buffer?.buffered;
    if (buffered === undefined || buffered.length === 0 || this._isHeld) return;
    const startS = buffered.start(buffered.length - 1);
    const isBeforeBuffer = video.currentTime < startS && video.readyState < HTMLMediaElement.HAVE_FUTURE_DATA;
    if (isBeforeBuffer && !video.seeking) video.currentTime = startS;
    if (performance.now() - this._lastFrameMs > 2 * WATCH_EVERY_MS) this._shown(video.currentTime, performance.now());
  }

  _requestFrame() {
    const video = this._video;
    if (video.requestVideoFrameCallback === undefined) {
      requestAnimationFrame((now) => {
        if (video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA) {
          this.presentedFrames = video.getVideoPlaybackQuality().totalVideoFrames;
          this._shown(video.currentTime, now);
        }
        this._requestFrame();
      });
      return;
    }
    video.requestVideoFrameCallback((now, frame) => {
      this.presentedFrames = frame.presentedFrames;
      this._lastFrameMs = performance.now();
      this._still.hidden = true;
      this._shown(frame.mediaTime, now);
      this._requestFrame();
    });
  }

  /**
   * @param {number} mediaS
   * @param {number} shownMs
   */
  _shown(mediaS, shownMs) {
    const segment = this.segments.findLast((candidate) => candidate.startS <= mediaS + 0.002);
    if (segment === undefined) return;
    const frameS = (segment.endS - segment.startS) / segment.numFrames;
    const frame = Math.min(segment.numFrames - 1, Math.floor((mediaS - segment.startS + 0.002) / frameS));
    const key = `${segment.epoch}/${segment.run}/${segment.chunkIndex}`;
    const isFirstOfChunk = key !== this._shownKey;
    this._shownKey = key;
    this._onFrame({ segment, frame, isFirstOfChunk, shownMs });
  }

  /** @returns {number | null} */
  _bufferedEnd() {
    const buffered = this._buffer?.buffered;
    return buffered === undefined || buffered.length === 0 ? null : buffered.end(buffered.length - 1);
  }

  /** @param {Error} error */
  _fail(error) {
    this._jobs = [];
    this._onError(error);
  }
}

/**
 * @typedef {{kind: 'append', bytes: Uint8Array, header: import('./protocol.js').ChunkHeader | null, jump: boolean}
 *   | {kind: 'placed', bytes: Uint8Array, header: import('./protocol.js').ChunkHeader, jump: boolean}
 *   | {kind: 'remove', endS: number}
 *   | {kind: 'rebase'}} Job
 */
