'use strict';
// Runs before the first paint, so that a page that was set to light or dark does not flash in the other.
(() => {
  try {
    const { theme } = JSON.parse(localStorage.getItem('worldserve.preferences') ?? '{}');
    if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  } catch {
    // Nothing is kept, or nothing that can be read: as the system has it.
  }
})();
