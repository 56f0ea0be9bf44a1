"""A Chromium for the browser tests, and a page that remembers what it must not have done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

EXECUTABLE = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
]  # fmt: skip

TIMEOUT_MS = 60_000
"""Only ends a test that hangs."""

VIEWPORT = {"viewport": {"width": 1280, "height": 800}}

PICTURE = """() => {
  const canvas = new OffscreenCanvas(32, 20);
  const context = canvas.getContext('2d');
  context.drawImage(window.worldserve.player.surface, 0, 0, 32, 20);
  return [...context.getImageData(0, 0, 32, 20).data].filter((_, index) => index % 4 !== 3);
}"""
"""Colours of the frame on screen, 32 x 20 pixels, RGB."""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=EXECUTABLE, args=ARGUMENTS, headless=True, timeout=TIMEOUT_MS
        )
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page of one origin. `complaints` has every console error, uncaught exception and request to elsewhere."""

    def __init__(self, browser: Browser | BrowserContext, url: str, *, before: str = "", **context: Any) -> None:
        """`before` is JavaScript that runs before the page's own. A given context stays when the page closes.

        Its files are in the context's cache then, which saves a second or two.
        """
        self._is_guest = isinstance(browser, BrowserContext)
        if isinstance(browser, BrowserContext):
            self.context = browser
        else:
            self.context = browser.new_context(**{**VIEWPORT, **context})
        self.page: Page = self.context.new_page()
        self.page.add_init_script(before)
        self.page.set_default_timeout(TIMEOUT_MS)
        self.complaints: list[str] = []
        self._url = url
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.on("websocket", lambda socket: self._requested(socket.url))
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _requested(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data") and parts.netloc != urlsplit(self._url).netloc:
            self.complaints.append(f"request to elsewhere: {url}")

    def begin(self) -> None:
        """Start the world that is chosen at first, and wait for its first picture."""
        self.page.click("#begin")
        self.wait_for_picture()

    def wait_for_picture(self) -> None:
        self.page.wait_for_selector("body.has-picture[data-view=world]")

    def wait(self, condition: str, argument: object = None) -> None:
        """Wait until a JavaScript expression over `app`, the page's object, and `argument` is true."""
        self.page.wait_for_function(f"(argument) => ((app) => {condition})(window.worldserve)", arg=argument)

    def until(self, condition: Callable[[], Any]) -> None:
        """Let the page go on until something is true outside it."""
        for _ in range(TIMEOUT_MS // 10):
            if condition():
                return
            self.page.wait_for_timeout(10)
        raise AssertionError("the page did not get there")

    @contextmanager
    def passing(self, condition: str) -> Iterator[None]:
        """Wait until what is done inside has made a JavaScript expression over `app` true, if only for a moment.

        Who asks the page now and then may miss what it shows for a second: here every change of the document is seen.
        """
        self.page.evaluate(
            f"""() => {{
              window.hasPassed = false;
              const look = () => (window.hasPassed ||= Boolean(((app) => {condition})(window.worldserve)));
              const all = {{subtree: true, childList: true, characterData: true, attributes: true}};
              new MutationObserver(look).observe(document, all);
            }}"""
        )
        yield
        self.page.wait_for_function("() => window.hasPassed")

    def hold_retries(self) -> None:
        """Let a lost link wait for the visitor: the page makes no first attempt of its own after a second."""
        self.page.evaluate(
            """() => {
              const later = window.setTimeout;
              window.setTimeout = (run, delayMs, ...more) => (delayMs === 1000 ? 0 : later(run, delayMs, ...more));
            }"""
        )

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, and wait until the page has it."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_function(f"() => matchMedia('(width: {width}px) and (height: {height}px)').matches")

    def read(self, expression: str) -> Any:
        return self.page.evaluate(f"((app) => {expression})(window.worldserve)")

    def picture(self) -> list[int]:
        colours: list[int] = self.page.evaluate(PICTURE)
        return colours

    def close(self) -> None:
        if self._is_guest:
            self.page.evaluate("localStorage.clear()")
            self.page.close()
        else:
            self.context.close()


def difference(one: list[int], other: list[int]) -> float:
    """Mean absolute difference of two pictures, 0 to 255."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
