"""How the picture goes on, in both players: lost links, spoiled chunks, full buffers, hidden tabs, pauses, films."""

from __future__ import annotations

import io
import itertools

import av
import pytest
from playwright.sync_api import BrowserContext

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import FPS, RESUME_TOKEN, StandIn

pytestmark = pytest.mark.browser

FORMATS = pytest.mark.parametrize("format", ["fmp4", "h264"])
FULL_ONCE = """
  const append = SourceBuffer.prototype.appendBuffer;
  window.timesFull = 0;
  SourceBuffer.prototype.appendBuffer = function (bytes) {
    if (window.timesFull === 0 && document.querySelector('video').currentTime > 1.3) {
      window.timesFull += 1;
      throw new DOMException('full', 'QuotaExceededError');
    }
    append.call(this, bytes);
  };
"""


def times(page: WatchedPage) -> list[float]:
    """Save the recording and return the times of its frames."""
    with page.page.expect_download() as download:
        page.page.click("#save")
    with av.open(io.BytesIO(download.value.path().read_bytes())) as film:
        return [float(frame.pts * frame.time_base) for frame in film.decode(video=0)]


@FORMATS
def test_a_lost_link_resumes_behind_the_last_chunk_and_picture_and_recording_go_on(
    standin: StandIn, page: WatchedPage, format: str
) -> None:
    page.read(f"app.viewer.settings.set('format', '{format}')")
    page.begin()
    page.wait("app.world.shown.chunkIndex >= 1")
    page.hold_retries()
    standin.script.drop_after_chunk = standin.world.chunk_index
    page.page.wait_for_selector("#link-card >> text=The server closed the link (1011)")
    page.page.click("#link-retry")
    page.wait("app.world.epoch === 1 && app.world.shown.chunkIndex > app.player.segments[0].chunkIndex + 3")
    assert page.page.locator("#link-card").is_hidden()
    assert standin.script.starts[0]["format"] == format
    resumed = standin.script.starts[-1]
    assert resumed["resume_token"] == RESUME_TOKEN
    segments = page.read("app.player.segments")
    indexes = [segment["chunkIndex"] for segment in segments]
    assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
    assert resumed["last_chunk_index"] == max(s["chunkIndex"] for s in segments if s["epoch"] == 0)
    gaps = [after["startS"] - before["endS"] for before, after in itertools.pairwise(segments)]
    assert max(map(abs, gaps)) < 0.001
    surface = "video" if format == "fmp4" else "canvas"
    assert page.read("app.player.surface.id") == surface
    assert page.page.locator(f"#{surface}").is_visible()
    film = times(page)
    assert len(film) >= 9 + 12 * (len(indexes) - 2)
    steps = [after - before for before, after in itertools.pairwise(film)]
    assert max(steps) == pytest.approx(1 / FPS, abs=1e-3)
    assert min(steps) == pytest.approx(1 / FPS, abs=1e-3)


@FORMATS
def test_a_spoiled_chunk_costs_a_new_epoch_and_no_more(standin: StandIn, page: WatchedPage, format: str) -> None:
    page.read(f"app.viewer.settings.set('format', '{format}')")
    standin.script.spoil_chunk = 2
    page.hold_retries()
    page.begin()
    page.page.click("#link-retry")
    page.wait("app.world.epoch === 1 && app.world.shown.chunkIndex > 3")
    assert page.read("document.querySelector('video').error") is None
    # A chunk may count as shown before the browser tells of a frame of it, which uncovers the picture.
    page.wait("document.querySelector('#still').hidden")
    assert len(times(page)) > 9 + 12


def test_a_full_buffer_makes_room_and_plays_on(standin: StandIn, context: BrowserContext) -> None:
    page = WatchedPage(context, standin.url, before=FULL_ONCE)
    page.begin()
    page.wait("window.timesFull === 1")
    newest = page.read("app.player.segments.at(-1).chunkIndex")
    page.wait("app.world.shown.chunkIndex > argument + 1", newest)
    assert page.read("document.querySelector('video').buffered.start(0)") > 0
    assert page.read("app.world.epoch") == 0
    assert page.complaints == []
    page.close()


