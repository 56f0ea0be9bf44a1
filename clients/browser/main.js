'use strict';
/** Begins the page: as a spectator where the address has a watch token, else as who steers. */

import { App } from './app.js';
import { isTokenGiven, watchToken } from './store.js';
import { WatchApp } from './watch_app.js';

const token = watchToken();
const app = token === null ? new App() : new WatchApp(token);
/** For a look from the console, and for tests. */
window.worldserve = app;
void app.boot();

// What is put behind the # of a page that is open changes its address and loads nothing.
addEventListener('hashchange', () => {
  if (watchToken() !== token || isTokenGiven()) location.reload();
});
