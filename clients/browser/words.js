'use strict';
/** States and error codes of the server in words for people. */

/**
 * What a spectator is told of the world.
 * @param {import('./wire.d.ts').SessionState} state
 */
export function stateText(state) {
  switch (state) {
    case 'active':
      return 'Watching';
    case 'paused':
      return 'Paused';
    case 'parked':
      return 'Nobody steers';
    case 'resetting':
      return 'Starting over';
    case 'failed':
      return 'Stopped';
    default:
      return 'Ending';
  }
}

/**
 * Why there is nothing to watch.
 * @param {string} code
 */
export function watchTitle(code) {
  switch (code) {
    case 'bad_watch_token':
      return 'This world is gone';
    case 'too_many_watchers':
      return 'Too many are watching';
    case 'player':
      return 'The video cannot be shown';
    case 'unauthorized':
      return 'This server asks for a token';
    default:
      return 'Nothing to watch';
  }
}

/**
 * Why a world did not open.
 * @param {string} code
 */
export function startTitle(code) {
  switch (code) {
    case 'capacity':
    case 'too_many_sessions':
      return 'All worlds are taken';
    case 'unauthorized':
      return 'This server asks for a token';
    case 'worker_unavailable':
      return 'The model is not available';
    default:
      return 'The world did not open';
  }
}

/**
 * What a refusal says to a visitor, who has an address and no header to put a token in.
 * @param {string} code
 * @param {string} message  Of the server.
 */
export function refusedText(code, message) {
  if (code !== 'unauthorized') return message;
  return `${message.split(':')[0]}: put token=TOKEN behind the # of the address, and load it again`;
}

/**
 * Why a run stopped.
 * @param {string | null} code
 */
export function failText(code) {
  switch (code) {
    case 'worker_unavailable':
      return 'The process that runs the model has ended. The server starts it again by itself.';
    case 'media_failed':
      return 'The next second of this world could not be turned into video.';
    default:
      return 'The model could not make the next second of this world.';
  }
}

/**
 * How a world ended.
 * @param {string} code
 */
export function endTitle(code) {
  switch (code) {
    case 'worker_unavailable':
    case 'session_lost':
      return 'The model has stopped';
    case 'shutting_down':
      return 'The server is shutting down';
    case 'bad_resume_token':
    case 'session_evicted':
      return 'This world has been closed';
    default:
      return 'This world has ended';
  }
}

/**
 * Why the server closed a world that its visitor did not close.
 * @param {string} reason  Of `session.closed`.
 */
export function closedText(reason) {
  switch (reason) {
    case 'idle':
      return 'Nobody steered it for as long as the server keeps such a world';
    case 'lifetime':
      return 'It was as old as worlds may get on this server';
    case 'deleted':
      return 'It was closed over the interface of the server';
    default:
      return `The server closed it: ${reason}`;
  }
}

/**
 * A message of the server or of the browser as a sentence: most begin small and end without a full stop.
 * @param {string} text
 */
export function sentence(text) {
  const begun = /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
