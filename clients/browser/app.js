'use strict';
/**
 * The page: brings link, player, controls and numbers together, and decides what is on screen.
 *
 * boot -> loading -> chooser -> waiting -> world         a reload with a bookmark goes straight to waiting
 */

import { actionsAt, AppliedTracker } from './applied.js';
import { Chooser } from './chooser.js';
import { Connection } from './connection.js';
import { ControlSender, HeldActions, listenToGamepad, listenToKeyboard, listenToPad } from './controls.js';
import { byId, make } from './dom.js';
import { Hud } from './hud.js';
import { ServerApi } from './info.js';
import { ReportDelay } from './pacing.js';
import { Player } from './player.js';
import * as protocol from './protocol.js';
import { Recorder } from './recorder.js';
import * as sheets from './sheets.js';
import { accessToken, clearBookmark, loadBookmark, saveBookmark } from './store.js';

const IDLE_AFTER_MS = 5000;
const AMBIENT_EVERY_FRAMES = 3;

/** Errors that concern one message only and need no sheet. */
const QUIET_ERRORS = new Set(['duplicate', 'stale']);

class App {
  constructor() {
    const token = accessToken();
    this.api = new ServerApi(token);
    this.bookmark = loadBookmark();
    this.info = /** @type {import('./info.js').ServerInfo | null} */ (null);
    this.session = /** @type {import('./protocol.js').SessionStarted | null} */ (null);
    this.isPaused = false;
    this.epoch = -1;
    this.run = 0;
    this.receivedChunk = -1;
    this.showsRun = -1;
    this.lastStart = /** @type {object | null} */ (null);
    this.prompt = '';
    this.promptEvents = /** @type {Map<number, string>} */ (new Map());
    /** Controls of chunks that are not off the screen yet, by `run/chunk_index`. */
    this.chunkControls = /** @type {Map<string, import('./applied.js').ChunkControls>} */ (new Map());
    this.framesSinceAmbient = 0;

    this.reportDelay = new ReportDelay();
    this.tracker = new AppliedTracker();
    this.recorder = new Recorder();
    this.player = new Player({
      video: byId('video'),
      still: byId('still'),
      onFrame: (shown) => this.onFrame(shown),
      onArrival: (slackS, chunkS) => this.reportDelay.arrived(slackS, chunkS),
      onError: (error) => this.onPlayerError(error),
    });
    this.connection = new Connection({
      url: `${location.protocol === 'https:' ? 'wss' : 'ws'}://${location.host}/v1/world`,
      protocols: token === null ? [] : [`worldserve.token.${token}`],
      handlers: {
        onState: (state, detail) => this.onLink(state, detail),
        onStarted: (started) => this.onStarted(started),
        onMessage: (message) => this.onMessage(message),
        onChunk: (header, payload) => this.onChunk(header, payload),
        resumePoint: () => this.resumePoint(),
      },
    });
    this.hud = new Hud(() => ({
      presentedFrames: this.player.presentedFrames,
      bufferedMs: this.player.bufferedS * 1000,
      roundTripMs: this.connection.roundTripMs,
    }));
    this.sender = new ControlSender({
      send: (transitions) => this.sendControls(transitions),
      pendingEvents: () => this.tracker.pending,
    });
    this.held = new HeldActions((actions) => {
      this.lightKeys('held', actions);
      if (this.connection.state === 'live') this.sender.change(actions);
    });
    this.chooser = new Chooser({ api: this.api, onBegin: (choice) => this.begin(choice) });
    this.listen();
  }

  // ---------------------------------------------------------------- start

  async boot() {
    sheets.showLoading(null);
    sheets.showLink('Starting', 'busy');
    try {
      this.info = await this.api.untilReady((info) => {
        if (info?.error) throw new Error(info.error);
        if (!info?.ready) sheets.showLoading(info);
      });
    } catch (error) {
      sheets.showLink('Not available', 'bad');
      const text = error instanceof Error ? error.message : String(error);
      sheets.showTrouble({ title: 'The model cannot be served', text, retry: { label: 'Try again', run: () => void this.boot() }, choose: null });
      return;
    }
    byId('notice').textContent = this.info.notice;
    byId('notice').hidden = this.info.notice === '';
    await this.chooser.offer(this.info.start_images);
    if (this.bookmark !== null) {
      sheets.showWaiting('Returning to your world', 'Picking it up where you left it.', () => this.leave());
      this.connection.begin(null);
    } else {
      this.choose();
    }
  }

