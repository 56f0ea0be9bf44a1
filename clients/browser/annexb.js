'use strict';
/** H.264 in Annex B: access units of a chunk, and the NAL units in them (ITU-T H.264, 7.4.1 and annex B). */

export const NAL_SPS = 7;
export const NAL_PPS = 8;

/** @param {Uint8Array} nal */
export function nalType(nal) {
  return nal[0] & 0x1f;
}

/**
 * Cut the payload of a chunk into its access units, views of it.
 * @param {Uint8Array} bytes
 * @param {readonly number[] | null | undefined} sizes
 * @returns {Uint8Array[]}
 */
export function cutUnits(bytes, sizes) {
  const total = (sizes ?? []).reduce((sum, size) => sum + size, 0);
  if (!sizes || total !== bytes.length) {
    throw new Error(`sizes: expected byte lengths that add up to ${bytes.length}, got ${JSON.stringify(sizes)}`);
  }
  let at = 0;
  const units = sizes.map((size) => bytes.subarray(at, (at += size)));
  const bad = units.findIndex((unit) => !beginsWithCode(unit));
  if (bad >= 0) throw new Error(`frame ${bad} of the chunk: expected a start code of Annex B, got ${units[bad].slice(0, 4)}`);
  return units;
}

/** @param {Uint8Array} unit */
function beginsWithCode(unit) {
  return unit[0] === 0 && unit[1] === 0 && (unit[2] === 1 || (unit[2] === 0 && unit[3] === 1));
}

/**
 * NAL units of an access unit without their start codes, views of it.
 * @param {Uint8Array} unit
 * @returns {Uint8Array[]}
 */
export function nalsOf(unit) {
  const starts = /** @type {number[]} */ ([]);
  for (let at = 0; at + 3 <= unit.length; at += 1) {
    if (unit[at] === 0 && unit[at + 1] === 0 && unit[at + 2] === 1) {
      starts.push(at);
      at += 2;
    }
  }
  return starts.map((start, index) => {
    let end = starts[index + 1] ?? unit.length;
    // The zero byte of a four-byte start code belongs to the code; a NAL unit never ends with one.
    while (end > start + 3 && unit[end - 1] === 0) end -= 1;
    return unit.subarray(start + 3, end);
  });
}
