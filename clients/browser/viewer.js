'use strict';
/** What everybody who looks at a world has: the screen, the numbers, the map, the settings, and the card of the link. */

import { byId, make } from './dom.js';
import { Hud } from './hud.js';
import { LinkCard } from './link_card.js';
import { MapCard } from './map.js';
import { Screen } from './screen.js';
import { Settings } from './settings.js';
import * as sheets from './sheets.js';
import * as stage from './stage.js';

/**
 * @typedef {import('./world.js').World} World
 * @typedef {import('./watched.js').WatchedWorld} WatchedWorld
 */

export class Viewer {
  /**
   * @param {object} options
   * @param {import('./connection.js').Connection} options.connection
   * @param {(shown: import('./timeline.js').ShownFrame) => void} options.onFrame
   * @param {(arrival: import('./screen.js').Arrival) => void} options.onArrival
   * @param {(error: Error) => void} options.onError
   * @param {() => World | WatchedWorld} options.world
   */
  constructor({ connection, onFrame, onArrival, onError, world }) {
    this._connection = connection;
    this._world = world;
    this.info = /** @type {import('./info.js').ServerInfo | null} */ (null);
    this.player = new Screen({
      video: byId('video'),
      canvas: byId('canvas'),
      still: byId('still'),
      onFrame: (shown) => {
        onFrame(shown);
        stage.paintAmbient(this.player.surface);
      },
      onArrival,
      onError,
    });
    this.hud = new Hud(() => ({
      presentedFrames: this.player.presentedFrames,
      bufferedMs: this.player.bufferedS * 1000,
      roundTripMs: connection.roundTripMs,
    }));
    this.map = new MapCard();
    this.settings = new Settings(() => this.focus());
    this.linkCard = new LinkCard({ facts: () => this._facts(), retry: () => connection.retry() });
    stage.watchIdle();
    addEventListener('keydown', (event) => this._shortcut(event));
  }

  /** Give the keys to the world. */
  focus() {
    if (document.querySelector('dialog[open]') === null) this.player.surface.focus({ preventScroll: true });
  }

  /**
   * @param {import('./recorder.js').Recorder} recorder
   * @param {string} name  Of the file, without its ending.
   */
  save(recorder, name) {
    if (recorder.isEmpty) {
      sheets.toast('Nothing has been played yet.');
      return;
    }
    const url = URL.createObjectURL(recorder.toBlob());
    make('a', { href: url, download: `${name}.mp4` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  /** @param {KeyboardEvent} event */
  _shortcut(event) {
    const isTyping = event.target instanceof HTMLElement && event.target.matches('input, textarea');
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || isTyping) return;
    if (document.querySelector('dialog[open]') !== null) return;
    if (event.key === '?') byId('help').showModal();
    else if (event.code === 'KeyM') this.settings.set('map', !this.settings.values.map);
    else if (event.code === 'KeyN') this.settings.set('numbers', !this.settings.values.numbers);
    else if (event.code === 'KeyF') void toggleFullscreen();
  }

  /** @returns {[string, string][]} */
  _facts() {
    const { session, run, epoch, shown } = this._world();
    const { fps, p50Ms, p95Ms, chunkMs } = this.hud.figures;
    const server = this.info === null ? 'not reached' : `${this.info.version}, ${this.info.status}`;
    /** @type {[string, string][]} */
    const facts = [
      ['Server', server],
      ['State', this._connection.state],
      ['Round trip', words(this._connection.roundTripMs, 'ms')],
    ];
    if (session !== null) {
      facts.push(
        ['Model', session.model],
        ['Session', session.session_id],
        ['Run, epoch, chunk', `${run}, ${epoch}, ${shown?.chunkIndex ?? 'none'}`],
        ['Video', `${session.width}x${session.height}, ${session.fps} fps, ${session.format}`],
        ['Shown', words(fps, 'fps')],
        ['Chunk made in', words(chunkMs, 'ms')],
        ['Key to frame', `${words(p50Ms, 'ms')}, p95 ${words(p95Ms, 'ms')}`],
        ['Buffered', words(this.player.bufferedS * 1000, 'ms')],
      );
    }
    return facts;
  }
}

/**
 * @param {number | null} value
 * @param {string} unit
 */
function words(value, unit) {
  return value === null ? 'unknown' : `${value.toFixed(1)} ${unit}`;
}

async function toggleFullscreen() {
  if (document.fullscreenElement !== null) await document.exitFullscreen();
  else if (document.fullscreenEnabled) await document.documentElement.requestFullscreen();
  else sheets.toast('This browser offers no full screen.');
}
