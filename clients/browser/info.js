'use strict';
/**
 * What the server says of itself over HTTP: load stages, start images, the notice; and uploads.
 *
 * @typedef {import('./wire.d.ts').StartImage} StartImage
 * @typedef {import('./wire.d.ts').ServerInfo} ServerInfo
 */

const POLL_EVERY_MS = 500;

/** Load stages in order, in words. */
export const STAGES = Object.freeze({
  spawn: 'Start the worker',
  checkpoint: 'Check the checkpoint',
  transformer: 'Load the transformer',
  vae: 'Load the video decoder',
  text_encoder: 'Load the text encoder',
  kv_pool: 'Set up the memory',
  warm_up: 'Warm up',
});

/** What the server answered in place of what was asked for. */
export class InfoError extends Error {
  /**
   * @param {string} message
   * @param {{status: number, code: string}} answer  `code` is empty where the answer had none.
   */
  constructor(message, { status, code }) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class ServerApi {
  /** @param {string | null} accessToken */
  constructor(accessToken) {
    this._headers = new Headers();
    if (accessToken !== null) this._headers.set('Authorization', `Bearer ${accessToken}`);
  }

  /** @returns {Promise<ServerInfo>} */
  async info() {
    const response = await this._fetch('/v1/info', {});
    return response.json();
  }

  /** @returns {Promise<import('./layout.js').Layout | null>}  Null: nobody knows what lies where in this world. */
  async layout() {
    const response = await this._fetch('/v1/layout', {});
    return response.json();
  }

  /**
   * Ask until the model is ready. Raises `InfoError` if the server does not tell; a proxy says so with a 5xx while there is none.
   * @param {(info: ServerInfo | null) => void} onProgress  Null: the server could not be reached; it is asked again.
   * @returns {Promise<ServerInfo>}
   */
  async untilReady(onProgress) {
    for (;;) {
      const info = await this.info().catch((error) => {
        if (error instanceof InfoError && error.status < 500) throw error;
        return null;
      });
      onProgress(info);
      if (info?.ready) return info;
      await new Promise((resolve) => setTimeout(resolve, POLL_EVERY_MS));
    }
  }

  /**
   * Send a start image. Returns its upload id.
   * @param {Blob} image
   * @returns {Promise<string>}
   */
  async upload(image) {
    const body = new FormData();
    body.append('image', image, 'first-frame');
    const response = await this._fetch('/v1/uploads', { method: 'POST', body });
    return (await response.json()).upload_id;
  }

  /**
   * @param {string} path
   * @param {RequestInit} options
   */
  async _fetch(path, options) {
    const response = await fetch(path, { ...options, headers: this._headers, cache: 'no-store' });
    if (response.ok) return response;
    const said = await response.json().catch(() => null);
    const { status } = response;
    throw new InfoError(said?.error?.message ?? `${path} was answered with status ${status}`, {
      status,
      code: said?.error?.code ?? '',
    });
  }
}
