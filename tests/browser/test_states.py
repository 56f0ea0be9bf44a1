"""What the page says in states that the stand-in server can bring about at will."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, BrowserContext, Route

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import RESUME_TOKEN, WATCH_TOKEN, StandIn

pytestmark = pytest.mark.browser


def copied(button: str) -> str:
    """Whether a button says that it has copied, as it does for a moment."""
    return f"document.querySelector('#{button}').textContent.trim() === 'Copied'"


def test_loading_shows_each_stage_and_then_offers_the_worlds(standin: StandIn, context: BrowserContext) -> None:
    standin.script.info |= {
        "ready": False,
        "status": "loading",
        "load": {"stage": "vae", "fraction": 0.4, "detail": ""},
    }
    page = WatchedPage(context, standin.url)
    page.page.wait_for_selector("#loading-stages [aria-current]")
    assert page.page.inner_text("#loading-stages [aria-current]").split("\n") == ["Load the video decoder", "40 %"]
    assert page.page.get_attribute("#loading-bar", "aria-valuenow") == "49"
    standin.script.info |= {"ready": True}
    page.page.wait_for_selector("#chooser")
    assert page.page.locator(".tile").count() == 5
    assert page.complaints == []
    page.close()


def test_a_model_that_cannot_be_served_is_said_in_words(standin: StandIn, context: BrowserContext) -> None:
    standin.script.info |= {"ready": False, "status": "failed", "error": "the checkpoint has no vae folder"}
    page = WatchedPage(context, standin.url)
    page.page.wait_for_selector("#trouble")
    assert page.page.inner_text("#trouble-text") == "The checkpoint has no vae folder."
    page.close()


def test_who_has_no_token_is_told_where_to_put_it(standin: StandIn, context: BrowserContext) -> None:
    refusal = {"code": "unauthorized", "message": "a token is needed: Authorization: Bearer TOKEN"}
    answered: list[str] = []

    def refuse(route: Route) -> None:
        route.fulfill(status=401, json={"error": refusal})
        answered.append(route.request.url)

    context.route("**/v1/info", refuse)
    standin.script.refuse = {**refusal, "fatal": True}
    for address in (standin.url, f"{standin.url}/#watch={WATCH_TOKEN}"):
        page = WatchedPage(context, address)
        page.page.wait_for_selector("#trouble >> text=This server asks for a token")
        where = "A token is needed: put token=TOKEN behind the # of the address, and load it again."
        assert page.page.inner_text("#trouble-text") == where
        # A spectator asks for what its card says beside what it watches.
        page.until(lambda: answered)
        answered.clear()
        page.close()
    context.unroute("**/v1/info")


def test_a_proxy_without_a_server_is_asked_again(standin: StandIn, context: BrowserContext) -> None:
    context.route("**/v1/info", lambda route: route.fulfill(status=502, body="Bad Gateway"))
    page = WatchedPage(context, standin.url)
    page.page.wait_for_selector("#loading-lead >> text=The server does not answer yet")
    context.unroute("**/v1/info")
    page.page.wait_for_selector("#chooser")
    page.close()


KEEPS_NOTHING = """
  for (const place of ['localStorage', 'sessionStorage'])
    Object.defineProperty(window, place, {get() { throw new DOMException('denied', 'SecurityError'); }});
"""
KEPT_NONSENSE = "localStorage.setItem('worldserve.preferences', '{')"
KEPT_BY_OTHERS = """
  localStorage.setItem('worldserve.preferences', '{"format": "vp9", "theme": null, "map": "yes", "numbers": false}');
  if (!sessionStorage.getItem('worldserve.session')) sessionStorage.setItem('worldserve.session', '{}');
