'use strict';
/**
 * From keys, pads and gamepad to control events: which actions are held, and when the server hears of it.
 *
 * Each source (a key, a finger, the gamepad) holds its own set; what counts is their union. A key repeat changes nothing,
 * and losing the window's focus releases everything.
 */

/** @typedef {import('./protocol.js').Transition} Transition */

export const ACTIONS = Object.freeze(['w', 'a', 's', 'd', 'i', 'j', 'k', 'l']);

/** Keys by place on the keyboard, so that other layouts steer alike. */
const ACTION_OF_CODE = Object.freeze({
  KeyW: 'w', KeyA: 'a', KeyS: 's', KeyD: 'd', KeyI: 'i', KeyJ: 'j', KeyK: 'k', KeyL: 'l',
  ArrowUp: 'i', ArrowLeft: 'j', ArrowDown: 'k', ArrowRight: 'l',
});

/** More changes than a chunk has frames can't be seen; the latest count. */
const MAX_TRANSITIONS = 16;
const STICK_THRESHOLD = 0.4;
/** How far around a pad's key a finger still counts as on it, in key sizes: two keys together give a diagonal. */
const FINGER_REACH = 0.35;

export class HeldActions {
  /** @param {(actions: string[]) => void} onChange  Called with the sorted union whenever it changed. */
  constructor(onChange) {
    this._onChange = onChange;
    this._held = /** @type {Map<string, Set<string>>} */ (new Map());
    this._last = '';
  }

  /** @returns {string[]} */
  snapshot() {
    const union = new Set([...this._held.values()].flatMap((actions) => [...actions]));
    return ACTIONS.filter((action) => union.has(action));
  }

  /**
   * Say what a source holds now.
   * @param {string} source
   * @param {Iterable<string>} actions
   */
  hold(source, actions) {
    const held = new Set(actions);
    if (held.size > 0) this._held.set(source, held);
    else this._held.delete(source);
    this._announce();
  }

  /** @param {string} [prefix]  Of the names of the sources that let go. */
  releaseAll(prefix = '') {
    for (const source of [...this._held.keys()]) if (source.startsWith(prefix)) this._held.delete(source);
    this._announce();
  }

  _announce() {
    const actions = this.snapshot();
    const text = actions.join('');
    if (text === this._last) return;
    this._last = text;
    this._onChange(actions);
  }
}

/**
 * Batches changes into events. The first change goes out at once; changes that follow within `gapMs` travel together as
 * transitions of one event, so a quick tap is never lost and never floods the server.
 */
export class ControlSender {
  /**
   * @param {object} options
   * @param {(transitions: Transition[]) => boolean} options.send  Returns whether the event left the page.
   * @param {() => number} options.pendingEvents  Events sent and not answered by a chunk yet.
   * @param {() => number} [options.now]  Milliseconds.
   * @param {(run: () => void, delayMs: number) => void} [options.later]
   */
  constructor({ send, pendingEvents, now = () => performance.now(), later = (run, delayMs) => void setTimeout(run, delayMs) }) {
    this._send = send;
    this._pendingEvents = pendingEvents;
    this._now = now;
    this._later = later;
    this._waiting = /** @type {Transition[]} */ ([]);
    this._lastSentMs = -Infinity;
    this._isScheduled = false;
  }

  /** @param {string[]} actions */
  change(actions) {
    this._waiting.push({ actions, client_ts_ms: Math.round(this._now()) });
    if (this._isScheduled) return;
    const waitMs = this._lastSentMs + this._gapMs() - this._now();
    if (waitMs <= 0) {
      this._flush();
      return;
    }
    this._isScheduled = true;
    this._later(() => {
      this._isScheduled = false;
      this._flush();
    }, waitMs);
  }

  /** Forget what was not sent; the next change is a full snapshot anyway. */
  discard() {
    this._waiting = [];
  }

  _gapMs() {
    return this._pendingEvents() < 16 ? 33 : 250;
  }

  _flush() {
    if (this._waiting.length === 0) return;
    const transitions = this._waiting.slice(-MAX_TRANSITIONS);
    this._waiting = [];
    if (this._send(transitions)) this._lastSentMs = this._now();
  }
}

/** @param {EventTarget | null} target */
function isTyping(target) {
  return target instanceof HTMLElement && target.matches('input, textarea, select, [contenteditable]');
}

/**
 * Listen to the keyboard. Returns nothing; `held` is told.
 * @param {HeldActions} held
 * @param {() => boolean} isSteering  Whether keys should act at present.
 */
