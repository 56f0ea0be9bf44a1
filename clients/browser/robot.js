'use strict';
/**
 * The page of a robot server: how the model is, which robots are here and what they do, and how to connect one. It asks
 * over REST while it is looked at, and changes nothing.
 *
 * @typedef {object} Robot  One of `GET /v1/robot/activity`.
 * @property {string} key
 * @property {string | null} session_id
 * @property {string} state
 * @property {number} num_steps
 * @property {number} waiting
 * @property {boolean} connected   False: the session is one of the REST interface.
 * @property {number} quiet_s
 * @property {string} prompt
 * @property {number | null} last_ms
 * @property {number | null} median_ms
 * @property {number | null} p95_ms
 * @property {number[]} recent_ms
 * @property {number[][] | null} actions
 */

import { byId, make } from './dom.js';
import { actionsPlot, rangeOf, timesPlot } from './robot_plot.js';
import { accessToken } from './store.js';

const ASK_EVERY_MS = 1000;
const NONE = '–';

const token = accessToken();
let described = false;

class Refused extends Error {}

/** @param {string} path */
async function ask(path) {
  /** @type {Record<string, string>} */
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  const response = await fetch(path, { headers, cache: 'no-store' });
  if (response.ok) return response.json();
  const said = await response.json().catch(() => null);
  throw new Refused(said?.error?.message ?? `${path} was answered with status ${response.status}`);
}

// ---------------------------------------------------------------- the model

/** @param {any} info  `GET /v1/info`. */
function showStatus(info) {
  const percent = info.load.percent;
  const words = info.ready ? 'Ready' : info.status === 'loading' ? `Loading: ${info.load.stage}, ${percent} %` : info.reason;
  tell(words, info.ready ? 'good' : info.status === 'loading' ? 'busy' : 'bad');
  showTrouble(info.error);
}

/**
 * @param {string} words
 * @param {'good' | 'busy' | 'bad'} tone
 */
function tell(words, tone) {
  byId('status').dataset.tone = tone;
  if (byId('status-text').textContent !== words) byId('status-text').textContent = words;
}

/** @param {string | null} text */
function showTrouble(text) {
  byId('trouble').textContent = text ?? '';
  byId('trouble').hidden = text === null;
}

/**
 * @param {any} info
 * @param {any} robot  `GET /v1/robot`.
 */
function showModel(info, robot) {
  const model = info.model;
  const [height, width] = robot.config.image_resolution;
  const facts = {
    Model: model.title,
    Robot: robot.embodiment,
    Cameras: `${robot.cameras.map(short).join(', ')}, ${width} x ${height}`,
    State: robot.states.map((/** @type {any} */ state) => `${short(state.name)} (${state.num_dims})`).join(', '),
    Actions: `${robot.action_horizon} steps of ${robot.action_dims}`,
    Sampler: model.sampler,
    Precision: `${model.precision} on ${model.device}`,
    Room: `${info.capacity.sessions} ${info.capacity.sessions === 1 ? 'robot' : 'robots'} at once`,
  };
  byId('facts').replaceChildren(
    ...Object.entries(facts).map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', {}, value))),
  );
}

/** @param {string} key */
function short(key) {
  return key.replace('observation/', '');
}

// ---------------------------------------------------------------- how to connect

/** @param {any} robot  `GET /v1/robot`, or null before the model is known. */
function showConnect(robot) {
  const host = location.host;
  const scheme = location.protocol === 'https:' ? 'wss' : 'ws';
  const addresses = [
    [`${scheme}://${host}/v1/robot`, 'RoboArena and DreamZero clients, and openpi; also without a path'],
    [`${scheme}://${host}/v1/realtime/robot/openpi`, 'openpi clients of vLLM-Omni'],
    [`${location.origin}/v1/robot/sessions`, 'the same over REST, for reinforcement learning'],
  ];
  byId('addresses').replaceChildren(
    ...addresses.map(([address, words]) => make('li', {}, make('code', {}, address), make('small', {}, words))),
  );
  byId('snippet').textContent = snippet(`${scheme}://${host}/v1/robot`, robot);
}

/**
 * A whole client that runs as it is.
 * @param {string} address
 * @param {any} robot
 */
function snippet(address, robot) {
  const [height, width] = robot?.config.image_resolution ?? [180, 320];
  const pictures = (robot?.cameras ?? []).map(
    (/** @type {string} */ name) => `    "${name}": np.zeros((${height}, ${width}, 3), np.uint8),`,
  );
  const states = (robot?.states ?? []).map(
    (/** @type {any} */ state) => `    "${state.name}": np.zeros(${state.num_dims}, np.float32),`,
  );
  const key = token === null ? '' : ', api_key="TOKEN"';
  return [
    'import numpy as np',
    'from openpi_client.websocket_client_policy import WebsocketClientPolicy',
    '',
    `policy = WebsocketClientPolicy("${address}"${key})`,
    'actions = policy.infer({',
    ...pictures,
    ...states,
    '    "prompt": "put the cup on the plate",',
    '})',
    'print(actions.shape)',
  ].join('\n');
}