  choose() {
    sheets.showLink('Ready', 'none');
    this.chooser.open(this.connection.state === 'live' ? () => this.backToWorld() : null);
  }

  /** @param {import('./chooser.js').Choice} choice */
  begin(choice) {
    if (this.connection.state === 'live') {
      this.reset(choice);
      this.backToWorld();
      return;
    }
    this.forget();
    this.lastStart = protocol.startMessage(choice);
    sheets.showWaiting('Opening your world', 'The first picture takes a moment.', () => this.leave());
    this.connection.begin(this.lastStart);
  }

  /** Whether keys steer at present. */
  get isSteering() {
    return sheets.current() === 'world' && this.connection.state === 'live';
  }

  backToWorld() {
    sheets.show('world');
    byId('video').focus({ preventScroll: true });
    this.onLink(this.connection.state, {});
  }

  /** Drop all traces of the session; the next start is a new one. */
  forget() {
    clearBookmark();
    this.bookmark = null;
    this.session = null;
    this.isPaused = false;
    this.epoch = -1;
    this.receivedChunk = -1;
    this.showsRun = -1;
    this.reportDelay.reset();
    this.tracker.reset();
    this.promptEvents.clear();
    this.chunkControls.clear();
    this.recorder.clear();
    document.body.classList.remove('has-picture');
    this.player.stop();
  }

  leave() {
    this.connection.close();
  }

  // ---------------------------------------------------------------- link

