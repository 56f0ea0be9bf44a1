'use strict';
/**
 * One session's link to the server: opens the socket, takes messages apart, and comes back through resume when the link
 * breaks. It knows nothing of video or keys.
 *
 * connecting -> (queued) -> live -> waiting -> connecting ...     a broken link is tried again after 1, 2 and 4 s
 *                                           -> lost               all tries failed; `retry()` starts over
 *                                -> ended                         closed on purpose, or nothing is left to come back to
 */

import { closeMessage, parseFrame, pingMessage, resumeMessage } from './protocol.js';

/**
 * @typedef {'idle' | 'connecting' | 'queued' | 'live' | 'waiting' | 'lost' | 'ended'} LinkState
 * @typedef {{code: string, message: string, retryable: boolean, fatal: boolean, field?: string | null}} ServerError
 * @typedef {{attempt?: number, delayMs?: number, position?: number, error?: ServerError, closeCode?: number}} LinkDetail
 *
 * @typedef {object} LinkHandlers
 * @property {(state: LinkState, detail: LinkDetail) => void} onState
 * @property {(started: any) => void} onStarted  `session.started`, or `session.watching` of a spectator.
 * @property {(message: Record<string, any>) => void} onMessage  Every other text message, errors included.
 * @property {(header: import('./protocol.js').ChunkHeader, payload: Uint8Array) => void} onChunk
 * @property {() => {token: string, lastChunkIndex: number} | null} resumePoint  Where to go on, or null: no session yet.
 */

const RETRY_DELAYS_MS = [1000, 2000, 4000];
const PING_EVERY_MS = 5000;
const PONG_WITHIN_MS = 10000;

const CLOSED_NORMALLY = 1000;
const CLOSED_BY_POLICY = 1008;
/** From the range for applications (RFC 6455, 7.4.2): the page means to come back. */
const ABANDONED = 4000;

/**
 * Where the socket of a session is, and what it says to get in.
 * @param {string | null} accessToken
 */
export function addressOf(accessToken) {
  return {
    url: `${location.protocol === 'https:' ? 'wss' : 'ws'}://${location.host}/v1/world`,
    protocols: accessToken === null ? [] : ['worldserve.v1', `worldserve.token.${accessToken}`],
  };
}

export class Connection {
  /**
   * @param {{url: string, protocols: string[], handlers: LinkHandlers}} options
   */
  constructor({ url, protocols, handlers }) {
    /** @type {LinkState} */
    this.state = 'idle';
    this.roundTripMs = /** @type {number | null} */ (null);
    this._url = url;
    this._protocols = protocols;
    this._handlers = handlers;
    this._socket = /** @type {WebSocket | null} */ (null);
    this._start = /** @type {object | null} */ (null);
    this._failures = 0;
    this._retryTimer = 0;
    this._pingTimer = 0;
    this._pingSentMs = /** @type {number | null} */ (null);
    this._fatal = /** @type {ServerError | null} */ (null);
    this._closing = false;
    this._isSuspended = false;
    addEventListener('online', () => this._hurry());
  }

  /**
   * Open a socket with a `session.start` message. Any socket before it is dropped without a word.
   * @param {object | null} start  Null: resume at `resumePoint()`.
   */
  begin(start) {
    this._abandon();
    this._start = start;
    this._failures = 0;
    this._closing = false;
    this._open();
  }

  /** Try again at once after `lost` or while `waiting`. */
  retry() {
    this._failures = 0;
    this._closing = false;
    this._open();
  }

  /**
   * Send a message if the session is live. Returns whether it was handed to the socket.
   * @param {object} message
   */
  send(message) {
    if (this.state !== 'live' || this._socket?.readyState !== WebSocket.OPEN) return false;
    this._socket.send(JSON.stringify(message));
    return true;
  }

  /** End the session for good. */
  close() {
    this._closing = true;
    if (!this.send(closeMessage())) {
      this._abandon();
      this._become('ended', {});
    }
  }

  /** Stop trying; only `retry()` goes on. The session waits on the server for its resume time. */
  suspend() {
    this._abandon(ABANDONED);
    this._isSuspended = true;
    this.state = 'lost';
  }

  /** Close the socket as a lost link would; for a restart on purpose and for tests. */
  drop() {
    this._socket?.close(ABANDONED);
  }

