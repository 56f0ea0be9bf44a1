'use strict';
/**
 * One world as this page knows it: its session, epoch and run, which events are under way, which chunks came and which were
 * seen. It moves media from the link to the player and messages from the controls to the link; it owns no element.
 *
 * @typedef {object} WorldView  What the page does when something changes.
 * @property {() => void} onPicture        A first frame is on screen.
 * @property {() => void} onPrompt         The prompt, or what is pending of it, changed.
 * @property {(actions: string[]) => void} onApplied  Actions in force in the frame on screen.
 * @property {(walk: Walk) => void} onPlace        The camera moved, or stands at the start again.
 */

import { actionsAt, AppliedTracker } from './applied.js';
import { ControlSender } from './controls.js';
import { ReportDelay } from './pacing.js';
import * as protocol from './protocol.js';
import { Recorder } from './recorder.js';
import { clearBookmark, loadBookmark, saveBookmark } from './store.js';
import { Walk } from './walk.js';

export class World {
  /**
   * @param {object} parts
   * @param {import('./screen.js').Screen} parts.player
   * @param {(message: object) => boolean} parts.send   Returns whether the message left the page.
   * @param {() => string[]} parts.held                 Actions held now.
   * @param {import('./hud.js').Hud} parts.hud
   * @param {WorldView} parts.view
   */
  constructor({ player, send, held, hud, view }) {
    this._player = player;
    this._send = send;
    this._held = held;
    this._hud = hud;
    this._view = view;
    this.recorder = new Recorder();
    this.walk = new Walk();
    this.reportDelay = new ReportDelay();
    /** @type {{run: number, chunkIndex: number} | null}  A report that waits for the next chunk to arrive. */
    this._heldReport = null;
    /** Last chunk of the run that was reported in this epoch. */
    this._reportedChunk = -1;
    this._tracker = new AppliedTracker();
    this._sender = new ControlSender({
      send: (transitions) => this._sendControls(transitions),
      pendingEvents: () => this._tracker.pending,
    });
    this.bookmark = loadBookmark();
    this.session = /** @type {protocol.SessionStarted | null} */ (null);
    /** The prompt sent last, and the one that the chunks show. */
    this.prompt = '';
    this._promptInForce = '';
    /** That of a reset which the server has not answered. */
    this._nextPrompt = /** @type {string | null} */ (null);
    this.run = 0;
    this.epoch = -1;
    /** Chunk on screen. */
    this.shown = /** @type {{run: number, chunkIndex: number} | null} */ (null);
    this._receivedChunk = -1;
    this._receivedRun = /** @type {number | null} */ (null);
    this._promptEvents = /** @type {Map<number, string>} */ (new Map());
    /** Whether the server refused the last it was told of the keys. */
    this._isUnsaid = false;
    /** Controls of chunks that are not off the screen yet, by `run/chunk_index`. */
    this._chunkControls = /** @type {Map<string, import('./applied.js').ChunkControls>} */ (new Map());
  }

  /** Whether there is a session to come back to. */
  get isKept() {
    return this.bookmark !== null;
  }

  /** Whether a prompt was sent and no chunk shows it yet. */
  get isPromptPending() {
    return this._promptEvents.size > 0;
  }

  /** Forget how to come back; what is on screen stays. */
  letGo() {
    clearBookmark();
    this.bookmark = null;
  }

  /** Forget everything; the next start is another world. */
  forget() {
    this.letGo();
    this.session = null;
    this.shown = null;
    this.epoch = -1;
    this._receivedChunk = -1;
    this._receivedRun = null;
    this._clearEvents();
    this._chunkControls.clear();
    this.walk.clear();
    this._view.onPlace(this.walk);
    this.recorder.clear();
    this._player.stop();
  }

  /** @returns {{token: string, lastChunkIndex: number} | null} */
  resumePoint() {
    if (this.bookmark === null) return null;
    // After a reload nothing is buffered, so the chunk that was on screen is asked for again.
    const last = this.session === null ? this.bookmark.shownChunk - 1 : this._receivedChunk;
    return { token: this.bookmark.token, lastChunkIndex: Math.max(-1, last) };
  }

  // ---------------------------------------------------------------- from the link