"""


@pytest.mark.parametrize(
    "before", [KEEPS_NOTHING, KEPT_NONSENSE, KEPT_BY_OTHERS], ids=["nothing", "nonsense", "another page's"]
)
def test_a_browser_that_keeps_nothing_shows_the_world(standin: StandIn, browser: Browser, before: str) -> None:
    page = WatchedPage(browser, standin.url, before=before)
    page.begin()
    page.read("app.viewer.settings.set('theme', 'light')")
    page.read("app.connection.drop()")
    page.wait("app.world.epoch === 1 && app.world.shown?.chunkIndex > 1")
    assert page.complaints == []
    page.close()


def test_a_map_without_a_layout_is_no_trouble(standin: StandIn, context: BrowserContext) -> None:
    context.route("**/v1/layout", lambda route: route.fulfill(status=200, body="{broken"))
    page = WatchedPage(context, standin.url)
    page.begin()
    context.unroute("**/v1/layout")
    assert page.complaints == []
    page.close()


def test_a_full_server_shows_the_position_in_the_queue(standin: StandIn, page: WatchedPage) -> None:
    standin.script.queue_position = 2
    page.page.click("#begin")
    page.page.wait_for_selector("#waiting-title[aria-live=polite] >> text=Number 2 in the queue")
    assert page.read("document.activeElement.id") == "waiting"
    page.page.click("#link")
    assert "number 2 in the queue" in page.page.inner_text("#link-reason")
    page.page.click("#waiting-cancel")
    page.page.wait_for_selector("#chooser")


def test_a_refused_start_is_explained_and_can_be_tried_again(standin: StandIn, page: WatchedPage) -> None:
    standin.script.refuse = {"code": "capacity", "message": "4 of 4 sessions are in use", "retryable": True}
    page.page.click("#begin")
    page.page.wait_for_selector("#trouble")
    assert page.page.inner_text("#trouble-title") == "All worlds are taken"
    assert page.page.inner_text("#trouble-text") == "4 of 4 sessions are in use."
    with page.passing(copied("trouble-copy")):
        page.page.click("#trouble-copy")
    assert "error=capacity" in page.read("navigator.clipboard.readText()")
    standin.script.refuse = None
    page.page.click("#trouble-retry")
    page.wait_for_picture()


def test_the_card_of_the_link_says_what_is_known_and_copies_it_without_secrets(page: WatchedPage) -> None:
    page.begin()
    page.page.click("#link")
    assert page.page.inner_text("#link-reason") == "Everything is well."
    assert "160x96, 48 fps, fmp4" in page.page.inner_text("#link-facts")
    with page.passing(copied("link-copy")):
        page.page.click("#link-copy")
    report = page.read("navigator.clipboard.readText()")
    assert "Session: s-standin" in report
    assert "connecting attempt=0" in report
    assert RESUME_TOKEN not in report
    assert WATCH_TOKEN not in report
    page.page.keyboard.press("Escape")
    assert page.page.locator("#link-card").is_hidden()


def test_without_a_clipboard_the_text_is_shown(standin: StandIn, context: BrowserContext) -> None:
    page = WatchedPage(context, standin.url, before="delete Navigator.prototype.clipboard")
    page.begin()
    page.page.click("#share")
    page.page.wait_for_selector("#copy[open]")
    assert page.page.input_value("#copy-text") == f"{standin.url}/#watch={WATCH_TOKEN}"
    page.close()


@pytest.mark.parametrize(("at_once", "is_reloaded"), [(True, False), (False, True)])
def test_a_world_that_died_with_its_worker_starts_again_as_it_was(
    standin: StandIn, page: WatchedPage, at_once: bool, is_reloaded: bool
) -> None:
    """`at_once`: before the page has tried, a second later, to resume, which is refused."""
    if at_once:
        page.hold_retries()
    page.page.click(".tile >> nth=2")
    page.begin()
    page.page.click("#prompts >> text=the town in night")
    page.until(lambda: standin.world.prompt == "the town in night")
    if is_reloaded:
        page.page.reload()
        page.wait_for_picture()
        page.wait("app.world.prompt === 'the town in night'")
    started = next(start for start in standin.script.starts if "resume_token" not in start)
    standin.script.die_after_chunk = standin.world.chunk_index + 1
    title = "This run has stopped" if at_once else "The model has stopped"
    page.page.wait_for_selector(f"#trouble >> text={title}")
    # One card at a time says what to do.
    assert page.page.locator("#link-card").is_hidden()
    num_starts = len(standin.script.starts)
    page.page.click("#trouble-retry >> text=Start it again")
    page.wait("app.world.epoch === 0 && app.world.shown?.chunkIndex > 0 && document.body.dataset.view === 'world'")
    (again,) = [start for start in standin.script.starts[num_starts:] if "resume_token" not in start]
    assert again["image"] == started["image"]
    assert again["prompt"] == "the town in night"


def test_who_did_not_close_the_world_is_told_why_it_ended(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    standin.script.close_reason = "idle"
    standin.script.close_after_chunk = standin.world.chunk_index + 1
    page.page.wait_for_selector("#trouble >> text=This world has ended")
    text = "Nobody steered it for as long as the server keeps such a world."
    assert page.page.inner_text("#trouble-text") == text
    page.page.click("#trouble-retry >> text=Start it again")
    page.wait("app.world.shown?.chunkIndex > 0 && document.body.dataset.view === 'world'")
    page.page.click("#close")
    page.page.wait_for_selector("#chooser")


def test_a_spectator_sees_the_world_and_steers_nothing(
    standin: StandIn, page: WatchedPage, context: BrowserContext
) -> None:
    page.begin()
    with page.passing(copied("share")):
        page.page.click("#share")
    address = page.read("navigator.clipboard.readText()")
    page.wait("app.world.shown.chunkIndex >= 2")
    watching = WatchedPage(context, address)
    watching.wait_for_picture()
    assert standin.script.starts[-1] == {"type": "session.watch", "protocol": 1, "watch_token": WATCH_TOKEN}
    assert watching.read("app.world.shown.chunkIndex") >= 3
    assert watching.page.inner_text("#link-text") == "Watching"
    visible = "[...document.querySelectorAll('button')].filter((b) => b.checkVisibility()).map((b) => b.id)"
    assert watching.read(visible) == ["link", "save", "settings-open", "close"]
    watching.page.keyboard.press("?")
    keys = (
        "[...document.querySelectorAll('#help kbd')].filter((key) => key.checkVisibility()).map((key) => key.innerText)"
    )
    assert watching.read(keys) == ["M", "N", "F", "?"]
    watching.page.keyboard.press("Escape")
    num_events = len(standin.script.events)
    watching.page.keyboard.press("w")
    page.page.keyboard.press("r")
    watching.wait("app.world.shown.run === 1 && app.world.shown.chunkIndex >= 1")
    assert len(standin.script.events) == num_events
    assert watching.complaints == []
    watching.page.click("#close")
    watching.page.wait_for_selector("#trouble-title >> text=Nothing to watch", state="attached")
    watching.wait("app.connection.state === 'ended' && app.player.bufferedS < 0.1")
    assert watching.page.locator("#trouble").is_visible()
    watching.close()


def test_a_world_that_is_gone_cannot_be_watched(standin: StandIn, context: BrowserContext) -> None:
    standin.script.refuse = {"code": "bad_watch_token", "message": "no session has this watch token"}
    page = WatchedPage(context, f"{standin.url}/#watch=other")
    page.page.wait_for_selector("#trouble >> text=This world is gone")
    page.page.click("#trouble-new")
    page.page.wait_for_selector("#chooser")
    page.close()


def test_a_network_that_is_back_is_no_cure_for_a_video_that_cannot_be_shown(page: WatchedPage) -> None:
    page.begin()
    page.read("(app.playerFailures = 99, app.onPlayerError(new Error('no decoder')))")
    page.page.wait_for_selector("#trouble >> text=The video cannot be shown")
    page.page.evaluate("dispatchEvent(new Event('online'))")
    assert page.read("app.connection.state") == "lost"
    page.page.click("#trouble-retry")
    page.wait("app.connection.state === 'live'")


def test_escape_goes_back_to_the_world_where_there_is_one(page: WatchedPage) -> None:
    page.page.wait_for_selector("#chooser")
    page.page.keyboard.press("Escape")
    assert page.page.is_visible("#chooser")
    page.begin()
    page.read("app.choose()")
    page.page.wait_for_selector("body[data-view=chooser]")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector("body[data-view=world]")
