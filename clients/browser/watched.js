'use strict';
/** Somebody else's world, as a spectator knows it: which chunk is on screen, where the camera is, and what was received. */

import { Recorder } from './recorder.js';
import { Walk } from './walk.js';

export class WatchedWorld {
  /**
   * @param {object} parts
   * @param {import('./screen.js').Screen} parts.player
   * @param {import('./hud.js').Hud} parts.hud
   * @param {{onPicture: () => void, onPlace: (walk: Walk) => void}} parts.view
   */
  constructor({ player, hud, view }) {
    this._player = player;
    this._hud = hud;
    this._view = view;
    this.recorder = new Recorder();
    this.walk = new Walk();
    this.session = /** @type {import('./protocol.js').SessionWatching | null} */ (null);
    this.run = 0;
    /** Spectators have no epochs: the owner's resumes do not interrupt them. */
    this.epoch = 0;
    this.shown = /** @type {{run: number, chunkIndex: number} | null} */ (null);
    this._receivedRun = /** @type {number | null} */ (null);
  }

  /** @param {import('./protocol.js').SessionWatching} watching */
  started(watching) {
    const isSameWorld = this.session?.session_id === watching.session_id;
    this.session = watching;
    this.run = watching.run;
    this.walk.begins(watching.run, watching.start_image);
    this._player.beginEpoch(watching, isSameWorld);
  }

  /**
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {Uint8Array} payload
   */
  chunk(header, payload) {
    if (header.kind === 'init') {
      this.recorder.init(payload);
      this._player.appendInit(payload);
      return;
    }
    const isNewRun = this._receivedRun !== null && header.run !== this._receivedRun;
    this._receivedRun = header.run;
    this.run = header.run;
    this.walk.chunk(header);
    this._hud.chunk(header);
    this._player.appendChunk(payload, header, isNewRun);
  }

  /** @param {import('./screen.js').Arrival} arrival */
  arrived({ bytes, header }) {
    if (this.session !== null) this.recorder.chunk(bytes, header, this.session);
  }

  /** @param {import('./timeline.js').ShownFrame} shown */
  frameShown({ segment, frame, isFirstOfChunk }) {
    if (isFirstOfChunk) {
      this.shown = { run: segment.run, chunkIndex: segment.chunkIndex };
      this._hud.place(segment.run, this.epoch, segment.chunkIndex);
      this._view.onPicture();
    }
    if (this.walk.shown(segment, frame)) this._view.onPlace(this.walk);
  }
}
