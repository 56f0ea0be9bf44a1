'use strict';
/**
 * The page: brings link, player, controls and numbers together, and decides what is on screen.
 *
 * boot -> loading -> chooser -> waiting -> world      a bookmark, or a first image named by the server, skips the chooser
 */

import { listenToBar } from './bar.js';
import { Chooser } from './chooser.js';
import { addressOf, Connection } from './connection.js';
import { HeldActions, listenToGamepad, listenToKeyboard, listenToPad } from './controls.js';
import { byId } from './dom.js';
import { InfoError, ServerApi } from './info.js';
import { copyText } from './link_card.js';
import { PromptBox } from './prompt_box.js';
import * as protocol from './protocol.js';
import * as sheets from './sheets.js';
import * as stage from './stage.js';
import { accessToken, KeptStart, watchAddress } from './store.js';
import { Viewer } from './viewer.js';
import { closedText, endTitle, failText, refusedText, startTitle } from './words.js';
import { World } from './world.js';

const MOST_PLAYER_FAILURES = 2;
const LINK_LOST = 'The server did not answer three times. Your world waits there for a short while.';

/** Reason of a `session.closed` that answers `session.close`. */
const CLOSED_HERE = 'client';
const QUIET_ERRORS = new Set(['duplicate', 'stale']);

export class App {
  constructor() {
    const token = accessToken();
    this.needsToken = token !== null;
    this.api = new ServerApi(token);
    this.isPaused = false;
    this.start = new KeptStart();
    this.playerFailures = 0;
    this.failure = /** @type {string | null} */ (null);
    /** Whether the session is closed only to open the next one at once. */
    this.isMovingOn = false;
    /** Reason of the `session.closed` that came. */
    this.closedFor = /** @type {string | null} */ (null);
    this.connection = new Connection({
      ...addressOf(token),
      handlers: {
        onState: (state, detail) => this.onLink(state, detail),
        onStarted: (started) => this.onStarted(started),
        onMessage: (message) => this.onMessage(message),
        onChunk: (header, payload) => this.world.chunk(header, payload),
        resumePoint: () => this.world.resumePoint(),
      },
    });
    this.viewer = new Viewer({
      connection: this.connection,
      onFrame: (shown) => this.world.frameShown(shown),
      onArrival: (arrival) => this.world.arrived(arrival),
      onError: (error) => this.onPlayerError(error),
      world: () => this.world,
    });
    this.player = this.viewer.player;
    this.hud = this.viewer.hud;
    this.held = new HeldActions((actions) => {
      stage.lightKeys('held', actions);
      if (this.connection.state === 'live') this.world.steer(actions);
    });
    this.prompt = new PromptBox((prompt) => {
      if (this.world.changePrompt(prompt)) this.viewer.focus();
      else sheets.toast('There is no link at the moment: the prompt was not sent.', 'bad');
    });
    /** @type {World} */
    this.world = new World({
      player: this.player,
      send: (message) => this.connection.send(message),
      held: () => this.held.snapshot(),
      hud: this.hud,
      view: {
        onPicture: () => this.onPicture(),
        onPrompt: () => this.prompt.show(this.world.prompt, this.world.isPromptPending),
        onApplied: (actions) => stage.lightKeys('applied', actions),
        onPlace: (walk) => this.viewer.map.show(walk),
      },
    });
    this.chooser = new Chooser({ api: this.api, onBegin: (choice) => this.begin(choice) });
    this.listen();
  }

  // ---------------------------------------------------------------- start

  /** @param {boolean} [isReturning]  The visitor left a world, and chooses the next. */
  async boot(isReturning = false) {
    sheets.showLink('Starting', 'busy');
    const info = await this.untilReady();
    if (info === null) return;
    this.chooser.size = { width: info.width, height: info.height };
    byId('notice').textContent = info.notice;
    byId('notice').hidden = info.notice === '';
    this.chooser.offer(info.start_images);
    // The map is poorer without it, and that is all.
    this.viewer.map.layout = await this.api.layout().catch(() => null);
    if (this.world.isKept) {
      sheets.showWaiting('Returning to your world', 'Picking it up where you left it.', () => this.leave());
      this.connection.begin(null);
    } else if (isReturning) {
      this.choose();
    } else {
      this.open(info);
    }
  }

  /**
   * Begin with the image the server names, or let the visitor choose.
   * @param {import('./info.js').ServerInfo} info
   */
  open(info) {
    const image = info.start_images.find((offered) => offered.name === info.begin_image);
    if (image === undefined) this.choose();
    else this.begin({ prompt: image.prompt, image: { name: image.name } });
  }