  /**
   * @param {protocol.SessionStarted} started
   * @returns {boolean}  Whether this is the world that was on screen before.
   */
  started(started) {
    const bookmark = this.bookmark;
    const isSameWorld = this.session?.session_id === started.session_id;
    const isKnownRun = bookmark?.sessionId === started.session_id && bookmark.run === started.run;
    if (!isSameWorld || started.run !== this.run) this._receivedChunk = -1;
    this.session = started;
    this.epoch = started.epoch;
    this.run = started.run;
    this.walk.begins(started.run, started.start_image);
    this._keep({
      token: started.resume_token,
      sessionId: started.session_id,
      run: started.run,
      shownChunk: isKnownRun ? bookmark.shownChunk : -1,
      nextEventId: bookmark?.nextEventId ?? 0,
    });
    this._clearEvents();
    this._promptInForce = started.prompt;
    this._setPrompt(started.prompt);
    this._player.leadChunks = started.limits.lead_chunks;
    this._player.beginEpoch(started, isSameWorld);
    if (isSameWorld && isKnownRun && bookmark.shownChunk >= 0) this._report(this.run, bookmark.shownChunk);
    // A full snapshot heals a key-up that got lost with the old link.
    if (bookmark !== null || this._held().length > 0) this.steer(this._held());
    return isSameWorld;
  }

  /**
   * The session said which run it is in.
   * @param {number} run
   */
  inRun(run) {
    // A chunk of the old run may still come after a reset was answered; runs only count up.
    if (run <= this.run) return;
    this.run = run;
    this._receivedChunk = -1;
    const prompt = this._nextPrompt;
    this._clearEvents();
    if (prompt !== null) {
      this._promptInForce = prompt;
      this._setPrompt(prompt);
    }
    if (this.bookmark !== null) this._keep({ ...this.bookmark, run, shownChunk: -1 });
    // A reset clears the controls; keys that are still down steer on.
    if (this._held().length > 0) this.steer(this._held());
  }

  /** @param {number} eventId */
  eventDropped(eventId) {
    this._tracker.dropped(eventId);
    if (this._promptEvents.delete(eventId)) this._view.onPrompt();
  }

  /**
   * The server did not take an event: the prompt is what it was, and keys that are held or let go are said with the next chunk.
   * @param {number} eventId
   */
  eventRefused(eventId) {
    const isPrompt = this._promptEvents.has(eventId);
    this.eventDropped(eventId);
    if (isPrompt) this._setPrompt([...this._promptEvents.values()].at(-1) ?? this._promptInForce);
    else this._isUnsaid = true;
  }

  /**
   * @param {protocol.ChunkHeader} header
   * @param {Uint8Array} payload
   */
  chunk(header, payload) {
    if (header.epoch !== this.epoch || this.session === null) return;
    if (header.kind === 'init') {
      this.recorder.init(payload);
      this._player.appendInit(payload);
      return;
    }
    const chunkIndex = /** @type {number} */ (header.chunk_index);
    this.inRun(header.run);
    const isNewRun = this._receivedRun !== null && header.run !== this._receivedRun;
    this._receivedRun = header.run;
    this._receivedChunk = chunkIndex;
    this._releaseReport();
    this._chunkControls.set(keyOf(header.run, chunkIndex), this._tracker.chunk(header));
    this.walk.chunk(header);
    for (const { event_id: eventId } of header.applied) {
      this._promptInForce = this._promptEvents.get(eventId) ?? this._promptInForce;
      this._promptEvents.delete(eventId);
    }
    this._view.onPrompt();
    if (this._isUnsaid) {
      this._isUnsaid = false;
      this.steer(this._held());
    }
    this._hud.chunk(header);
    this._player.appendChunk(payload, header, isNewRun);
  }

  // ---------------------------------------------------------------- from the player

  /** @param {import('./screen.js').Arrival} arrival */
  arrived({ bytes, header, slackS, chunkS }) {
    if (slackS !== null) this.reportDelay.arrived(slackS, chunkS);
    if (this.session !== null) this.recorder.chunk(bytes, header, this.session);
  }

  /** @param {import('./timeline.js').ShownFrame} shown */
  frameShown({ segment, frame, isFirstOfChunk, shownMs }) {
    const controls = this._chunkControls.get(keyOf(segment.run, segment.chunkIndex));
    if (controls !== undefined) {
      this._view.onApplied(actionsAt(controls.held, frame));
      for (const { atFrame, pressedMs } of controls.landings) {
        if (atFrame <= frame) this._hud.latency(shownMs - pressedMs);
      }
      controls.landings = controls.landings.filter(({ atFrame }) => atFrame > frame);
    }
    if (isFirstOfChunk) this._chunkShown(segment);
    if (this.walk.shown(segment, frame)) this._view.onPlace(this.walk);
  }

