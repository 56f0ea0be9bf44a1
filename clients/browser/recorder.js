'use strict';
/**
 * Keeps what was received as one playable MP4: an init segment and the newest fragments up to a byte cap. Each epoch's
 * fragments start at zero on the wire, so their `tfdt` is rewritten to one continuous clock. Chunks without a container
 * become fragments here.
 */

import { cutUnits, NAL_PPS, NAL_SPS, nalsOf, nalType } from './annexb.js';
import { initSegment, mediaFragment } from './mp4.js';

const DEFAULT_CAP_BYTES = 256 * 1024 * 1024;
/** Moving the whole list up for each fragment that goes would cost more than it frees. */
const CLEAN_UP_EVERY = 256;
const CONTAINERS = new Set(['moof', 'traf']);

export class Recorder {
  /** @param {number} [capBytes] */
  constructor(capBytes = DEFAULT_CAP_BYTES) {
    this._capBytes = capBytes;
    this._init = /** @type {Uint8Array | null} */ (null);
    this._fragments = /** @type {{bytes: Uint8Array, duration: number}[]} */ ([]);
    this._firstFragment = 0;
    this._bytes = 0;
  }

  clear() {
    this._init = null;
    this._fragments = [];
    this._firstFragment = 0;
    this._bytes = 0;
  }

  /** Bytes kept. */
  get size() {
    return this._bytes;
  }

  /**
   * Later epochs send the same init segment again; the first is kept.
   * @param {Uint8Array} bytes
   */
  init(bytes) {
    this._init ??= bytes.slice();
  }

  /**
   * @param {Uint8Array} bytes      One moof + mdat pair; copied.
   * @param {number} duration       In units of the track's timescale.
   */
  fragment(bytes, duration) {
    this._fragments.push({ bytes: bytes.slice(), duration });
    this._bytes += bytes.byteLength;
    while (this._bytes > this._capBytes && this._fragments.length - this._firstFragment > 1) {
      this._bytes -= this._fragments[this._firstFragment].bytes.byteLength;
      this._fragments[this._firstFragment] = { bytes: new Uint8Array(0), duration: 0 };
      this._firstFragment += 1;
    }
    if (this._firstFragment < CLEAN_UP_EVERY) return;
    this._fragments.splice(0, this._firstFragment);
    this._firstFragment = 0;
  }

  /**
   * A chunk as it came, in the format of its session.
   * @param {Uint8Array} bytes
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {{format: string, fps: number, width: number, height: number}} session
   */
  chunk(bytes, header, { format, fps, width, height }) {
    const { timescale, num_frames: numFrames, sizes } = header;
    const frameDuration = timescale / fps;
    if (format === 'fmp4') {
      this.fragment(bytes, numFrames * frameDuration);
      return;
    }
    const samples = cutUnits(bytes, sizes).map(nalsOf);
    if (this._init === null) {
      const sps = samples[0].find((nal) => nalType(nal) === NAL_SPS);
      const pps = samples[0].find((nal) => nalType(nal) === NAL_PPS);
      if (sps === undefined || pps === undefined) throw new Error('a chunk whose first frame has no SPS and PPS');
      this._init = initSegment({ sps, pps, width, height, timescale });
    }
    this.fragment(mediaFragment(samples, frameDuration), numFrames * frameDuration);
  }

  /** Whether there is anything to save. */
  get isEmpty() {
    return this._init === null || this._fragments.length === this._firstFragment;
  }

  /** @returns {Blob} */
  toBlob() {
    if (this._init === null) throw new Error('nothing was recorded yet: expected an init segment first');
    const parts = [this._init];
    let time = 0;
    for (const { bytes, duration } of this._fragments.slice(this._firstFragment)) {
      setDecodeTime(bytes, time);
      parts.push(bytes);
      time += duration;
    }
    return new Blob(/** @type {BlobPart[]} */ (parts), { type: 'video/mp4' });
  }
}

/**
 * Set `baseMediaDecodeTime` of every track fragment (ISO/IEC 14496-12, 8.8.12), in place.
 * @param {Uint8Array} bytes
 * @param {number} time
 */
export function setDecodeTime(bytes, time) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const found = writeDecodeTimes(view, 0, view.byteLength, time);
  if (found === 0) throw new Error('fragment without a tfdt box');
}

/**
 * @param {DataView} view
 * @param {number} start
 * @param {number} end
 * @param {number} time
 * @returns {number}  How many boxes were written.
 */
function writeDecodeTimes(view, start, end, time) {
  let found = 0;
  for (let at = start; at + 8 <= end; ) {
    const size = view.getUint32(at);
    const type = String.fromCharCode(...new Uint8Array(view.buffer, view.byteOffset + at + 4, 4));
    if (size < 8 || at + size > end) throw new Error(`box ${type} of ${size} bytes at ${at} does not fit its parent`);
    if (type === 'tfdt') {
      const isLong = view.getUint8(at + 8) === 1;
      if (isLong) view.setBigUint64(at + 12, BigInt(time));
      else view.setUint32(at + 12, time);
      found += 1;
    } else if (CONTAINERS.has(type)) {
      found += writeDecodeTimes(view, at + 8, at + size, time);
    }
    at += size;
  }
  return found;
}