  /**
   * Wait for the model, showing how far it is. Null: it can't be served, which the page has said then.
   * @returns {Promise<import('./info.js').ServerInfo | null>}
   */
  async untilReady() {
    try {
      return await this.api.untilReady((info) => {
        this.viewer.info = info;
        if (info?.error) throw new Error(info.error);
        if (info?.ready) return;
        sheets.showLink('Loading', 'busy');
        sheets.showLoading(info);
      });
    } catch (error) {
      sheets.showLink('Not available', 'bad');
      const code = error instanceof InfoError ? error.code : '';
      const title = error instanceof InfoError ? startTitle(code) : 'The model cannot be served';
      const text = refusedText(code, error instanceof Error ? error.message : String(error));
      const retry = { label: 'Try again', run: () => void this.boot() };
      sheets.showTrouble({ title, text, retry, choose: null });
      return null;
    }
  }

  choose() {
    sheets.showLink('Ready', 'none');
    this.chooser.open(this.connection.state === 'live' ? () => this.backToWorld() : null);
  }

  /** @param {import('./chooser.js').Choice} choice */
  begin(choice) {
    const { format } = this.viewer.settings.values;
    this.start.keep(protocol.startMessage({ ...choice, format }));
    if (this.connection.state === 'live' && this.world.session?.format !== format) {
      // A session keeps its format. Until it is closed another choice may take the place of this one.
      if (!this.isMovingOn) this.leave();
      this.isMovingOn = true;
      return;
    }
    if (this.connection.state === 'live') {
      if (this.isPaused) this.togglePause();
      this.world.reset(choice);
      this.backToWorld();
      return;
    }
    this.forget();
    this.openKept();
  }

  /** Open the world of the kept start message. */
  openKept() {
    sheets.showWaiting('Opening your world', 'The first picture takes a moment.', () => this.leave());
    this.connection.begin(this.start.message);
  }

  /** Whether keys steer at present. */
  get isSteering() {
    const isCovered = document.querySelector('dialog[open]') !== null;
    return sheets.current() === 'world' && this.connection.state === 'live' && !isCovered;
  }

  backToWorld() {
    sheets.show('world');
    this.viewer.focus();
    this.showLive();
  }

  showLive() {
    if (this.connection.state !== 'live') return;
    sheets.showLink(this.isPaused ? 'Paused' : 'Live', this.isPaused ? 'none' : 'good');
  }

  /** Forget the world on screen; the next start is another one. */
  forget() {
    this.setPaused(false);
    document.body.classList.remove('has-picture');
    this.world.forget();
  }

  leave() {
    this.connection.close();
  }

  // ---------------------------------------------------------------- link

  /**
   * @param {import('./connection.js').LinkState} state
   * @param {import('./connection.js').LinkDetail} detail
   */
  onLink(state, detail) {
    this.viewer.linkCard.note(state, detail);
    switch (state) {
      case 'queued': {
        const title = detail.position === 1 ? 'You are next' : `Number ${detail.position} in the queue`;
        sheets.showWaiting(title, 'All worlds are taken at the moment. Yours opens by itself.', () => this.leave());
        break;
      }
      case 'live':
        this.showLive();
        break;
      case 'lost':
        this.trouble('The link is lost', detail.error?.message ?? LINK_LOST, 'Reconnect');
        break;
      case 'ended':
        this.onEnded(detail);
        break;
    }
  }

  /** @param {import('./connection.js').LinkDetail} detail */
  onEnded({ error, closeCode }) {
    const hadWorld = this.world.session !== null;
    const wasReload = !hadWorld && this.world.isKept;
    const reason = this.closedFor;
    const isMovingOn = this.isMovingOn;
    this.closedFor = null;
    this.isMovingOn = false;
    if (error === undefined && closeCode !== 1008 && (reason ?? CLOSED_HERE) === CLOSED_HERE) {
      this.forget();
      if (isMovingOn) this.openKept();
      else void this.boot(true);
      return;
    }
    sheets.showLink('Not connected', 'bad');
    const code = error?.code ?? '';
    if (code === 'taken_over') {
      this.trouble('This world went on in another tab', 'Only one tab can steer it.', 'Take it back');
      return;
    }
    this.world.letGo();
    if (wasReload) {
      this.forget();
      void this.boot();
      sheets.toast('Your last world has been closed in the meantime.');
      return;
    }
    const text = error?.message ?? (reason === null ? 'The server closed the connection.' : closedText(reason));
    if (hadWorld) this.start.keepPrompt(this.world.prompt);
    this.trouble(hadWorld ? endTitle(code) : startTitle(code), text, hadWorld ? 'Start it again' : 'Try again');
  }

  /**
   * @param {string} title
   * @param {string} text
   * @param {string} label  Of the button that tries again.
   */
  trouble(title, text, label) {
    const choose = {
      label: 'Choose a world',
      run: () => {
        this.forget();
        void this.boot(true);
      },
    };
    sheets.showTrouble({ title, text, retry: { label, run: () => void this.tryAgain() }, choose });
  }

