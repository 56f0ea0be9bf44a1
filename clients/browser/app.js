'use strict';
/**
 * The page: brings link, player, controls and numbers together, and decides what is on screen.
 *
 * boot -> loading -> chooser -> waiting -> world      a bookmark, or a first image named by the server, skips the chooser
 */

import { Chooser } from './chooser.js';
import { Connection } from './connection.js';
import { HeldActions, listenToGamepad, listenToKeyboard, listenToPad } from './controls.js';
import { byId, make } from './dom.js';
import { Hud } from './hud.js';
import { ServerApi } from './info.js';
import { Player } from './player.js';
import * as protocol from './protocol.js';
import * as sheets from './sheets.js';
import * as stage from './stage.js';
import { accessToken, loadStart, saveStart } from './store.js';
import { endTitle, failText, startTitle } from './words.js';
import { World } from './world.js';

const MOST_PLAYER_FAILURES = 2;
const LINK_LOST = 'The server did not answer three times. Your world waits there for a short while.';

/** Errors that concern one message only and need no sheet. */
const QUIET_ERRORS = new Set(['duplicate', 'stale']);

class App {
  constructor() {
    const token = accessToken();
    this.api = new ServerApi(token);
    this.isPaused = false;
    this.lastStart = loadStart();
    this.playerFailures = 0;
    this.failure = /** @type {string | null} */ (null);
    this.player = new Player({
      video: byId('video'),
      still: byId('still'),
      onFrame: (shown) => this.onFrame(shown),
      onArrival: (arrival) => this.world.arrived(arrival),
      onError: (error) => this.onPlayerError(error),
    });
    this.connection = new Connection({
      url: `${location.protocol === 'https:' ? 'wss' : 'ws'}://${location.host}/v1/world`,
      protocols: token === null ? [] : ['worldserve.v1', `worldserve.token.${token}`],
      handlers: {
        onState: (state, detail) => this.onLink(state, detail),
        onStarted: (started) => this.onStarted(started),
        onMessage: (message) => this.onMessage(message),
        onChunk: (header, payload) => this.world.chunk(header, payload),
        resumePoint: () => this.world.resumePoint(),
      },
    });
    this.hud = new Hud(() => ({
      presentedFrames: this.player.presentedFrames,
      bufferedMs: this.player.bufferedS * 1000,
      roundTripMs: this.connection.roundTripMs,
    }));
    this.held = new HeldActions((actions) => {
      stage.lightKeys('held', actions);
      if (this.connection.state === 'live') this.world.steer(actions);
    });
    this.world = new World({
      player: this.player,
      send: (message) => this.connection.send(message),
      held: () => this.held.snapshot(),
      hud: this.hud,
      view: {
        onPicture: () => this.onPicture(),
        onPrompt: () => this.showPrompt(),
        onApplied: (actions) => stage.lightKeys('applied', actions),
      },
    });
    this.chooser = new Chooser({ api: this.api, onBegin: (choice) => this.begin(choice) });
    this.listen();
  }

  // ---------------------------------------------------------------- start