def test_a_tab_that_comes_back_goes_to_the_newest_chunk(standin: StandIn, page: WatchedPage) -> None:
    """A browser plays no video in a hidden tab."""
    page.begin()
    page.page.evaluate(
        """() => {
          const video = document.querySelector('video');
          video.pause();
          video.play = () => Promise.resolve();
        }"""
    )
    page.wait("app.player.segments.at(-1).startS - document.querySelector('video').currentTime > 0.2")
    page.page.evaluate("document.querySelector('video').currentTime = 0")
    newest = page.read("app.player.segments.at(-1).startS")
    position_s, is_paused = page.page.evaluate(
        """() => {
          const video = document.querySelector('video');
          delete video.play;
          document.dispatchEvent(new Event('visibilitychange'));
          return [video.currentTime, video.paused];
        }"""
    )
    assert position_s > newest - 1e-3
    assert not is_paused
    # Chunks that were never on screen are behind the viewer all the same, so the next ones are made.
    page.wait("app.world.shown.chunkIndex >= argument", page.read("app.player.segments.at(-1).chunkIndex") + 3)


def test_a_hidden_tab_reports_what_would_be_seen(standin: StandIn, context: BrowserContext) -> None:
    """Without animation frames the canvas is not drawn to, and the world goes on all the same."""
    hide = """
      window.isHidden = false;
      Object.defineProperty(document, 'hidden', {get: () => window.isHidden});
      const request = window.requestAnimationFrame;
      const waiting = [];
      window.requestAnimationFrame = (run) => (window.isHidden ? waiting.push(run) : request(run));
      window.unhide = () => {
        window.isHidden = false;
        waiting.splice(0).forEach((run) => request(run));
        document.dispatchEvent(new Event('visibilitychange'));
      };
    """
    page = WatchedPage(context, standin.url, before=hide)
    page.read("app.viewer.settings.set('format', 'h264')")
    page.begin()
    page.page.evaluate("window.isHidden = true")
    page.wait("true")
    before = page.read("app.world.shown.chunkIndex")
    page.until(lambda: standin.world.shown >= before + 3)
    page.page.evaluate("window.unhide()")
    page.wait("app.player.bufferedS < 2.2 * 12 / 48")
    assert page.complaints == []
    page.close()


def test_a_chunk_is_reported_when_the_next_one_has_arrived(standin: StandIn, page: WatchedPage) -> None:
    """The report lets the chunk after the next start; a key pressed until then must still act in that."""
    standin.script.make_s = 0.35
    page.begin()
    page.wait("app.world.shown?.chunkIndex >= 4")
    assert len(standin.script.playback) >= 3
    assert all(report["last_sent"] > report["chunk_index"] for report in standin.script.playback)


LATE_NEWS = """
const listen = SourceBuffer.prototype.addEventListener;
SourceBuffer.prototype.addEventListener = function (kind, listener) {
  listen.call(this, kind, () => setTimeout(listener, kind === 'updateend' ? 400 : 0));
};
"""
"""A busy browser: it shows a frame before the page hears that its chunk is in the buffer."""


def test_the_only_frame_of_a_paused_world_counts_as_shown(standin: StandIn, page: WatchedPage) -> None:
    page.begin()
    page.page.keyboard.press("p")
    page.until(lambda: standin.world.paused)
    page.page.add_init_script(LATE_NEWS)
    page.page.reload()
    page.wait_for_picture()


@FORMATS
def test_reset_jumps_to_the_new_run_and_pause_stops_the_picture(
    standin: StandIn, page: WatchedPage, format: str
) -> None:
    page.read(f"app.viewer.settings.set('format', '{format}')")
    page.begin()
    page.wait("app.world.shown.chunkIndex >= 1")
    page.page.keyboard.press("r")
    page.wait("app.world.shown.run === 1")
    page.page.keyboard.press("p")
    page.page.wait_for_selector("#link-text >> text=Paused")
    page.until(lambda: standin.world.paused)
    before = page.read("app.player.positionS")
    page.page.wait_for_timeout(200)
    assert page.read("app.player.positionS") == before
    # A world that is paused comes back with its picture.
    page.page.reload()
    page.wait_for_picture()
    page.page.wait_for_selector("#link-text >> text=Paused")
    before = page.read("app.player.positionS")
    page.page.keyboard.press("p")
    page.wait("app.player.positionS > argument", before)