  /** @param {import('./timeline.js').Segment} segment */
  _chunkShown({ run, chunkIndex }) {
    this.shown = { run, chunkIndex };
    this._view.onPicture();
    this._hud.place(run, this.epoch, chunkIndex);
    for (const key of this._chunkControls.keys()) {
      const [ofRun, ofChunk] = key.split('/').map(Number);
      if (ofRun < run || (ofRun === run && ofChunk < chunkIndex)) this._chunkControls.delete(key);
    }
    if (run !== this.run || this.bookmark === null) return;
    this._keep({ ...this.bookmark, shownChunk: chunkIndex });
    const session = this.session;
    setTimeout(() => {
      if (session?.session_id === this.session?.session_id) this._reportInTurn(run, chunkIndex);
    }, this.reportDelay.delayMs);
  }

  /**
   * Report a chunk once the next one has arrived (unless the server waits for the report to make it). The report lets the
   * chunk after the next start, and a key pressed before the next one has arrived must still come in time for that.
   * @param {number} run
   * @param {number} chunkIndex
   */
  _reportInTurn(run, chunkIndex) {
    const held = this._heldReport;
    if (held?.run === run && held.chunkIndex > chunkIndex) return;
    this._heldReport = { run, chunkIndex };
    this._releaseReport();
  }

  /** Report as far as it is time to. A chunk that was passed over is behind the viewer, too. */
  _releaseReport() {
    if (this._heldReport === null || this.session === null) return;
    const { run, chunkIndex } = this._heldReport;
    if (run !== this.run) {
      this._heldReport = null;
      return;
    }
    const ahead = Math.min(1, this.session.limits.lead_chunks);
    const inTurn = Math.min(chunkIndex, this._receivedChunk - ahead);
    if (inTurn === chunkIndex) this._heldReport = null;
    if (inTurn > this._reportedChunk) this._report(run, inTurn);
  }

  /**
   * Chunks count on across epochs, so one that came through an earlier socket is reported in the present epoch.
   * @param {number} run
   * @param {number} chunkIndex
   */
  _report(run, chunkIndex) {
    if (run !== this.run || this.epoch < 0) return;
    this._reportedChunk = chunkIndex;
    const bufferedMs = this._player.bufferedS * 1000;
    this._send(protocol.playbackMessage({ epoch: this.epoch, run, chunkIndex, bufferedMs }));
  }

  // ---------------------------------------------------------------- to the link

  /**
   * The held actions changed.
   * @param {string[]} actions
   */
  steer(actions) {
    if (this.bookmark !== null) this._sender.change(actions);
  }

  /**
   * @param {string} prompt
   * @returns {boolean}  False: it could not be sent.
   */
  changePrompt(prompt) {
    if (prompt === '' || prompt === this.prompt || this.bookmark === null) return true;
    const eventId = this._takeEventId();
    if (!this._send(protocol.promptMessage(eventId, prompt))) return false;
    this._tracker.sent(eventId, []);
    this._promptEvents.set(eventId, prompt);
    this._setPrompt(prompt);
    return true;
  }

  /**
   * Start the rollout again; the prompt in force is kept unless there is a new one.
   * @param {{prompt?: string, image?: protocol.ImageReference}} wish
   */
  reset(wish) {
    const prompt = wish.prompt ?? this.prompt;
    if (this._send(protocol.resetMessage({ ...wish, prompt }))) this._nextPrompt = prompt;
  }

  /** The server did not take the reset: the run goes on under the prompt that it had. */
  resetRefused() {
    this._nextPrompt = null;
  }

  /**
   * @param {protocol.Transition[]} transitions
   * @returns {boolean}
   */
  _sendControls(transitions) {
    const eventId = this._takeEventId();
    this._tracker.sent(eventId, transitions);
    const isSent = this._send(protocol.controlMessage(eventId, transitions));
    if (!isSent) this._tracker.dropped(eventId);
    return isSent;
  }

  _takeEventId() {
    if (this.bookmark === null) throw new Error('an event without a session');
    const eventId = this.bookmark.nextEventId;
    this._keep({ ...this.bookmark, nextEventId: eventId + 1 });
    return eventId;
  }

  // ---------------------------------------------------------------- own state

  /** @param {import('./store.js').Bookmark} bookmark */
  _keep(bookmark) {
    this.bookmark = bookmark;
    saveBookmark(bookmark);
  }

  /** @param {string} prompt */
  _setPrompt(prompt) {
    this.prompt = prompt;
    this._view.onPrompt();
  }

  _clearEvents() {
    this.reportDelay.reset();
    this._heldReport = null;
    this._reportedChunk = -1;
    this._tracker.reset();
    this._sender.discard();
    this._isUnsaid = false;
    this._nextPrompt = null;
    this._promptEvents.clear();
    this._view.onPrompt();
  }
}

/**
 * @param {number} run
 * @param {number} chunkIndex
 */
function keyOf(run, chunkIndex) {
  return `${run}/${chunkIndex}`;
}
