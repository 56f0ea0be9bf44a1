'use strict';
/** Begins the page: as a spectator where the address has a watch token, else as who steers. */

import { App } from './app.js';
import { watchToken } from './store.js';
import { WatchApp } from './watch_app.js';

const token = watchToken();
const app = token === null ? new App() : new WatchApp(token);
/** For a look from the console, and for tests. */
window.worldserve = app;
void app.boot();