  /** Come back to the world if it is kept, else start the same one anew. */
  async tryAgain() {
    if (this.world.isKept) {
      sheets.showWaiting('Reconnecting', 'Picking it up where you left it.', () => this.leave());
      this.connection.retry();
      return;
    }
    this.forget();
    if (this.start.message === null) {
      await this.boot();
      return;
    }
    if ((await this.untilReady()) !== null) this.openKept();
  }

  /** @param {import('./protocol.js').SessionStarted} started */
  onStarted(started) {
    this.prompt.offer(started.prompts, started.limits.max_prompt_chars);
    const isSameWorld = this.world.started(started);
    if (isSameWorld && sheets.current() !== 'chooser') this.backToWorld();
  }

  /** @param {Record<string, any>} message */
  onMessage(message) {
    switch (message.type) {
      case 'session.state':
        this.onSessionState(message);
        break;
      case 'session.closed':
        this.closedFor = message.reason;
        break;
      case 'event.dropped':
        this.world.eventDropped(message.event_id);
        break;
      case 'error':
        if (QUIET_ERRORS.has(message.code)) break;
        if (Number.isInteger(message.event_id)) this.world.eventRefused(message.event_id);
        else this.world.resetRefused();
        if (!message.fatal) sheets.toast(message.message, 'bad');
        break;
    }
  }

  /** @param {Record<string, any>} message */
  onSessionState(message) {
    this.setPaused(message.state === 'paused');
    this.world.walk.begins(message.run, message.start_image);
    this.world.inRun(message.run);
    if (message.state === 'failed') this.onFailed(message.reason);
  }

  /** @param {string | null} reason  An error code. */
  onFailed(reason) {
    this.failure = reason ?? this.failure;
    sheets.showLink('Stopped', 'bad');
    sheets.showTrouble({
      title: 'This run has stopped',
      text: failText(this.failure),
      retry: { label: 'Start it again', run: () => void this.restart() },
      choose: { label: 'Choose a world', run: () => this.leave() },
    });
  }

  /** Begin a new run in the session that failed, once there is a model for it; a new session if its process has ended. */
  async restart() {
    if (this.failure === 'worker_unavailable') {
      this.failure = null;
      this.start.keepPrompt(this.world.prompt);
      this.connection.suspend();
      this.world.letGo();
      await this.tryAgain();
      return;
    }
    if ((await this.untilReady()) === null) return;
    this.failure = null;
    this.world.reset({});
    this.backToWorld();
  }

  // ---------------------------------------------------------------- media

  onPicture() {
    this.playerFailures = 0;
    document.body.classList.add('has-picture');
    if (sheets.current() === 'waiting') this.backToWorld();
  }

  /**
   * A new epoch brings a fresh init segment, so the cure is a fresh link; but not for ever.
   * @param {Error} error
   */
  onPlayerError(error) {
    this.playerFailures += 1;
    if (this.playerFailures <= MOST_PLAYER_FAILURES) {
      this.connection.drop();
      return;
    }
    this.connection.suspend();
    this.trouble('The video cannot be shown', error.message, 'Try again');
  }

  // ---------------------------------------------------------------- pause and reset

  reset() {
    this.world.reset({});
    if (this.isPaused) this.togglePause();
  }

  togglePause() {
    const isPaused = !this.isPaused;
    if (!this.connection.send(isPaused ? protocol.pauseMessage() : protocol.unpauseMessage())) return;
    this.setPaused(isPaused);
  }

  /** @param {boolean} isPaused */
  setPaused(isPaused) {
    if (isPaused === this.isPaused) return;
    this.isPaused = isPaused;
    this.player.hold(isPaused);
    document.body.classList.toggle('is-paused', isPaused);
    byId('pause').querySelector('span').textContent = isPaused ? 'Go on' : 'Pause';
    this.showLive();
  }

  // ---------------------------------------------------------------- the bar and the keys

  /** Copy the address at which others watch this world. */
  async share() {
    const token = this.world.session?.watch_token;
    if (token === undefined) return;
    await copyText(watchAddress(token), byId('share'));
    const who = this.needsToken ? 'Whoever has the link and a token of this server' : 'Whoever has the link';
    sheets.toast(`${who} can watch, and not steer.`);
  }

  listen() {
    const isSteering = () => this.isSteering;
    listenToKeyboard(this.held, isSteering);
    listenToGamepad(this.held, isSteering, () => sheets.toast('The gamepad steers.'));
    listenToPad(byId('pad-move'), this.held);
    listenToPad(byId('pad-look'), this.held);
    const actions = {
      pause: () => this.togglePause(),
      reset: () => this.reset(),
      choose: () => this.choose(),
      share: () => void this.share(),
      save: () => this.viewer.save(this.world.recorder, this.world.session?.session_id ?? 'world'),
      leave: () => this.leave(),
      prompt: () => this.prompt.focus(),
    };
    listenToBar(actions, isSteering, () => this.viewer.focus());
  }
}
