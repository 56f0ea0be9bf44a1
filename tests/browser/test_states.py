"""What the page shows and sends in states that the stand-in server can bring about at will."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import av
import pytest
from playwright.sync_api import Browser

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import FPS, StandIn

pytestmark = pytest.mark.browser


def transitions(standin: StandIn) -> list[list[str]]:
    """Every held set that the page sent, in order."""
    return [
        transition["actions"]
        for event in standin.script.events
        for control in event.get("controls") or []
        for transition in control["data"]["transitions"]
    ]


def wait_until(page: WatchedPage, condition: Callable[[], Any]) -> None:
    """Let the page go on until something is true of the stand-in."""
    for _ in range(400):
        if condition():
            return
        page.page.wait_for_timeout(25)
    raise AssertionError("the page did not get there")


def test_loading_shows_each_stage_and_then_offers_the_worlds(standin: StandIn, browser: Browser) -> None:
    standin.script.info |= {
        "ready": False,
        "status": "loading",
        "load": {"stage": "vae", "fraction": 0.4, "detail": ""},
    }
    page = WatchedPage(browser, standin.url)
    page.page.wait_for_selector("#loading-stages [aria-current]")
    assert page.page.inner_text("#loading-stages [aria-current]").split("\n") == ["Load the video decoder", "40 %"]
    assert page.page.get_attribute("#loading-bar", "aria-valuenow") == "49"
    standin.script.info |= {"ready": True}
    page.page.wait_for_selector("#chooser")
    assert page.page.locator(".tile").count() == 5
    assert page.complaints == []
    page.close()


def test_a_model_that_cannot_be_served_is_said_in_words(standin: StandIn, browser: Browser) -> None:
    standin.script.info |= {"ready": False, "status": "failed", "error": "the checkpoint has no vae folder"}
    page = WatchedPage(browser, standin.url)
    page.page.wait_for_selector("#trouble")
    assert page.page.inner_text("#trouble-text") == "the checkpoint has no vae folder"
    page.close()


def test_a_full_server_shows_the_position_in_the_queue(standin: StandIn, page: WatchedPage) -> None:
    standin.script.queue_position = 2
    page.page.click("#begin")
    page.page.wait_for_selector("text=Number 2 in the queue")


def test_a_refused_start_is_explained_and_can_be_tried_again(standin: StandIn, page: WatchedPage) -> None:
    standin.script.refuse = {"code": "capacity", "message": "4 of 4 sessions are in use", "retryable": True}
    page.page.click("#begin")
    page.page.wait_for_selector("#trouble")
    assert page.page.inner_text("#trouble-text") == "4 of 4 sessions are in use"
    standin.script.refuse = None
    page.page.click("#trouble-retry")
    page.page.wait_for_selector("body.has-picture[data-view=world]")


def test_a_lost_link_resumes_behind_the_last_chunk_and_the_picture_goes_on(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.wait("app.world.shown.chunkIndex >= 1")
    standin.script.drop_after_chunk = standin.world.chunk_index
    page.wait("app.world.epoch === 1 && app.world.shown.chunkIndex > app.player.segments[0].chunkIndex + 3")
    resumed = standin.script.starts[-1]
    assert resumed["resume_token"] == "token"
    segments = page.read("app.player.segments")
    indexes = [segment["chunkIndex"] for segment in segments]
    assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
    assert resumed["last_chunk_index"] == max(s["chunkIndex"] for s in segments if s["epoch"] == 0)
    gaps = [after["startS"] - before["endS"] for before, after in itertools.pairwise(segments)]
    assert max(map(abs, gaps)) < 0.001


@pytest.mark.parametrize(("at_once", "is_reloaded"), [(True, False), (False, True)])
def test_a_world_that_died_with_its_worker_starts_again_as_it_was(
    standin: StandIn, page: WatchedPage, at_once: bool, is_reloaded: bool
) -> None:
    """`at_once`: before the resume is tried and refused."""
    page.page.click(".tile >> nth=2")
    page.begin()
    page.page.click("#prompts >> text=the town in night")
    wait_until(page, lambda: standin.world.prompt == "the town in night")
    if is_reloaded:
        page.page.reload()
        page.wait_for_picture()
        page.wait("app.world.prompt === 'the town in night'")
    started = next(start for start in standin.script.starts if "resume_token" not in start)
    standin.script.die_after_chunk = standin.world.chunk_index + 1
    title = "This run has stopped" if at_once else "The model has stopped"
    page.page.wait_for_selector(f"#trouble >> text={title}")
    num_starts = len(standin.script.starts)
    page.page.click("#trouble-retry >> text=Start it again")
    page.wait("app.world.epoch === 0 && app.world.shown?.chunkIndex > 0 && document.body.dataset.view === 'world'")
    (again,) = [start for start in standin.script.starts[num_starts:] if "resume_token" not in start]
    assert again["image"] == started["image"]
    assert again["prompt"] == "the town in night"


def test_a_spoiled_chunk_costs_a_new_epoch_and_no_more(standin: StandIn, page: WatchedPage) -> None:
    standin.script.spoil_chunk = 2
    page.begin()
    page.wait("app.world.epoch === 1 && app.world.shown.chunkIndex > 3")
    assert page.read("document.querySelector('video').error") is None
    assert page.read("document.querySelector('#still').hidden")
    with page.page.expect_download() as download:
        page.page.click("#save")
    with av.open(io.BytesIO(download.value.path().read_bytes())) as film:
        assert sum(1 for _ in film.decode(video=0)) > 9 + 12


def test_a_tab_that_comes_back_goes_to_the_newest_chunk(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.wait("app.player.bufferedS > 0.6")
    page.page.evaluate("document.querySelector('video').pause()")
    page.wait("app.player.segments.at(-1).startS - document.querySelector('video').currentTime > 0.45")
    page.page.evaluate("document.querySelector('video').currentTime = 0")
    newest = page.read("app.player.segments.at(-1).startS")
    page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait("document.querySelector('video').currentTime >= argument", newest)
    assert not page.read("document.querySelector('video').paused")


def test_a_chunk_is_reported_when_the_next_one_has_arrived(standin: StandIn, page: WatchedPage) -> None:
    """The report lets the chunk after the next start; a key pressed until then must still act in that."""
    standin.script.make_s = 0.7
    page.begin()
    page.wait("app.world.shown?.chunkIndex >= 4")
    assert len(standin.script.playback) >= 3
    assert all(report["last_sent"] > report["chunk_index"] for report in standin.script.playback)


def test_keys_steer_once_each_and_are_released_on_blur(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.down("w")
    page.page.keyboard.down("w")
    page.page.keyboard.down("l")
    page.page.evaluate("dispatchEvent(new Event('blur'))")
    wait_until(page, lambda: transitions(standin)[-1:] == [[]])
    assert transitions(standin) == [["w"], ["w", "l"], []]


def test_a_pressed_key_is_lit_and_confirmed_when_its_frame_is_shown(page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.down("d")
    page.page.wait_for_selector("[data-action=d].held:not(.applied)")
    page.page.wait_for_selector("[data-action=d].held.applied")
    page.page.keyboard.up("d")
    page.page.wait_for_selector("[data-action=d].applied:not(.held)")
    page.page.wait_for_selector("[data-action=d]:not(.applied, .held)")
    assert page.read("app.hud.figures.p50Ms") > 0


def test_typing_a_prompt_does_not_steer(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.fill("#prompt", "")
    page.page.type("#prompt", "swirling lakes")
    page.page.keyboard.press("Enter")
    wait_until(page, lambda: any("prompt" in event for event in standin.script.events))
    assert transitions(standin) == []
    assert standin.script.events[-1]["prompt"] == "swirling lakes"


def test_a_thumb_between_two_keys_holds_both(standin: StandIn, browser: Browser) -> None:
    size = {"width": 390, "height": 844}
    page = WatchedPage(browser, standin.url, viewport=size, has_touch=True, is_mobile=True)
    page.begin()
    up, right = (page.page.locator(f"[data-action={key}]").bounding_box() for key in "wd")
    assert up is not None
    assert right is not None
    x, y = up["x"] + up["width"] * 1.2, right["y"] - right["height"] * 0.2
    point = {"clientX": x, "clientY": y, "pointerType": "touch", "pointerId": 1, "bubbles": True, "button": 0}
    page.page.evaluate(
        """(point) => {
          const pad = document.querySelector('#pad-move');
          pad.setPointerCapture = () => {};
          pad.dispatchEvent(new PointerEvent('pointerdown', point));
        }""",
        point,
    )
    wait_until(page, lambda: transitions(standin)[-1:] == [["w", "d"]])
    page.close()


def test_reset_jumps_to_the_new_run_and_pause_stops_the_picture(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.wait("app.world.shown.chunkIndex >= 1")
    page.page.keyboard.press("r")
    page.wait("app.world.shown.run === 1")
    page.page.keyboard.press("p")
    page.page.wait_for_selector("text=Paused")
    before = page.read("document.querySelector('video').currentTime")
    page.page.wait_for_timeout(300)
    assert page.read("document.querySelector('video').currentTime") == before
    page.page.keyboard.press("p")
    page.wait("document.querySelector('video').currentTime > argument", before)


def test_a_recording_across_a_resume_is_one_continuous_film(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    standin.script.drop_after_chunk = standin.world.chunk_index
    page.wait("app.world.epoch === 1 && app.player.segments.at(-1).epoch === 1")
    with page.page.expect_download() as download:
        page.page.click("#save")
    content = download.value.path().read_bytes()
    num_chunks = page.read("app.player.segments.length")
    with av.open(io.BytesIO(content)) as film:
        times = [float(frame.pts * frame.time_base) for frame in film.decode(video=0)]
    assert len(times) >= 9 + 12 * (num_chunks - 2)
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert max(steps) == pytest.approx(1 / FPS, abs=1e-3)
    assert min(steps) == pytest.approx(1 / FPS, abs=1e-3)
