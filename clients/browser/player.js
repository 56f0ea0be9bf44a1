'use strict';
/**
 * Plays fragments through Media Source Extensions: the place of each chunk on the element's clock, and the distance to the
 * live edge. It knows no session rules and no keys.
 *
 * An epoch restarts its own clock at zero; `timestampOffset` puts it behind what is already buffered, so the picture goes on
 * without a gap. Only a broken media source is built anew, behind a still of the last frame.
 */

const KEEP_BEHIND_S = 10;
const KEEP_BEHIND_WHEN_FULL_S = 1;
const WATCH_EVERY_MS = 250;

export class SourcePlayer {
  /**
   * @param {HTMLVideoElement} video
   * @param {import('./screen.js').PlayerParts} parts
   */
  constructor(video, { timeline, cover, uncover, onArrival, onError }) {
    this.presentedFrames = 0;
    this._video = video;
    this._timeline = timeline;
    this._cover = cover;
    this._uncover = uncover;
    this._onArrival = onArrival;
    this._onError = onError;
    this._mime = '';
    this._source = /** @type {MediaSource | null} */ (null);
    this._buffer = /** @type {SourceBuffer | null} */ (null);
    this._jobs = /** @type {Job[]} */ ([]);
    this._offsetS = 0;
    this._lastFrameMs = 0;
    this._isHeld = false;
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

  get surface() {
    return this._video;
  }

  /** Width 0: there is no picture yet. */
  get pictureSize() {
    const isThere = this._video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA;
    return { width: isThere ? this._video.videoWidth : 0, height: this._video.videoHeight };
  }

  get positionS() {
    return this._video.currentTime;
  }

  get bufferedS() {
    const end = this._bufferedEnd();
    return end === null ? 0 : Math.max(0, end - this._video.currentTime);
  }

  /**
   * @param {{mime: string}} started
   * @param {boolean} keepPicture
   */
  beginEpoch({ mime }, keepPicture) {
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
   * @param {boolean} jump
   */
  appendChunk(bytes, header, jump) {
    this._jobs.push({ kind: 'append', bytes, header, jump });
    this._work();
  }

  /** @param {boolean} isHeld */
  hold(isHeld) {
    this._isHeld = isHeld;
    if (isHeld) this._video.pause();
    else this._play();
  }

  stop() {
    this._cover();
    this._dispose();
  }

  /** @param {string} mime */
  _rebuild(mime) {
    this.stop();
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
    this._timeline.clear();
    this._offsetS = 0;
    if (this._video.src !== '') {
      URL.revokeObjectURL(this._video.src);
      this._video.removeAttribute('src');
      this._video.load();
    }
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
    const video = this._video;
    const isFirst = this._timeline.newest === undefined;
    this._timeline.add(header, startS, endS);
    if (jump && startS > video.currentTime) video.currentTime = startS;
    const slackS = isFirst ? null : startS - video.currentTime;
    if (slackS !== null) {
      const { rate, isFarBehind } = this._timeline.pace(slackS, endS - startS);
      if (isFarBehind) this._catchUp();
      video.playbackRate = rate;
    }
    this._onArrival({ bytes, header, slackS, chunkS: endS - startS });
    if (!this._isHeld) this._play();
    const keepFromS = video.currentTime - KEEP_BEHIND_S;
    const oldest = this._buffer?.buffered;
    if (oldest !== undefined && oldest.length > 0 && oldest.start(0) < keepFromS - 1) {
      this._jobs.splice(1, 0, { kind: 'remove', endS: keepFromS });
      this._timeline.forgetBefore(keepFromS);
    }
  }

  /** Go to the newest whole chunk if more than that is waiting. */
  _catchUp() {
    if (this._isHeld) return;
    const edgeS = this._timeline.liveEdge(this._video.currentTime);
    if (edgeS !== null) this._video.currentTime = edgeS;
    this._play();
  }

  _play() {
    if (!this._video.paused || this._timeline.newest === undefined) return;
    this._video.play().catch((/** @type {DOMException} */ error) => {
      if (error.name !== 'AbortError') this._fail(error);
    });
  }

  /**
   * Heal what events do not tell: a position outside the buffer, and frames shown while the tab was hidden or before the place
   * of their chunk was noted, which for the only frame of a held picture may be.
   */
  _watch() {
    const video = this._video;
    const buffered = this._buffer?.buffered;
    if (buffered === undefined || buffered.length === 0) return;
    const startS = buffered.start(buffered.length - 1);
    const isBeforeBuffer = video.currentTime < startS && video.readyState < HTMLMediaElement.HAVE_FUTURE_DATA;
    if (isBeforeBuffer && !video.seeking && !this._isHeld) video.currentTime = startS;
    const isThere = video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA;
    if (isThere && performance.now() - this._lastFrameMs > 2 * WATCH_EVERY_MS) {
      this._timeline.shown(video.currentTime, performance.now());
    }
  }

  _requestFrame() {
    const video = this._video;
    if (video.requestVideoFrameCallback === undefined) {
      requestAnimationFrame((now) => {
        if (video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA) {
          this.presentedFrames = video.getVideoPlaybackQuality().totalVideoFrames;
          this._timeline.shown(video.currentTime, now);
        }
        this._requestFrame();
      });
      return;
    }
    video.requestVideoFrameCallback((now, frame) => {
      this.presentedFrames = frame.presentedFrames;
      this._lastFrameMs = performance.now();
      this._uncover();
      this._timeline.shown(frame.mediaTime, now);
      this._requestFrame();
    });
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
