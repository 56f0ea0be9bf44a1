// What the page's scripts find on `window` beyond the DOM of `lib.dom.d.ts`.

interface Window {
  /** The running page; for a look from the console, and for tests. */
  worldserve: import('./app.js').App | import('./watch_app.js').WatchApp;
  /** In place of `MediaSource` where the browser itself decides what it buffers (Safari on phones). */
  ManagedMediaSource?: typeof MediaSource;
}
