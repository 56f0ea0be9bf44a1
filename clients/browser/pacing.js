'use strict';
/**
 * When to tell the server that a chunk is on screen. The report lets a further chunk start, and a chunk takes up the keys at
 * its start; a report that comes no earlier than needed makes keys act sooner. It waits while chunks arrive well ahead of
 * their time, and goes out at once as soon as they arrive late.
 */

/** Media that should be left when a chunk arrives, as a share of a chunk. */
const TARGET_SLACK = 0.4;
const TOLERANCE = 0.1;
const APPROACH = 0.35;
const MOST_CHUNKS = 1.2;

export class ReportDelay {
  constructor() {
    this._delayS = 0;
  }

  get delayMs() {
    return this._delayS * 1000;
  }

  reset() {
    this._delayS = 0;
  }

  /**
   * A chunk arrived.
   * @param {number} slackS  Media that was left to show, not counting the chunk.
   * @param {number} chunkS  Length of the chunk.
   */
  arrived(slackS, chunkS) {
    const spareS = slackS - TARGET_SLACK * chunkS;
    if (spareS < 0) this._delayS = Math.max(0, this._delayS + spareS);
    else if (spareS > TOLERANCE * chunkS) this._delayS = Math.min(MOST_CHUNKS * chunkS, this._delayS + APPROACH * spareS);
  }
}
