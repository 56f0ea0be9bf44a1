'use strict';
/**
 * Follows events from the key press to the frame that shows them: which actions had been applied in a frame, and how long
 * each event took to reach the screen.
 *
 * @typedef {{atFrame: number, actions: string[]}} HeldFrom     Actions in force from this media frame of the chunk on.
 * @typedef {{eventId: number, atFrame: number, pressedMs: number}} Landing  The media frame that first shows an event.
 * @typedef {{held: HeldFrom[], landings: Landing[]}} ChunkControls
 */

/** Media frames of one latent frame; a run's opening latent frame has one. Wan VAE, temporal stride 4. */
const MEDIA_FRAMES_PER_LATENT_FRAME = 4;

/**
 * First media frame of a latent frame inside its chunk.
 * @param {number} latentFrame
 * @param {boolean} isOpeningChunk
 */
export function firstMediaFrame(latentFrame, isOpeningChunk) {
  if (!isOpeningChunk) return latentFrame * MEDIA_FRAMES_PER_LATENT_FRAME;
  return latentFrame === 0 ? 0 : 1 + (latentFrame - 1) * MEDIA_FRAMES_PER_LATENT_FRAME;
}

export class AppliedTracker {
  constructor() {
    this._sent = /** @type {Map<number, import('./protocol.js').Transition[]>} */ (new Map());
    this._inForce = /** @type {string[]} */ ([]);
  }

  /** Events sent and neither applied nor dropped yet. */
  get pending() {
    return this._sent.size;
  }

  /**
   * @param {number} eventId
   * @param {import('./protocol.js').Transition[]} transitions  Empty for a prompt.
   */
  sent(eventId, transitions) {
    this._sent.set(eventId, transitions);
  }

  /** @param {number} eventId */
  dropped(eventId) {
    this._sent.delete(eventId);
  }

  /** A new run starts with nothing held and nothing queued. */
  reset() {
    this._sent.clear();
    this._inForce = [];
  }

  /**
   * Work out what a chunk shows. Events that this page did not send (before a reload) are skipped.
   * @param {import('./protocol.js').ChunkHeader} header
   * @returns {ChunkControls}
   */
  chunk(header) {
    const isOpening = header.chunk_index === 0;
    const held = [{ atFrame: 0, actions: this._inForce }];
    const landings = /** @type {Landing[]} */ ([]);
    for (const { event_id: eventId, latent_frame: latentFrame } of header.applied) {
      const transitions = this._sent.get(eventId);
      if (transitions === undefined) continue;
      this._sent.delete(eventId);
      if (transitions.length > 0) {
        const atFrame = firstMediaFrame(latentFrame, isOpening);
        landings.push({ eventId, atFrame, pressedMs: transitions[0].client_ts_ms });
      }
      transitions.forEach(({ actions }, step) => {
        held.push({ atFrame: firstMediaFrame(latentFrame + step, isOpening), actions });
        this._inForce = actions;
      });
    }
    return { held, landings };
  }
}

/**
 * Actions in force in a frame of a chunk.
 * @param {HeldFrom[]} held  In order of time.
 * @param {number} frame
 */
export function actionsAt(held, frame) {
  let actions = held[0].actions;
  for (const entry of held) {
    if (entry.atFrame <= frame) actions = entry.actions;
  }
  return actions;
}
