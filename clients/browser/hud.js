'use strict';
/** The numbers: what is measured from frames that were really shown, and what the server said of its chunks. */

import { byId, make } from './dom.js';

const FPS_OVER_MS = 2000;
const KEEP_LATENCIES = 100;
const KEEP_CHUNKS = 5;
const DRAW_EVERY_MS = 500;
/** Stages in the order of `timings_ms`; waiting in the queue is not making. */
const STAGES = /** @type {const} */ (['denoise', 'commit', 'decode', 'transfer', 'encode']);

/**
 * The value below which a share of the values lies (nearest rank).
 * @param {number[]} values
 * @param {number} share  0 to 1.
 * @returns {number | null}
 */
export function percentile(values, share) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}

export class FrameRate {
  constructor() {
    this._samples = /** @type {{ms: number, frames: number}[]} */ ([]);
  }

  /**
   * @param {number} ms
   * @param {number} frames  Frames presented so far.
   */
  sample(ms, frames) {
    // Another player, or a source built anew, counts from zero.
    if (frames < (this._samples.at(-1)?.frames ?? 0)) this._samples = [];
    this._samples.push({ ms, frames });
    while (this._samples.length > 2 && ms - this._samples[0].ms > FPS_OVER_MS) this._samples.shift();
  }

  /** @returns {number | null} */
  get fps() {
    const first = this._samples[0];
    const last = this._samples.at(-1);
    if (first === undefined || last === undefined || last.ms <= first.ms) return null;
    return ((last.frames - first.frames) * 1000) / (last.ms - first.ms);
  }
}

export class Hud {
  /** @param {() => {presentedFrames: number, bufferedMs: number, roundTripMs: number | null}} read */
  constructor(read) {
    this._read = read;
    this._rate = new FrameRate();
    this._latenciesMs = /** @type {number[]} */ ([]);
    this._chunks = /** @type {import('./wire.d.ts').ChunkTimings[]} */ ([]);
    this._place = '–';
    this._bar = STAGES.map((stage) => make('i', { title: stage }));
    byId('hud-bar').append(...this._bar);
    setInterval(() => this._draw(), DRAW_EVERY_MS);
  }

  /** Figures measured so far, for tests and for the curious in a console. */
  get figures() {
    return {
      fps: this._rate.fps,
      p50Ms: percentile(this._latenciesMs, 0.5),
      p95Ms: percentile(this._latenciesMs, 0.95),
      chunkMs: this._chunkMs(),
    };
  }

  /** @param {import('./protocol.js').ChunkHeader} header */
  chunk({ timings_ms: timings }) {
    if (timings) this._chunks = [...this._chunks, timings].slice(-KEEP_CHUNKS);
  }

  /** @param {number} latencyMs  From a key to the first frame that shows it. */
  latency(latencyMs) {
    this._latenciesMs = [...this._latenciesMs, latencyMs].slice(-KEEP_LATENCIES);
  }

  /**
   * @param {number} run
   * @param {number} epoch
   * @param {number} chunkIndex
   */
  place(run, epoch, chunkIndex) {
    this._place = `${run} · ${epoch} · ${chunkIndex}`;
  }

  _chunkMs() {
    return percentile(this._chunks.map((timings) => STAGES.reduce((sum, stage) => sum + timings[stage], 0)), 0.5);
  }

  _draw() {
    const { presentedFrames, bufferedMs, roundTripMs } = this._read();
    this._rate.sample(performance.now(), presentedFrames);
    const { fps, p50Ms, p95Ms, chunkMs } = this.figures;
    write('hud-fps', fps, 1);
    if (!byId('hud').open) return;
    write('hud-chunk', chunkMs);
    write('hud-buffer', bufferedMs);
    write('hud-p50', p50Ms);
    write('hud-p95', p95Ms);
    write('hud-rtt', roundTripMs, 1);
    byId('hud-place').value = this._place;
    const newest = this._chunks.at(-1);
    if (newest === undefined) return;
    STAGES.forEach((stage, index) => (this._bar[index].style.flexGrow = String(newest[stage])));
    const parts = STAGES.map((stage) => `${stage} ${Math.round(newest[stage])} ms`);
    byId('hud-bar').ariaLabel = parts.join(', ');
    byId('hud-bar').title = parts.join('\n');
  }
}

/**
 * @param {string} id
 * @param {number | null} value
 * @param {number} [digits]
 */
function write(id, value, digits = 0) {
  byId(id).value = value === null ? '–' : value.toFixed(digits);
}