  _open() {
    this._abandon();
    this._fatal = null;
    this._isSuspended = false;
    const socket = new WebSocket(this._url, this._protocols);
    socket.binaryType = 'arraybuffer';
    this._socket = socket;
    this._become('connecting', { attempt: this._failures });
    socket.addEventListener('open', () => this._greet(socket));
    socket.addEventListener('message', (event) => this._receive(socket, event.data));
    socket.addEventListener('close', (event) => this._closed(socket, event.code));
  }

  /** @param {WebSocket} socket */
  _greet(socket) {
    if (socket !== this._socket) return;
    const point = this._handlers.resumePoint();
    const message = point === null ? this._start : resumeMessage(point.token, point.lastChunkIndex);
    socket.send(JSON.stringify(message));
    this._pingSentMs = null;
    this._pingTimer = window.setInterval(() => this._ping(socket), PING_EVERY_MS);
  }

  /** @param {WebSocket} socket */
  _ping(socket) {
    const now = performance.now();
    if (this._pingSentMs !== null && now - this._pingSentMs > PONG_WITHIN_MS) {
      this._closed(socket, 1006);
      return;
    }
    // A socket that is being closed takes nothing any more, and the browser complains of every attempt.
    if (this._pingSentMs === null && this.state === 'live' && socket.readyState === WebSocket.OPEN) {
      this._pingSentMs = now;
      socket.send(JSON.stringify(pingMessage(now)));
    }
  }

  /**
   * @param {WebSocket} socket
   * @param {string | ArrayBuffer} data
   */
  _receive(socket, data) {
    if (socket !== this._socket) return;
    if (typeof data !== 'string') {
      const { header, payload } = parseFrame(data);
      this._handlers.onChunk(header, payload);
      return;
    }
    const message = JSON.parse(data);
    switch (message.type) {
      case 'session.started':
      case 'session.watching':
        this._failures = 0;
        this._become('live', {});
        this._handlers.onStarted(message);
        this._ping(socket);
        break;
      case 'session.queued':
        this._become('queued', { position: message.position });
        break;
      case 'pong':
        this.roundTripMs = performance.now() - message.t;
        this._pingSentMs = null;
        break;
      case 'error':
        if (this.state === 'live') {
          if (message.fatal) this._fatal = message;
          this._handlers.onMessage(message);
        } else {
          this._refused(message);
        }
        break;
      default:
        this._handlers.onMessage(message);
    }
  }

  /**
   * The start was refused: the socket may stay open, but there is nothing to wait for.
   * @param {ServerError} error
   */
  _refused(error) {
    this._abandon();
    this._become('ended', { error });
  }

  /**
   * @param {WebSocket} socket
   * @param {number} closeCode
   */
  _closed(socket, closeCode) {
    if (socket !== this._socket) return;
    this._abandon();
    const error = this._fatal ?? undefined;
    const isFinal = this._closing || closeCode === CLOSED_NORMALLY || closeCode === CLOSED_BY_POLICY;
    if (isFinal || (error !== undefined && !error.retryable)) {
      this._become('ended', { error, closeCode });
      return;
    }
    if (error !== undefined && this._handlers.resumePoint() === null) {
      this._become('ended', { error, closeCode });
      return;
    }
    const delayMs = RETRY_DELAYS_MS[this._failures];
    if (delayMs === undefined) {
      this._become('lost', { error, closeCode });
      return;
    }
    this._failures += 1;
    this._become('waiting', { attempt: this._failures, delayMs, error, closeCode });
    this._retryTimer = window.setTimeout(() => this._open(), delayMs);
  }

  /**
   * Leave the present socket, its timers and its late messages behind.
   * @param {number} [closeCode]
   */
  _abandon(closeCode = CLOSED_NORMALLY) {
    clearTimeout(this._retryTimer);
    clearInterval(this._pingTimer);
    const socket = this._socket;
    this._socket = null;
    if (socket !== null && socket.readyState <= WebSocket.OPEN) socket.close(closeCode);
  }

  _hurry() {
    // A network that is back cures a lost link, and not what the link was suspended for.
    if (!this._isSuspended && (this.state === 'waiting' || this.state === 'lost')) this.retry();
  }

  /**
   * @param {LinkState} state
   * @param {LinkDetail} detail
   */
  _become(state, detail) {
    this.state = state;
    this._handlers.onState(state, detail);
  }
}
