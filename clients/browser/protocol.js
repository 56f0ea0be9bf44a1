'use strict';
/**
 * The `world` dialect as bytes and objects: takes binary frames apart and builds the messages of a client. It knows no socket.
 *
 * A binary frame is a 4-byte big-endian header length, that many bytes of UTF-8 JSON, and the payload.
 *
 * The types of messages are those of `wire.d.ts`, which is made from the server's own models.
 *
 * @typedef {import('./wire.d.ts').ChunkHeader} ChunkHeader
 * @typedef {import('./wire.d.ts').SessionStarted} SessionStarted
 * @typedef {import('./wire.d.ts').SessionWatching} SessionWatching
 * @typedef {import('./wire.d.ts').SessionStart['image']} ImageReference
 * @typedef {{actions: string[], client_ts_ms: number}} Transition
 */

export const PROTOCOL_VERSION = 1;
export const CAMERA_TRACK = 'camera';
export const CAMERA_SCHEMA = 'lingbot.camera_actions.v1';

const LENGTH_BYTES = 4;
const decoder = new TextDecoder('utf-8', { fatal: true });

/**
 * Take a binary frame apart. The payload is a view of the frame, not a copy.
 * @param {ArrayBuffer} frame
 * @returns {{header: ChunkHeader, payload: Uint8Array}}
 */
export function parseFrame(frame) {
  if (frame.byteLength < LENGTH_BYTES) {
    throw new Error(`binary frame of ${frame.byteLength} bytes: expected at least ${LENGTH_BYTES}`);
  }
  const headerBytes = new DataView(frame).getUint32(0);
  const payloadStart = LENGTH_BYTES + headerBytes;
  if (payloadStart > frame.byteLength) {
    throw new Error(`binary frame of ${frame.byteLength} bytes: its header alone claims ${headerBytes}`);
  }
  const header = JSON.parse(decoder.decode(new Uint8Array(frame, LENGTH_BYTES, headerBytes)));
  if (header.type !== 'chunk') {
    throw new Error(`binary frame of type ${header.type}: expected chunk`);
  }
  return { header, payload: new Uint8Array(frame, payloadStart) };
}

/**
 * Start a new session.
 * @param {{prompt: string, image: ImageReference, format: import('./wire.d.ts').StreamFormat, seed?: number}} wish
 */
export function startMessage({ prompt, image, format, seed }) {
  const message = { type: 'session.start', protocol: PROTOCOL_VERSION, prompt, image, format, pacing: 'playback' };
  return seed === undefined ? message : { ...message, seed };
}

/**
 * Take a session up again.
 * @param {string} resumeToken
 * @param {number} lastChunkIndex  Last chunk that need not be sent again, -1 for none.
 */
export function resumeMessage(resumeToken, lastChunkIndex) {
  return {
    type: 'session.start',
    protocol: PROTOCOL_VERSION,
    resume_token: resumeToken,
    last_chunk_index: lastChunkIndex,
  };
}

/**
 * Watch somebody's session.
 * @param {string} watchToken
 */
export function watchMessage(watchToken) {
  return { type: 'session.watch', protocol: PROTOCOL_VERSION, watch_token: watchToken };
}

/**
 * Steer: what was held, in order of time; the last entry is what is held now.
 * @param {number} eventId
 * @param {Transition[]} transitions
 */
export function controlMessage(eventId, transitions) {
  const control = { track: CAMERA_TRACK, schema: CAMERA_SCHEMA, data: { mode: 'state', transitions } };
  return { type: 'session.event', event_id: eventId, controls: [control] };
}

/**
 * @param {number} eventId
 * @param {string} prompt
 */
export function promptMessage(eventId, prompt) {
  return { type: 'session.event', event_id: eventId, prompt };
}

/**
 * Start the rollout again; an image that is left out is kept.
 * @param {{prompt?: string, image?: ImageReference}} wish
 */
export function resetMessage(wish) {
  return { type: 'session.reset', ...wish };
}

export const pauseMessage = () => ({ type: 'session.pause' });
export const unpauseMessage = () => ({ type: 'session.unpause' });
export const closeMessage = () => ({ type: 'session.close' });

/** @param {number} t */
export const pingMessage = (t) => ({ type: 'ping', t });

/**
 * Report what the viewer has seen.
 * @param {{epoch: number, run: number, chunkIndex: number, bufferedMs: number}} shown
 */
export function playbackMessage({ epoch, run, chunkIndex, bufferedMs }) {
  return { type: 'playback', epoch, run, chunk_index: chunkIndex, buffered_ms: Math.max(0, bufferedMs) };
}