  async boot() {
    sheets.showLink('Starting', 'busy');
    const info = await this.untilReady();
    if (info === null) return;
    byId('notice').textContent = info.notice;
    byId('notice').hidden = info.notice === '';
    this.chooser.offer(info.start_images);
    if (this.world.isKept) {
      sheets.showWaiting('Returning to your world', 'Picking it up where you left it.', () => this.leave());
      this.connection.begin(null);
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
        if (info?.error) throw new Error(info.error);
        if (info?.ready) return;
        sheets.showLink('Loading', 'busy');
        sheets.showLoading(info);
      });
    } catch (error) {
      sheets.showLink('Not available', 'bad');
      const text = error instanceof Error ? error.message : String(error);
      const retry = { label: 'Try again', run: () => void this.boot() };
      sheets.showTrouble({ title: 'The model cannot be served', text, retry, choose: null });
      return null;
    }
  }

  choose() {
    sheets.showLink('Ready', 'none');
    this.chooser.open(this.connection.state === 'live' ? () => this.backToWorld() : null);
  }

  /** @param {import('./chooser.js').Choice} choice */
  begin(choice) {
    this.keepStart(protocol.startMessage(choice));
    if (this.connection.state === 'live') {
      if (this.isPaused) this.togglePause();
      this.world.reset(choice);
      this.backToWorld();
      return;
    }
    this.forget();
    sheets.showWaiting('Opening your world', 'The first picture takes a moment.', () => this.leave());
    this.connection.begin(this.lastStart);
  }

  /**
   * Note how the world on screen can be started anew, also after a reload.
   * @param {Record<string, unknown>} start
   */
  keepStart(start) {
    this.lastStart = start;
    saveStart(start);
  }

  /** Whether keys steer at present. */
  get isSteering() {
    return sheets.current() === 'world' && this.connection.state === 'live';
  }

  backToWorld() {
    sheets.show('world');
    byId('video').focus({ preventScroll: true });
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
    switch (state) {
      case 'connecting':
        sheets.showLink(detail.attempt ? 'Reconnecting' : 'Connecting', 'busy');
        break;
      case 'queued':
        sheets.showLink('In the queue', 'busy');
        sheets.showWaiting(
          detail.position === 1 ? 'You are next' : `Number ${detail.position} in the queue`,
          'All worlds are taken at the moment. Yours opens by itself.',
          () => this.leave(),
        );
        break;
      case 'live':
        this.showLive();
        break;
      case 'waiting':
        sheets.showLink(`Link lost, again in ${(detail.delayMs ?? 0) / 1000} s`, 'busy');
        break;
      case 'lost':
        sheets.showLink('Link lost', 'bad');
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
    if (error === undefined && closeCode !== 1008) {
      this.forget();
      void this.boot();
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
    const text = error?.message ?? 'The server closed the connection.';
    if (hadWorld) this.keepPrompt();
    this.trouble(hadWorld ? endTitle(code) : startTitle(code), text, hadWorld ? 'Start it again' : 'Try again');
  }

  /**
   * @param {string} title
   * @param {string} text
   * @param {string} label  Of the button that tries again.
   */
  trouble(title, text, label) {
    const choose = () => {
      this.forget();
      void this.boot();
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
    if (this.lastStart === null) {
      await this.boot();
      return;
    }
    if ((await this.untilReady()) === null) return;
    sheets.showWaiting('Opening your world', 'The first picture takes a moment.', () => this.leave());
    this.connection.begin(this.lastStart);
  }

  /** @param {import('./protocol.js').SessionStarted} started */
  onStarted(started) {
    if (started.mime === null) {
      this.trouble('No video', 'The server offers no format that this page can play.', 'Try again');
      return;
    }
    byId('prompt').maxLength = started.limits.max_prompt_chars;
    this.offerPrompts(started.prompts);
    const isSameWorld = this.world.started(started, started.mime);
    if (isSameWorld && sheets.current() !== 'chooser') this.backToWorld();
  }

  /** @param {Record<string, any>} message */
  onMessage(message) {
    switch (message.type) {
      case 'session.state':
        this.onSessionState(message);
        break;
      case 'event.dropped':
        this.world.eventDropped(message.event_id);
        break;
      case 'error':
        if (Number.isInteger(message.event_id)) this.world.eventDropped(message.event_id);
        if (!message.fatal && !QUIET_ERRORS.has(message.code)) sheets.toast(message.message, 'bad');
        break;
    }
  }

  /** @param {Record<string, any>} message */
  onSessionState(message) {
    this.setPaused(message.state === 'paused');
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
      choose: () => this.leave(),
    });
  }

  /** What starts anew goes on under the prompt it had last. */
  keepPrompt() {
    if (this.lastStart !== null) this.keepStart({ ...this.lastStart, prompt: this.world.prompt });
  }

  /** Begin a new run in the session that failed, once there is a model for it; a new session if its process has ended. */
  async restart() {
    if (this.failure === 'worker_unavailable') {
      this.failure = null;
      this.keepPrompt();
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

  /** @param {import('./player.js').ShownFrame} shown */
  onFrame(shown) {
    this.world.frameShown(shown);
    stage.paintAmbient();
  }

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
    byId('pause').ariaPressed = String(isPaused);
    byId('pause').querySelector('span').textContent = isPaused ? 'Go on' : 'Pause';
    this.showLive();
  }

  // ---------------------------------------------------------------- what the page shows

  showPrompt() {
    const { prompt, isPromptPending } = this.world;
    const input = byId('prompt');
    if (input.dataset.inForce !== prompt) {
      input.dataset.inForce = prompt;
      input.value = prompt;
    }
    byId('prompt-form').querySelector('.field').classList.toggle('pending', isPromptPending);
    for (const chip of byId('prompts').children) chip.ariaPressed = String(chip.textContent === prompt);
  }

  /** @param {string[]} prompts */
  offerPrompts(prompts) {
    const chips = prompts.map((prompt) => {
      const chip = make('button', { type: 'button', ariaPressed: String(prompt === this.world.prompt) }, prompt);
      chip.addEventListener('click', () => {
        this.world.changePrompt(prompt);
        byId('video').focus({ preventScroll: true });
      });
      return chip;
    });
    byId('prompts').replaceChildren(...chips);
  }

  save() {
    if (this.world.recorder.isEmpty) {
      sheets.toast('Nothing has been played yet.');
      return;
    }
    const url = URL.createObjectURL(this.world.recorder.toBlob());
    make('a', { href: url, download: `${this.world.session?.session_id ?? 'world'}.mp4` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  /** @param {boolean} shown */
  showNumbers(shown) {
    byId('hud').hidden = !shown;
    byId('stats').ariaPressed = String(shown);
  }

  listen() {
    const isSteering = () => this.isSteering;
    listenToKeyboard(this.held, isSteering);
    listenToGamepad(this.held, isSteering);
    listenToPad(byId('pad-move'), this.held);
    listenToPad(byId('pad-look'), this.held);
    byId('pause').addEventListener('click', () => this.togglePause());
    byId('reset').addEventListener('click', () => this.reset());
    byId('worlds').addEventListener('click', () => this.choose());
    byId('save').addEventListener('click', () => this.save());
    byId('close').addEventListener('click', () => this.leave());
    document.querySelector('.actions')?.addEventListener('click', (event) => {
      // After a click of the mouse the keys belong to the world again; a keyboard's focus stays where it is.
      const isPointer = /** @type {MouseEvent} */ (event).detail > 0;
      if (isPointer && this.isSteering) byId('video').focus({ preventScroll: true });
    });
    // A phone has no room for the numbers beside the picture; elsewhere the true rate is in sight from the start.
    this.showNumbers(!window.matchMedia('(max-width: 720px)').matches);
    byId('stats').addEventListener('click', () => {
      this.showNumbers(byId('hud').hidden);
    });
    byId('prompt-form').addEventListener('submit', (/** @type {Event} */ event) => {
      event.preventDefault();
      this.world.changePrompt(byId('prompt').value.trim());
      byId('video').focus({ preventScroll: true });
    });
    addEventListener('keydown', (event) => this.shortcut(event));
    stage.watchIdle();
  }

  /** @param {KeyboardEvent} event */
  shortcut(event) {
    if (event.key === 'Escape' && document.activeElement === byId('prompt')) {
      byId('prompt').value = this.world.prompt;
      byId('video').focus({ preventScroll: true });
    }
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.repeat;
    if (!isPlain || !this.isSteering || (event.target instanceof HTMLElement && event.target.matches('input'))) return;
    if (event.code === 'KeyP') this.togglePause();
    if (event.code === 'KeyR') this.reset();
  }
}

const app = new App();
/** For a look from the console, and for tests. */
window.worldserve = app;
void app.boot();