export function listenToKeyboard(held, isSteering) {
  /** @param {KeyboardEvent} event */
  const actionOf = (event) => {
    const target = event.target;
    const isPress = event.code === 'Space' || event.code === 'Enter';
    if (isPress && target instanceof HTMLElement) return target.dataset.action;
    return /** @type {Record<string, string>} */ (ACTION_OF_CODE)[event.code];
  };
  addEventListener('keydown', (event) => {
    const action = actionOf(event);
    if (action === undefined || !isSteering() || isTyping(event.target)) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (!event.repeat) held.hold(`key ${event.code}`, [action]);
  });
  // Wherever the focus is by now: what counts is which key comes up.
  addEventListener('keyup', (event) => held.hold(`key ${event.code}`, []));
  addEventListener('blur', () => held.releaseAll());
  document.addEventListener('visibilitychange', () => {
    if (document.hidden) held.releaseAll();
  });
  addEventListener('focusin', (event) => {
    if (isTyping(event.target)) held.releaseAll('key ');
  });
}

/**
 * Make a pad of `[data-action]` keys work under fingers, pen and mouse; sliding from key to key is followed.
 * @param {HTMLElement} pad
 * @param {HeldActions} held
 */
export function listenToPad(pad, held) {
  const keys = /** @type {HTMLElement[]} */ ([...pad.querySelectorAll('[data-action]')]);
  /** @param {PointerEvent} event */
  const under = (event) => {
    const touched = keys.filter((key) => isWithin(event, key.getBoundingClientRect()));
    return touched.map((key) => key.dataset.action ?? '');
  };
  /** @param {PointerEvent} event */
  const follow = (event) => held.hold(`pointer ${event.pointerId}`, under(event));
  /** @param {PointerEvent} event */
  const release = (event) => held.hold(`pointer ${event.pointerId}`, []);
  pad.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    pad.setPointerCapture(event.pointerId);
    follow(event);
  });
  pad.addEventListener('pointermove', (event) => {
    if (pad.hasPointerCapture(event.pointerId)) follow(event);
  });
  pad.addEventListener('pointerup', release);
  pad.addEventListener('pointercancel', release);
  pad.addEventListener('lostpointercapture', release);
  pad.addEventListener('contextmenu', (event) => event.preventDefault());
}

/**
 * @param {PointerEvent} event
 * @param {DOMRect} box
 */
function isWithin(event, box) {
  const reach = event.pointerType === 'mouse' ? 0 : FINGER_REACH * box.width;
  return (
    event.clientX >= box.left - reach &&
    event.clientX <= box.right + reach &&
    event.clientY >= box.top - reach &&
    event.clientY <= box.bottom + reach
  );
}

/**
 * Read the first gamepad once per animation frame while one is connected: left stick and cross move, right stick looks.
 * @param {HeldActions} held
 * @param {() => boolean} isSteering
 * @param {() => void} onFound  A gamepad is there.
 */
export function listenToGamepad(held, isSteering, onFound) {
  let isPolling = false;
  const poll = () => {
    const gamepad = navigator.getGamepads().find((candidate) => candidate !== null);
    if (!gamepad) {
      isPolling = false;
      held.hold('gamepad', []);
      return;
    }
    held.hold('gamepad', isSteering() ? gamepadActions(gamepad) : []);
    requestAnimationFrame(poll);
  };
  addEventListener('gamepadconnected', () => {
    if (isPolling) return;
    isPolling = true;
    onFound();
    poll();
  });
}

/**
 * @param {{axes: readonly number[], buttons: readonly {pressed: boolean}[]}} gamepad  Standard mapping.
 * @returns {string[]}
 */
export function gamepadActions({ axes, buttons }) {
  const [moveX = 0, moveY = 0, lookX = 0, lookY = 0] = axes;
  const cross = (/** @type {number} */ index) => buttons[index]?.pressed ?? false;
  /** @type {[string, boolean][]} */
  const table = [
    ['w', moveY < -STICK_THRESHOLD || cross(12)],
    ['s', moveY > STICK_THRESHOLD || cross(13)],
    ['a', moveX < -STICK_THRESHOLD || cross(14)],
    ['d', moveX > STICK_THRESHOLD || cross(15)],
    ['i', lookY < -STICK_THRESHOLD],
    ['k', lookY > STICK_THRESHOLD],
    ['j', lookX < -STICK_THRESHOLD],
    ['l', lookX > STICK_THRESHOLD],
  ];
  return table.filter(([, isHeld]) => isHeld).map(([action]) => action);
}
