'use strict';
// Runs before the first paint, so that a page that was set to light or dark does not flash in the other.
(() => {
  const text = localStorage.getItem('worldserve.preferences');
  const theme = text === null ? 'system' : JSON.parse(text).theme;
  if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
})();