  resumePoint() {
    if (this.bookmark === null) return null;
    // After a reload nothing is buffered, so the chunk that was on screen is asked for again.
    const lastChunkIndex = this.session === null ? this.bookmark.shownChunk - 1 : this.receivedChunk;
    return { token: this.bookmark.token, lastChunkIndex: Math.max(-1, lastChunkIndex) };
  }

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
        sheets.showLink(this.isPaused ? 'Paused' : 'Live', this.isPaused ? 'none' : 'good');
        break;
      case 'waiting':
        sheets.showLink(`Link lost, again in ${(detail.delayMs ?? 0) / 1000} s`, 'busy');
        this.tracker.reset();
        break;
      case 'lost':
        sheets.showLink('Link lost', 'bad');
        this.trouble('The link is lost', detail.error?.message ?? 'The server did not answer three times. Your world waits there for a short while.', 'Reconnect');
        break;
      case 'ended':
        this.onEnded(detail);
        break;
    }
  }

  /** @param {import('./connection.js').LinkDetail} detail */
  onEnded({ error, closeCode }) {
    const wasReload = this.session === null && this.bookmark !== null;
    if (error === undefined && closeCode !== 1008) {
      this.forget();
      this.choose();
      return;
    }
    sheets.showLink('Ended', 'bad');
    const code = error?.code ?? '';
    if (code === 'taken_over') {
      this.trouble('This world went on in another tab', 'Only one tab can steer it.', 'Take it back');
      return;
    }
    clearBookmark();
    this.bookmark = null;
    if (wasReload) {
      this.forget();
      this.choose();
      sheets.toast('Your last world has been closed in the meantime.');
      return;
    }
    this.trouble(titleOf(code), error?.message ?? 'The server closed the connection.', 'Start again');
  }

  /**
   * @param {string} title
   * @param {string} text
   * @param {string} label
   */
  trouble(title, text, label) {
    const run = () => {
      if (this.bookmark === null) {
        const start = this.lastStart;
        this.forget();
        if (start === null) {
          void this.boot();
          return;
        }
        sheets.showWaiting('Opening your world', 'The first picture takes a moment.', () => this.leave());
        this.connection.begin(start);
        return;
      }
      sheets.showWaiting('Reconnecting', 'Picking it up where you left it.', () => this.leave());
      this.connection.retry();
    };
    const choose = () => {
      this.forget();
      void this.boot();
    };
    sheets.showTrouble({ title, text, retry: { label, run }, choose });
  }

  /** @param {import('./protocol.js').SessionStarted} started */
  onStarted(started) {
    const isSameWorld = this.session?.session_id === started.session_id;
    const nextEventId = this.bookmark?.nextEventId ?? 0;
    const isKnownRun = this.bookmark?.sessionId === started.session_id && this.bookmark.run === started.run;
    if (!isSameWorld || started.run !== this.run) this.receivedChunk = -1;
    this.session = started;
    this.epoch = started.epoch;
    this.run = started.run;
    this.bookmark = {
      token: started.resume_token,
      sessionId: started.session_id,
      run: started.run,
      shownChunk: isKnownRun ? (this.bookmark?.shownChunk ?? -1) : -1,
      nextEventId,
      prompt: started.prompt,
    };
    saveBookmark(this.bookmark);
    if (started.mime === null) {
      this.trouble('No video', 'The server offers no format that this page can play.', 'Start again');
      return;
    }
    byId('stage').style.setProperty('--shape', `${started.width} / ${started.height}`);
    byId('prompt').maxLength = started.limits.max_prompt_chars;
    this.showPrompt(started.prompt);
    this.offerPrompts(started.prompts);
    this.player.leadChunks = started.limits.lead_chunks;
    this.player.beginEpoch(started.mime, isSameWorld);
    if (isSameWorld && this.bookmark.shownChunk >= 0) this.report(this.run, this.bookmark.shownChunk);
    this.tracker.reset();
    if (isSameWorld && sheets.current() !== 'chooser') this.backToWorld();
    this.sender.discard();
    this.sender.change(this.held.snapshot());
  }

  /** @param {Record<string, any>} message */
  onMessage(message) {
    switch (message.type) {
      case 'session.state':
        this.onSessionState(message);
        break;
      case 'event.dropped':
        this.tracker.dropped(message.event_id);
        if (this.promptEvents.delete(message.event_id)) this.markPrompt();
        break;
      case 'error':
        if (message.event_id != null) {
          this.tracker.dropped(message.event_id);
          if (this.promptEvents.delete(message.event_id)) this.markPrompt();
        }
        if (!message.fatal && !QUIET_ERRORS.has(message.code)) sheets.toast(message.message, 'bad');
        break;
    }
  }

  /** @param {Record<string, any>} message */
  onSessionState(message) {
    this.setPaused(message.state === 'paused');
    if (message.run !== this.run) this.beginRun(message.run);
    if (message.state === 'failed') {
      sheets.showTrouble({
        title: 'This run failed',
        text: message.reason ?? 'The model could not make the next second of this world.',
        retry: {
          label: 'Start it again',
          run: () => {
            this.reset({});
            this.backToWorld();
          },
        },
        choose: () => this.leave(),
      });
    }
  }

  /** @param {number} run */
  beginRun(run) {
    this.run = run;
    this.receivedChunk = -1;
    this.reportDelay.reset();
    this.tracker.reset();
    this.promptEvents.clear();
    this.markPrompt();
    if (this.bookmark !== null) {
      this.bookmark = { ...this.bookmark, run, shownChunk: -1 };
      saveBookmark(this.bookmark);
    }
    // A reset clears the controls; keys that are still down steer on.
    if (this.held.snapshot().length > 0) this.sender.change(this.held.snapshot());
  }

  // ---------------------------------------------------------------- media

  /**
   * @param {import('./protocol.js').ChunkHeader} header
   * @param {Uint8Array} payload
   */
  onChunk(header, payload) {
    if (header.epoch !== this.epoch) return;
    if (header.kind === 'init') {
      this.recorder.init(payload);
      this.player.appendInit(payload);
      return;
    }
    const chunkIndex = /** @type {number} */ (header.chunk_index);
    if (header.run !== this.run) this.beginRun(header.run);
    const isNewRun = header.run !== this.showsRun && this.showsRun !== -1;
    this.showsRun = header.run;
    this.receivedChunk = chunkIndex;
    this.chunkControls.set(`${header.run}/${chunkIndex}`, this.tracker.chunk(header));
    for (const { event_id: eventId } of header.applied) this.promptEvents.delete(eventId);
    this.markPrompt();
    this.hud.chunk(header.timings_ms);
    this.recorder.fragment(payload, (header.num_frames * header.timescale) / (this.session?.fps ?? 1));
    this.player.appendChunk(payload, header, isNewRun);
  }

  /** @param {import('./player.js').ShownFrame} shown */
  onFrame({ segment, frame, isFirstOfChunk, shownMs }) {
    const key = `${segment.run}/${segment.chunkIndex}`;
    const controls = this.chunkControls.get(key);
    if (controls !== undefined) {
      this.lightKeys('applied', actionsAt(controls.held, frame));
      const landed = controls.landings.filter(({ atFrame }) => atFrame <= frame);
      for (const { sentMs } of landed) this.hud.latency(shownMs - sentMs);
      controls.landings = controls.landings.filter(({ atFrame }) => atFrame > frame);
    }
    if (isFirstOfChunk) this.onChunkShown(segment);
    this.framesSinceAmbient += 1;
    if (this.framesSinceAmbient >= AMBIENT_EVERY_FRAMES) this.paintAmbient();
  }

  /** @param {import('./player.js').Segment} segment */
  onChunkShown({ run, chunkIndex }) {
    document.body.classList.add('has-picture');
    if (sheets.current() === 'waiting') this.backToWorld();
    this.hud.place(run, this.epoch, chunkIndex);
    for (const key of this.chunkControls.keys()) {
      const [ofRun, ofChunk] = key.split('/').map(Number);
      if (ofRun < run || (ofRun === run && ofChunk < chunkIndex)) this.chunkControls.delete(key);
    }
    if (run !== this.run || this.bookmark === null) return;
    this.bookmark.shownChunk = chunkIndex;
    saveBookmark(this.bookmark);
    setTimeout(() => this.report(run, chunkIndex), this.reportDelay.delayMs);
  }

  /**
   * Chunks count on across epochs, so one that came through an earlier socket is reported in the present epoch.
   * @param {number} run
   * @param {number} chunkIndex
   */
  report(run, chunkIndex) {
    if (run !== this.run) return;
    const bufferedMs = this.player.bufferedS * 1000;
    this.connection.send(protocol.playbackMessage({ epoch: this.epoch, run, chunkIndex, bufferedMs }));
  }

  /** Let the picture's colours reach around it, from a handful of pixels. */
  paintAmbient() {
    this.framesSinceAmbient = 0;
    const canvas = byId('ambient');
    canvas.getContext('2d').drawImage(byId('video'), 0, 0, canvas.width, canvas.height);
  }

  /** @param {Error} error */
  onPlayerError(error) {
    this.connection.drop();
    sheets.toast(`The video had to be restarted: ${error.message}`, 'bad');
  }

  // ---------------------------------------------------------------- steering

  takeEventId() {
    if (this.bookmark === null) throw new Error('an event without a session');
    const eventId = this.bookmark.nextEventId;
    this.bookmark.nextEventId += 1;
    saveBookmark(this.bookmark);
    return eventId;
  }

  /** @param {import('./protocol.js').Transition[]} transitions */
  sendControls(transitions) {
    if (this.connection.state !== 'live') return false;
    const eventId = this.takeEventId();
    this.tracker.sent(eventId, transitions, performance.now());
    return this.connection.send(protocol.controlMessage(eventId, transitions));
  }

  /** @param {string} prompt */
  sendPrompt(prompt) {
    if (prompt === '' || prompt === this.prompt || this.connection.state !== 'live') return;
    const eventId = this.takeEventId();
    this.promptEvents.set(eventId, prompt);
    this.connection.send(protocol.promptMessage(eventId, prompt));
    this.showPrompt(prompt);
    this.markPrompt();
  }

  /** @param {{prompt?: string, image?: import('./protocol.js').ImageReference}} wish */
  reset(wish) {
    const prompt = wish.prompt ?? this.prompt;
    this.connection.send(protocol.resetMessage({ ...wish, prompt }));
    this.showPrompt(prompt);
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
    byId('pause').ariaPressed = String(isPaused);
    byId('pause').querySelector('span').textContent = isPaused ? 'Go on' : 'Pause';
    this.onLink(this.connection.state, {});
  }

  // ---------------------------------------------------------------- what the page shows

  /**
   * @param {'held' | 'applied'} kind
   * @param {string[]} actions
   */
  lightKeys(kind, actions) {
    for (const key of document.querySelectorAll('[data-action]')) {
      key.classList.toggle(kind, actions.includes(/** @type {HTMLElement} */ (key).dataset.action ?? ''));
    }
  }

  /** @param {string} prompt */
  showPrompt(prompt) {
    this.prompt = prompt;
    byId('prompt').value = prompt;
    for (const chip of byId('prompts').children) chip.ariaPressed = String(chip.textContent === prompt);
  }

  markPrompt() {
    byId('prompt-form').querySelector('.field').classList.toggle('pending', this.promptEvents.size > 0);
  }

  /** @param {string[]} prompts */
  offerPrompts(prompts) {
    const chips = prompts.map((prompt) => {
      const chip = make('button', { type: 'button', ariaPressed: String(prompt === this.prompt) }, prompt);
      chip.addEventListener('click', () => {
        this.sendPrompt(prompt);
        byId('video').focus({ preventScroll: true });
      });
      return chip;
    });
    byId('prompts').replaceChildren(...chips);
  }

  save() {
    if (this.recorder.isEmpty) {
      sheets.toast('Nothing has been played yet.');
      return;
    }
    const url = URL.createObjectURL(this.recorder.toBlob());
    make('a', { href: url, download: `${this.session?.session_id ?? 'world'}.mp4` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  listen() {
    const isSteering = () => this.isSteering;
    listenToKeyboard(this.held, isSteering);
    listenToGamepad(this.held, isSteering);
    listenToPad(byId('pad-move'), this.held);
    listenToPad(byId('pad-look'), this.held);
    byId('pause').addEventListener('click', () => this.togglePause());
    byId('reset').addEventListener('click', () => this.reset({}));
    byId('worlds').addEventListener('click', () => this.choose());
    byId('save').addEventListener('click', () => this.save());
    byId('close').addEventListener('click', () => this.leave());
    byId('stats').addEventListener('click', () => {
      const hud = byId('hud');
      hud.hidden = !hud.hidden;
      byId('stats').ariaPressed = String(!hud.hidden);
    });
    byId('prompt-form').addEventListener('submit', (/** @type {Event} */ event) => {
      event.preventDefault();
      this.sendPrompt(byId('prompt').value.trim());
      byId('video').focus({ preventScroll: true });
    });
    addEventListener('keydown', (event) => this.shortcut(event));
    this.watchIdle();
  }

  /** @param {KeyboardEvent} event */
  shortcut(event) {
    if (event.key === 'Escape' && document.activeElement === byId('prompt')) {
      this.showPrompt(this.prompt);
      byId('video').focus({ preventScroll: true });
    }
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.repeat;
    if (!isPlain || !this.isSteering || (event.target instanceof HTMLElement && event.target.matches('input'))) return;
    if (event.code === 'KeyP') this.togglePause();
    if (event.code === 'KeyR') this.reset({});
  }

  watchIdle() {
    let timer = 0;
    const stir = () => {
      document.body.classList.remove('is-idle');
      clearTimeout(timer);
      timer = window.setTimeout(() => document.body.classList.add('is-idle'), IDLE_AFTER_MS);
    };
    for (const kind of ['pointermove', 'pointerdown', 'focusin']) addEventListener(kind, stir);
    stir();
  }
}

/** @param {string} code */
function titleOf(code) {
  switch (code) {
    case 'capacity':
      return 'All worlds are taken';
    case 'unauthorized':
      return 'This server asks for a token';
    case 'worker_unavailable':
      return 'The model is not available';
    case 'bad_resume_token':
      return 'This world has been closed';
    default:
      return 'This world has ended';
  }
}

const app = new App();
/** For a look from the console, and for tests. */
window.worldserve = app;
void app.boot();