async function copySnippet() {
  const button = byId('copy');
  const label = 'Copy the client';
  try {
    await navigator.clipboard.writeText(byId('snippet').textContent);
    button.textContent = 'Copied';
  } catch {
    // Without a secure address there is no clipboard: the text is marked, so that a key copies it.
    getSelection()?.selectAllChildren(byId('snippet'));
    button.textContent = 'Marked';
  }
  setTimeout(() => { button.textContent = label; }, 2000);
}

// ---------------------------------------------------------------- the robots

/**
 * @param {{num_connections: number, robots: Robot[]}} activity
 * @param {{sessions: number, resident: number}} capacity
 */
function showRobots(activity, capacity) {
  const { num_connections: connections, robots } = activity;
  byId('robots-count').textContent =
    `${connections} connected, ${capacity.resident} of ${capacity.sessions} places taken`;
  byId('robots-empty').hidden = robots.length > 0;
  const list = byId('robots-list');
  const cards = new Map([...list.children].map((card) => [card.dataset.key, card]));
  list.replaceChildren(...robots.map((robot) => showRobot(cards.get(robot.key) ?? newCard(robot.key), robot)));
}

/** @param {string} key */
function newCard(key) {
  const card = make('li', { className: 'card' });
  card.dataset.key = key;
  return card;
}

/**
 * Bring a card up to date; one of a robot that did nothing stays as it is, so that a selection in it lives on.
 * @param {any} card
 * @param {Robot} robot
 */
function showRobot(card, robot) {
  const shown = JSON.stringify({ ...robot, quiet_s: 0, age_s: 0 });
  if (card.dataset.shown !== shown) {
    card.dataset.shown = shown;
    card.replaceChildren(...cardContent(robot));
  }
  return card;
}

/** @param {Robot} robot */
function cardContent(robot) {
  const state = make('p', { className: 'state' }, robot.waiting > 0 ? 'waiting' : robot.state);
  state.dataset.tone = robot.state === 'active' ? 'good' : /fail/.test(robot.state) ? 'bad' : 'busy';
  const title = make('h3', {}, robot.session_id ?? 'unnamed robot');
  const parts = [make('div', { className: 'head' }, title, state)];
  if (robot.prompt !== '') parts.push(make('p', { className: 'task' }, robot.prompt));
  const numbers = make(
    'dl', { className: 'numbers' },
    number('Calls', String(robot.num_steps), ''),
    number('Last', milliseconds(robot.last_ms), 'ms'),
    number('Median', milliseconds(robot.median_ms), 'ms'),
    number('p95', milliseconds(robot.p95_ms), 'ms'),
  );
  if (robot.recent_ms.length > 1) numbers.append(timesPlot(robot.recent_ms));
  parts.push(numbers);
  if (robot.actions !== null) parts.push(actionsFigure(robot.actions));
  return parts;
}

/** @param {number[][]} rows */
function actionsFigure(rows) {
  const [from, to] = rangeOf(rows);
  const caption = `last actions, ${rows.length} steps, ${Number(from.toPrecision(3))} to ${Number(to.toPrecision(3))}`;
  return make('figure', {}, actionsPlot(rows), make('figcaption', {}, caption));
}

/**
 * @param {string} name
 * @param {string} value
 * @param {string} unit
 */
function number(name, value, unit) {
  return make('div', {}, make('dt', {}, name), make('dd', {}, value, make('small', {}, value === NONE ? '' : unit)));
}

/** @param {number | null} value */
function milliseconds(value) {
  return value === null ? NONE : value < 10 ? value.toFixed(1) : value.toFixed(0);
}

// ---------------------------------------------------------------- asking

async function look() {
  const info = await ask('/v1/info');
  showStatus(info);
  if (info.model === null) return;
  if (!described) {
    const robot = await ask('/v1/robot');
    showConnect(robot);
    showModel(info, robot);
    described = true;
  }
  showRobots(await ask('/v1/robot/activity'), info.capacity);
}

async function keepLooking() {
  for (;;) {
    if (!document.hidden) {
      await look().catch((error) => {
        if (error instanceof Refused) showTrouble(`The server says: ${error.message}.`);
        else tell('The server does not answer', 'bad');
      });
    }
    await new Promise((resolve) => { setTimeout(resolve, ASK_EVERY_MS); });
  }
}

byId('copy').addEventListener('click', () => copySnippet());
showConnect(null);
keepLooking();
