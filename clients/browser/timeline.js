'use strict';
/**
 * Where each chunk lies on a player's clock, which frame of it is on screen, and how fast to play. It knows no element and
 * no decoder, so the players share it.
 *
 * @typedef {object} Segment
 * @property {number} epoch
 * @property {number} run
 * @property {number} chunkIndex
 * @property {number} startS      On the player's clock.
 * @property {number} endS
 * @property {number} numFrames
 *
 * @typedef {object} ShownFrame
 * @property {Segment} segment
 * @property {number} frame          Media frame inside the chunk.
 * @property {boolean} isFirstOfChunk  First report of this chunk.
 * @property {number} shownMs        `performance.now()` clock.
 */

/** Chunks waiting beyond what the server may be ahead, above which playback hurries, or jumps. */
const HURRY_BEYOND_CHUNKS = 0.5;
const JUMP_BEYOND_CHUNKS = 2;
const HURRY_RATE = 1.08;
const SLOWEST_RATE = 0.6;
const RATE_STEP = 0.05;
/** Seconds left when a chunk arrives: below the first, slow down a little; above the second, speed up again. */
const TIGHT_S = 0.06;
const ROOMY_S = 0.3;
/** Clocks of elements are not exact; less than half a frame at any rate we play. */
const CLOCK_ERROR_S = 0.002;

export class Timeline {
  /** @param {(shown: ShownFrame) => void} onFrame */
  constructor(onFrame) {
    /** Chunks the server may be ahead of the one on screen. */
    this.leadChunks = 1;
    this.segments = /** @type {Segment[]} */ ([]);
    this._onFrame = onFrame;
    this._shownKey = '';
    this._steadyRate = 1;
  }

  /** @returns {Segment | undefined} */
  get newest() {
    return this.segments.at(-1);
  }

  clear() {
    this.segments = [];
    this._shownKey = '';
    this._steadyRate = 1;
  }

  /**
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {number} startS
   * @param {number} endS
   */
  add(header, startS, endS) {
    const { epoch, run, num_frames: numFrames } = header;
    this.segments.push({ epoch, run, chunkIndex: /** @type {number} */ (header.chunk_index), startS, endS, numFrames });
  }

  /** @param {number} keepFromS */
  forgetBefore(keepFromS) {
    this.segments = this.segments.filter((segment) => segment.endS > keepFromS);
  }

  /**
   * Choose the playback rate when a chunk has arrived. A world made slower than real time plays a little slower instead of
   * stopping at each chunk.
   * @param {number} slackS   Media that was left when the chunk arrived.
   * @param {number} chunkS
   * @returns {{rate: number, isFarBehind: boolean}}  `isFarBehind`: hurrying is not enough.
   */
  pace(slackS, chunkS) {
    if (slackS < TIGHT_S) this._steadyRate = Math.max(SLOWEST_RATE, this._steadyRate - RATE_STEP);
    else if (slackS > ROOMY_S) this._steadyRate = Math.min(1, this._steadyRate + RATE_STEP);
    const beyondS = slackS - (this.leadChunks + 1) * chunkS;
    const rate = beyondS > HURRY_BEYOND_CHUNKS * chunkS ? HURRY_RATE : this._steadyRate;
    return { rate, isFarBehind: beyondS > JUMP_BEYOND_CHUNKS * chunkS };
  }

  /**
   * Start of the newest whole chunk, if more than that waits behind a position.
   * @param {number} positionS
   * @returns {number | null}
   */
  liveEdge(positionS) {
    const newest = this.newest;
    if (newest === undefined || newest.startS - positionS <= newest.endS - newest.startS) return null;
    return newest.startS;
  }

  /**
   * The frame at a media time is on screen.
   * @param {number} mediaS
   * @param {number} shownMs
   */
  shown(mediaS, shownMs) {
    const segment = this.segments.findLast((candidate) => candidate.startS <= mediaS + CLOCK_ERROR_S);
    if (segment === undefined) return;
    const frameS = (segment.endS - segment.startS) / segment.numFrames;
    const frame = Math.min(segment.numFrames - 1, Math.floor((mediaS - segment.startS + CLOCK_ERROR_S) / frameS));
    const key = `${segment.epoch}/${segment.run}/${segment.chunkIndex}`;
    const isFirstOfChunk = key !== this._shownKey;
    this._shownKey = key;
    this._onFrame({ segment, frame: Math.max(0, frame), isFirstOfChunk, shownMs });
  }
}
