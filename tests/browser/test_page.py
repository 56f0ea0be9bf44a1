"""The page against the real server and the embedded demo world.

That its pictures obey keys and prompts is tested without a page, in e2e/test_demo_world.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser_chromium import WatchedPage, difference
from tests.support.browser_demo import demo_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `worldserve demo`, ready."""
    with demo_server(tmp_path_factory.mktemp("demo") / "server.log") as url:
        yield url


H264 = """localStorage.setItem('worldserve.preferences', '{"format": "h264"}');"""


def open_world(browser: Browser, demo_url: str, *, before: str = "") -> WatchedPage:
    """A page with a running world. The demo names the image to begin with, so the page asks nothing."""
    page = WatchedPage(browser, demo_url, before=before)
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


def num_colours(picture: list[int]) -> int:
    return len({tuple(picture[at : at + 3]) for at in range(0, len(picture), 3)})


def test_a_world_plays_is_walked_through_and_is_watched(browser: Browser, demo_url: str) -> None:
    world = open_world(browser, demo_url)
    assert "tiny model" in world.page.inner_text("#notice")
    first = world.picture()
    forward = _picture_under(world, "w")
    assert difference(first, forward) > 0
    assert num_colours(forward) > 50
    world.wait("app.player.presentedFrames > 12")
    assert world.read("app.world.walk.place.z") > 0
    assert world.read("app.viewer.map.layout.starts.day.x") == 6
    watching = WatchedPage(browser, f"{demo_url}#watch={world.read('app.world.session.watch_token')}")
    watching.wait_for_picture()
    world.page.keyboard.press("r")
    world.wait("app.world.shown.run === 1")
    watching.wait("app.world.shown.run === 1")
    assert watching.complaints == []
    watching.close()
    leave_without_complaint(world)


def test_a_new_prompt_is_confirmed_and_a_reload_goes_on(browser: Browser, demo_url: str) -> None:
    """Through WebCodecs; the test above plays through a media source."""
    world = open_world(browser, demo_url, before=H264)
    assert world.read("app.world.session.format") == "h264"
    with world.passing("document.querySelector('.field.pending') !== null"):
        world.page.click("#prompts >> text=the town in night")
    world.page.wait_for_selector(".field:not(.pending)")
    assert num_colours(world.picture()) > 50
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
