"""The page against the real server and the embedded demo world."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.browser_chromium import WatchedPage, difference

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

READY_WITHIN_S = 180.0


@pytest.fixture(scope="module")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `worldserve demo`, ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = "import sys; from server.cli import main; sys.exit(main())"
    log = tmp_path_factory.mktemp("demo") / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", command, "demo", "--no-browser", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    url = f"http://127.0.0.1:{port}/"
    try:
        _wait_until_ready(url, server, log)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the demo server did not become ready:\n{log.read_text()}")


H264 = """localStorage.setItem('worldserve.preferences', '{"format": "h264"}');"""


def open_world(browser: Browser, demo_url: str, *, before: str = "") -> WatchedPage:
    """A page with a running world. The demo names the image to begin with, so the page asks nothing."""
    page = WatchedPage(browser, demo_url, before=before)
    page.page.set_default_timeout(60_000)
    page.wait_for_picture()
    return page


def leave_without_complaint(world: WatchedPage) -> None:
    world.read("app.leave()")
    world.page.wait_for_selector("body[data-view=chooser]")
    complaints = list(world.complaints)
    world.close()
    assert complaints == []


def _picture_under(world: WatchedPage, key: str) -> list[int]:
    """Hold a key from the first picture on, and return the picture when it has acted for a chunk."""
    world.page.keyboard.down(key)
    world.page.wait_for_selector(f"[data-action={key}].applied")
    acted = world.read("app.world.shown.chunkIndex")
    world.wait("app.world.shown.chunkIndex > argument", acted)
    picture = world.picture()
    world.page.keyboard.up(key)
    return picture


def test_a_world_plays_is_walked_through_and_is_watched(browser: Browser, demo_url: str) -> None:
    world = open_world(browser, demo_url)
    assert "tiny preview model" in world.page.inner_text("#notice")
    forward = _picture_under(world, "w")
    assert len({tuple(forward[at : at + 3]) for at in range(0, 1920, 3)}) > 50
    assert world.read("app.player.presentedFrames") > 12
    assert world.read("app.world.walk.place.z") > 0
    watching = WatchedPage(browser, f"{demo_url}#watch={world.read('app.world.session.watch_token')}")
    watching.wait_for_picture()
    world.page.keyboard.press("r")
    world.wait("app.world.shown.run === 1")
    turned = _picture_under(world, "j")
    # Measured: 44; the same key twice: 0.03.
    assert difference(forward, turned) > 10
    watching.wait("app.world.shown.run === 1")
    assert watching.complaints == []
    watching.close()
    leave_without_complaint(world)


def test_a_new_prompt_changes_the_picture_and_a_reload_goes_on(browser: Browser, demo_url: str) -> None:
    """Through WebCodecs; the test above plays through a media source."""
    world = open_world(browser, demo_url, before=H264)
    assert world.read("app.world.session.format") == "h264"
    day = world.picture()
    world.page.click("#prompts >> text=the town in night")
    world.page.wait_for_selector(".field.pending")
    world.page.wait_for_selector(".field:not(.pending)")
    applied = world.read("app.world.shown.chunkIndex")
    world.wait("app.world.shown.chunkIndex > argument + 2", applied)
    night = world.picture()
    # Measured: 0.41 of the light of day.
    assert sum(night) < 0.8 * sum(day)
    before = world.read("({...app.world.bookmark, epoch: app.world.epoch})")
    world.page.reload()
    world.wait_for_picture()
    after = world.read("({...app.world.bookmark, epoch: app.world.epoch})")
    assert after["sessionId"] == before["sessionId"]
    assert after["epoch"] == before["epoch"] + 1
    assert after["shownChunk"] >= before["shownChunk"]
    world.page.keyboard.down("l")
    world.page.wait_for_selector("[data-action=l].applied")
    assert world.read("app.world.bookmark.nextEventId") > before["nextEventId"]
    leave_without_complaint(world)
