'use strict';
/** The page of a spectator: the picture, the map and the numbers of a world that somebody else steers. */

import { addressOf, Connection } from './connection.js';
import { byId } from './dom.js';
import { ServerApi } from './info.js';
import { watchMessage } from './protocol.js';
import * as sheets from './sheets.js';
import { accessToken } from './store.js';
import { Viewer } from './viewer.js';
import { WatchedWorld } from './watched.js';
import { refusedText, stateText, watchTitle } from './words.js';

const MOST_PLAYER_FAILURES = 2;

export class WatchApp {
  /** @param {string} watchToken */
  constructor(watchToken) {
    this._start = watchMessage(watchToken);
    this._playerFailures = 0;
    document.body.dataset.role = 'spectator';
    const access = accessToken();
    this.api = new ServerApi(access);
    this.connection = new Connection({
      ...addressOf(access),
      handlers: {
        onState: (state, detail) => this._onLink(state, detail),
        onStarted: (watching) => this._onWatching(watching),
        onMessage: (message) => this._onMessage(message),
        onChunk: (header, payload) => this.world.chunk(header, payload),
        // A lost spectator just joins again.
        resumePoint: () => null,
      },
    });
    this.viewer = new Viewer({
      connection: this.connection,
      onFrame: (shown) => this.world.frameShown(shown),
      onArrival: (arrival) => this.world.arrived(arrival),
      onError: (error) => this._onPlayerError(error),
      world: () => this.world,
    });
    this.player = this.viewer.player;
    this.hud = this.viewer.hud;
    /** @type {WatchedWorld} */
    this.world = new WatchedWorld({
      player: this.player,
      hud: this.hud,
      view: { onPicture: () => this._onPicture(), onPlace: (walk) => this.viewer.map.show(walk) },
    });
    byId('save').addEventListener('click', () => {
      this.viewer.save(this.world.recorder, this.world.session?.session_id ?? 'world');
    });
    byId('close').addEventListener('click', () => this._leave());
  }

  boot() {
    this._wait('The next picture is on its way.');
    this.connection.begin(this._start);
    void this._learn();
  }

  /** Ask for what the watched world itself does not tell: the card of the link and the map are poorer without it. */
  async _learn() {
    const [info, layout] = await Promise.allSettled([this.api.info(), this.api.layout()]);
    if (info.status === 'fulfilled') this.viewer.info = info.value;
    if (layout.status === 'fulfilled') this.viewer.map.layout = layout.value;
  }

  /** @param {string} text */
  _wait(text) {
    sheets.showWaiting('Joining a world', text, () => this._leave());
  }

  _leave() {
    this.connection.close();
  }

  /** @param {import('./protocol.js').SessionWatching} watching */
  _onWatching(watching) {
    this.world.started(watching);
    this._showState(watching.state);
  }

  /** @param {Record<string, any>} message */
  _onMessage(message) {
    if (message.type === 'session.state') {
      this.world.walk.begins(message.run, message.start_image);
      this._showState(message.state);
    }
    if (message.type === 'error' && !message.fatal) sheets.toast(message.message, 'bad');
  }

  /** @param {import('./wire.d.ts').SessionState} state */
  _showState(state) {
    sheets.showLink(stateText(state), state === 'active' ? 'good' : 'none');
    this.player.hold(state === 'paused');
    document.body.classList.toggle('is-paused', state === 'paused');
    if (sheets.current() === 'waiting' && state !== 'active') {
      this._wait(`It is there, but stands still: ${stateText(state).toLowerCase()}.`);
    }
  }

  _onPicture() {
    this._playerFailures = 0;
    document.body.classList.add('has-picture');
    // What is buffered plays on behind the end of a world, and does not hide what is said of it.
    if (this.connection.state === 'live') sheets.show('world');
  }

  /**
   * @param {import('./connection.js').LinkState} state
   * @param {import('./connection.js').LinkDetail} detail
   */
  _onLink(state, detail) {
    this.viewer.linkCard.note(state, detail);
    if (state === 'ended') sheets.showLink('Not watching', 'none');
    if (state === 'lost' || state === 'ended') this._trouble(detail.error);
  }

  /** @param {import('./connection.js').ServerError} [error] */
  _trouble(error) {
    sheets.showTrouble({
      title: watchTitle(error?.code ?? ''),
      text: refusedText(error?.code ?? '', error?.message ?? 'The world that you watched is over, or you left it.'),
      retry: { label: 'Join again', run: () => this.boot() },
      choose: {
        label: 'Open a world of my own',
        run: () => {
          location.hash = '';
          location.reload();
        },
      },
    });
  }

  /** @param {Error} error */
  _onPlayerError(error) {
    this._playerFailures += 1;
    if (this._playerFailures <= MOST_PLAYER_FAILURES) {
      this.connection.drop();
      return;
    }
    this.connection.suspend();
    this._trouble({ code: 'player', message: error.message, retryable: false, fatal: true });
  }
}
