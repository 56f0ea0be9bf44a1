"""What a visitor chooses while a world is on screen: another world, player, prompt or address."""

from __future__ import annotations

import pytest

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import WATCH_TOKEN, StandIn

pytestmark = pytest.mark.browser

TOO_LONG = "x" * 3000
REFUSE_RESETS = """() => {
  const { connection } = window.worldserve;
  const send = connection.send.bind(connection);
  const error = { type: 'error', code: 'prompt_too_long', message: 'too long', fatal: false, event_id: null };
  connection.send = (message) => {
    if (message.type !== 'session.reset') return send(message);
    setTimeout(() => window.worldserve.onMessage(error));
    return true;
  };
}"""
HOLD_UPLOADS = """() => {
  const { api, chooser } = window.worldserve;
  const held = new Promise((resolve) => (window.letGo = resolve));
  api.upload = () => held.then(() => 'u-1');
  chooser._takeImage(new Blob());
}"""


def test_another_player_is_that_of_the_next_world(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.read("app.viewer.settings.set('format', 'h264')")
    page.page.click("#worlds")
    page.page.click("#tiles > :nth-child(2)")
    page.page.click("#begin")
    page.wait("app.world.session?.format === 'h264'")
    page.wait_for_picture()
    assert [(start["format"], start["image"]["name"]) for start in standin.script.starts] == [
        ("fmp4", "day"),
        ("h264", "night"),
    ]


def test_a_reset_that_is_refused_leaves_the_prompt_as_it_was(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.click("#worlds")
    page.page.fill("#chooser-prompt", "snow, and more of it")
    page.page.click("#begin")
    page.wait("app.world.run === 1")
    assert page.page.input_value("#prompt") == "snow, and more of it"
    page.page.evaluate(REFUSE_RESETS)
    page.page.click("#worlds")
    page.page.fill("#chooser-prompt", TOO_LONG)
    page.page.click("#begin")
    page.wait("document.querySelector('#toast').textContent === 'too long'")
    assert page.page.input_value("#prompt") == "snow, and more of it"


def test_who_goes_back_while_an_image_is_sent_keeps_the_world(page: WatchedPage) -> None:
    page.begin()
    page.page.click("#worlds")
    page.page.evaluate(HOLD_UPLOADS)
    page.page.click("#begin")
    page.page.click("#chooser-cancel")
    page.page.evaluate("letGo()")
    page.wait("!document.querySelector('#begin').disabled")
    assert page.read("app.start.message.image") == {"name": "day"}
    page.page.click("#worlds")
    page.page.click("#begin")
    page.wait("app.world.run === 1")
    assert page.read("app.start.message.image") == {"upload_id": "u-1"}


def test_nothing_is_no_prompt(page: WatchedPage) -> None:
    page.begin()
    page.page.fill("#prompt", "  ")
    page.page.press("#prompt", "Enter")
    assert page.page.input_value("#prompt") == page.read("app.world.prompt") == "a small town, day"


def test_an_address_that_is_put_into_an_open_page_is_loaded(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.goto(f"{standin.url}/#watch={WATCH_TOKEN}")
    page.page.wait_for_selector("body[data-role=spectator]")
    # The stand-in takes no tokens, so it is not to be asked for a world.
    standin.script.info |= {"ready": False, "status": "loading"}
    page.page.goto(f"{standin.url}/#token=mine")
    page.wait("sessionStorage.getItem('worldserve.token') === '\"mine\"'")
    page.page.wait_for_selector("body:not([data-role])")
    assert page.page.url == f"{standin.url}/"


def test_the_frame_rate_begins_anew_where_frames_are_counted_anew(modules: WatchedPage) -> None:
    script = """async () => {
      const { FrameRate } = await import('/static/hud.js');
      const rate = new FrameRate();
      for (const [ms, frames] of [[0, 500], [1000, 512], [1500, 3], [2000, 9]]) rate.sample(ms, frames);
      return rate.fps;
    }"""
    assert modules.page.evaluate(script) == 12
