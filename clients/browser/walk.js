'use strict';
/**
 * Where the camera of a run is and has been, from the poses in the chunks' headers. Axes are those of the wire: x right, y
 * down, z forward, and the first camera of the run is the origin.
 *
 * @typedef {{x: number, z: number, headingRad: number}} Place  `headingRad`: 0 along z, growing to the right.
 */

/** A trail longer than this has every second point taken out, again and again. */
const MAX_TRAIL = 500;
const START = Object.freeze({ x: 0, z: 0, headingRad: 0 });

/**
 * Place of a camera-to-world matrix, 4x4 row by row.
 * @param {readonly number[]} pose
 * @returns {Place}
 */
export function placeOf(pose) {
  // The third column is where the camera's z axis points to.
  return { x: pose[3], z: pose[11], headingRad: Math.atan2(pose[2], pose[10]) };
}

/**
 * @param {Place} from
 * @param {Place} to
 * @param {number} share  0 to 1.
 * @returns {Place}
 */
export function between(from, to, share) {
  const turn = Math.atan2(Math.sin(to.headingRad - from.headingRad), Math.cos(to.headingRad - from.headingRad));
  return {
    x: from.x + (to.x - from.x) * share,
    z: from.z + (to.z - from.z) * share,
    headingRad: from.headingRad + turn * share,
  };
}

export class Walk {
  constructor() {
    /** Whether the model says where the camera is. */
    this.isKnown = false;
    this.place = /** @type {Place} */ (START);
    this.trail = /** @type {{x: number, z: number}[]} */ ([]);
    /** Name of the start image of the run on screen; null for one of somebody's own. */
    this.startImage = /** @type {string | null} */ (null);
    this._startImages = /** @type {Map<number, string | null>} */ (new Map());
    this._run = -1;
    this._ends = /** @type {Map<string, Place>} */ (new Map());
    this._every = 1;
    this._skipped = 0;
  }

  clear() {
    this.isKnown = false;
    this.place = START;
    this.startImage = null;
    this._startImages.clear();
    this._ends.clear();
    this._run = -1;
  }

  /**
   * What the server says of a run, before its first chunk.
   * @param {number} run
   * @param {string | null} startImage  Name of its start image.
   */
  begins(run, startImage) {
    this._startImages.set(run, startImage);
  }

  /** @param {import('./protocol.js').ChunkHeader} header */
  chunk({ run, chunk_index: chunkIndex, pose }) {
    if (pose) this._ends.set(`${run}/${chunkIndex}`, placeOf(pose));
  }

  /**
   * A frame is on screen.
   * @param {{run: number, chunkIndex: number, numFrames: number}} segment
   * @param {number} frame
   * @returns {boolean}  Whether the place changed.
   */
  shown({ run, chunkIndex, numFrames }, frame) {
    const end = this._ends.get(`${run}/${chunkIndex}`);
    if (end === undefined) return false;
    if (run !== this._run) this._beginRun(run, chunkIndex === 0);
    // Who joins late does not know where the chunk began.
    const begin = chunkIndex === 0 ? START : (this._ends.get(`${run}/${chunkIndex - 1}`) ?? end);
    this.isKnown = true;
    this.place = between(begin, end, (frame + 1) / numFrames);
    this._note();
    for (const key of this._ends.keys()) {
      const [ofRun, ofChunk] = key.split('/').map(Number);
      if (ofRun < run || (ofRun === run && ofChunk < chunkIndex - 1)) this._ends.delete(key);
    }
    return true;
  }

  /**
   * @param {number} run
   * @param {boolean} isFromStart  Who joins late has not seen the way from the start to here.
   */
  _beginRun(run, isFromStart) {
    this._run = run;
    this.startImage = this._startImages.get(run) ?? null;
    for (const other of this._startImages.keys()) if (other < run) this._startImages.delete(other);
    this.trail = isFromStart ? [{ x: START.x, z: START.z }] : [];
    this._every = 1;
    this._skipped = 0;
  }

  _note() {
    const { x, z } = this.place;
    const last = this.trail.at(-1);
    if (last !== undefined && last.x === x && last.z === z) return;
    this._skipped += 1;
    if (this._skipped < this._every) return;
    this._skipped = 0;
    this.trail.push({ x, z });
    if (this.trail.length < MAX_TRAIL) return;
    this.trail = this.trail.filter((_, index) => index % 2 === 0);
    this._every *= 2;
  }
}
