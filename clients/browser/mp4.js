'use strict';
/**
 * Writes fragmented MP4 with one H.264 track (ISO/IEC 14496-12 and 14496-15), for recordings of sessions whose chunks come
 * without a container.
 */

import { NAL_PPS, NAL_SPS, nalType } from './annexb.js';

const TRACK_ID = 1;
const UNITY_MATRIX = [0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000];
/** `sample_flags`: depends on no other sample; depends on others and is no sync sample. */
const SYNC_SAMPLE = 0x02000000;
const OTHER_SAMPLE = 0x01010000;
/** `tfhd` flags: default-base-is-moof. `trun` flags: data offset, and duration, size and flags of each sample. */
const TFHD_FLAGS = 0x020000;
const TRUN_FLAGS = 0x000701;

/**
 * @param {string} type
 * @param {...(Uint8Array | number[])} parts
 * @returns {Uint8Array}
 */
function box(type, ...parts) {
  const size = parts.reduce((sum, part) => sum + part.length, 8);
  const bytes = new Uint8Array(size);
  new DataView(bytes.buffer).setUint32(0, size);
  bytes.set([...type].map((letter) => letter.charCodeAt(0)), 4);
  let at = 8;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

/**
 * @param {string} type
 * @param {number} version
 * @param {number} flags
 * @param {...(Uint8Array | number[])} parts
 */
function fullBox(type, version, flags, ...parts) {
  return box(type, u32((version << 24) | flags), ...parts);
}

/** @param {...number} values */
function u16(...values) {
  return values.flatMap((value) => [(value >> 8) & 0xff, value & 0xff]);
}

/** @param {...number} values */
function u32(...values) {
  return values.flatMap((value) => [(value >>> 24) & 0xff, (value >>> 16) & 0xff, (value >>> 8) & 0xff, value & 0xff]);
}

/** @param {string} text */
function ascii(text) {
  return [...text].map((letter) => letter.charCodeAt(0));
}

/** @param {number} count */
function zeros(count) {
  return new Array(count).fill(0);
}

/**
 * @typedef {{sps: Uint8Array, pps: Uint8Array, width: number, height: number, timescale: number}} Track
 */

/**
 * The start of a file: `ftyp` and `moov`.
 * @param {Track} track
 * @returns {Uint8Array}
 */
export function initSegment(track) {
  const { timescale } = track;
  const ftyp = box('ftyp', ascii('iso6'), u32(0), ascii('iso6'), ascii('avc1'), ascii('mp41'));
  const rateAndVolume = [...u32(0x10000), ...u16(0x0100, 0), ...zeros(8)];
  const times = u32(0, 0, timescale, 0);
  const mvhd = fullBox('mvhd', 0, 0, times, rateAndVolume, u32(...UNITY_MATRIX), zeros(24), u32(TRACK_ID + 1));
  const mvex = box('mvex', fullBox('trex', 0, 0, u32(TRACK_ID, 1, 0, 0, 0)));
  return joined(ftyp, box('moov', mvhd, trak(track), mvex));
}

/** @param {Track} track */
function trak(track) {
  const { width, height, timescale } = track;
  const matrixAndSize = u32(...UNITY_MATRIX, width << 16, height << 16);
  const tkhd = fullBox('tkhd', 0, 3, u32(0, 0, TRACK_ID, 0, 0), zeros(16), matrixAndSize);
  const mdhd = fullBox('mdhd', 0, 0, u32(0, 0, timescale, 0), u16(0x55c4, 0));
  const hdlr = fullBox('hdlr', 0, 0, u32(0), ascii('vide'), zeros(12), ascii('world\0'));
  const dinf = box('dinf', fullBox('dref', 0, 0, u32(1), fullBox('url ', 0, 1)));
  // The sample tables are empty: samples are in the fragments.
  const tables = ['stts', 'stsc', 'stco'].map((type) => fullBox(type, 0, 0, u32(0)));
  const stsd = fullBox('stsd', 0, 0, u32(1), sampleEntry(track));
  const stbl = box('stbl', stsd, ...tables, fullBox('stsz', 0, 0, u32(0, 0)));
  const minf = box('minf', fullBox('vmhd', 0, 1, u16(0, 0, 0, 0)), dinf, stbl);
  return box('trak', tkhd, box('mdia', mdhd, hdlr, minf));
}

/** @param {Track} track */
function sampleEntry({ sps, pps, width, height }) {
  const avcC = box('avcC', [1, sps[1], sps[2], sps[3], 0xff, 0xe1], u16(sps.length), sps, [1], u16(pps.length), pps);
  const resolution = u32(0x480000, 0x480000, 0);
  const size = u16(width, height);
  return box('avc1', zeros(6), u16(1), zeros(16), size, resolution, u16(1), zeros(32), u16(24, 0xffff), avcC);
}

/**
 * One fragment, `moof` and `mdat`; its decode time is 0.
 * @param {Uint8Array[][]} samples     NAL units of each access unit; the first is a sync sample.
 * @param {number} sampleDuration      In units of the timescale.
 * @returns {Uint8Array}
 */
export function mediaFragment(samples, sampleDuration) {
  const data = samples.map((nals) => {
    const kept = nals.filter((nal) => nalType(nal) !== NAL_SPS && nalType(nal) !== NAL_PPS);
    return joined(...kept.flatMap((nal) => [new Uint8Array(u32(nal.length)), nal]));
  });
  const entries = data.flatMap(({ length }, at) => u32(sampleDuration, length, at === 0 ? SYNC_SAMPLE : OTHER_SAMPLE));
  const moof = (/** @type {number} */ dataOffset) =>
    box(
      'moof',
      fullBox('mfhd', 0, 0, u32(1)),
      box(
        'traf',
        fullBox('tfhd', 0, TFHD_FLAGS, u32(TRACK_ID)),
        fullBox('tfdt', 1, 0, zeros(8)),
        fullBox('trun', 0, TRUN_FLAGS, u32(data.length, dataOffset), entries),
      ),
    );
  return joined(moof(moof(0).length + 8), box('mdat', ...data));
}

/** @param {...Uint8Array} parts */
function joined(...parts) {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}
