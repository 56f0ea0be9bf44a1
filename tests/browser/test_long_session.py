"""A long session in both players: memory stays flat, and the picture stays near the live edge."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support.browser_chromium import WatchedPage
from tests.support.browser_standin import StandIn

MINUTES = float(os.environ.get("WORLDSERVE_SOAK_MINUTES", "15"))

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 180)]

FPS = 16
CHUNK_S = 12 / FPS
SAMPLE_EVERY_MS = 2000
RECORDING_CAP_BYTES = 2_000_000
MAX_GROWTH_BYTES = 3_000_000
"""Of the page's memory from the first fifth of the session to the last one; it uses about 6 MB in all."""

KEEPS = """((app) => [
  app.player.segments.length,
  app.world.recorder._fragments.length,
  app.world.walk.trail.length,
  app.viewer.linkCard._notes.length,
  app.player.bufferedS,
  app.world.shown.chunkIndex,
])(window.worldserve)"""


@dataclass
class Watch:
    """What was seen of one page, every other second."""

    page: WatchedPage
    devtools: Any
    times_s: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    chunk_indexes: list[int] = field(default_factory=list)
    most_kept: list[float] = field(default_factory=lambda: [0.0] * 4)

    def sample(self) -> None:
        self.devtools.send("HeapProfiler.collectGarbage")
        usage = self.devtools.send("Runtime.getHeapUsage")
        self.times_s.append(time.monotonic())
        self.num_bytes.append(int(usage["usedSize"] + usage["backingStorageSize"]))
        *kept, delay_s, chunk_index = self.page.page.evaluate(KEEPS)
        self.delays_s.append(delay_s)
        self.chunk_indexes.append(chunk_index)
        self.most_kept = [max(pair) for pair in zip(kept, self.most_kept, strict=True)]


def open_page(browser: Browser, standin: StandIn, format: str) -> Watch:
    page = WatchedPage(browser, standin.url)
    page.read(f"app.viewer.settings.set('format', '{format}')")
    page.read(f"(app.world.recorder._capBytes = {RECORDING_CAP_BYTES})")
    page.begin()
    assert page.read("app.world.session.format") == format
    return Watch(page, page.context.new_cdp_session(page.page))


def fifths(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """The first fifth that is no warm-up any more, and the last one."""
    size = len(values) // 5
    return values[size : 2 * size], values[-size:]


def test_a_long_session_stays_flat_and_near_the_live_edge(browser: Browser) -> None:
    with StandIn(fps=FPS) as one, StandIn(fps=FPS) as other:
        watches = [open_page(browser, one, "fmp4"), open_page(browser, other, "h264")]
        until = time.monotonic() + 60 * MINUTES
        held = False
        while time.monotonic() < until:
            for watch in watches:
                watch.page.page.wait_for_timeout(SAMPLE_EVERY_MS / len(watches))
                (watch.page.page.keyboard.up if held else watch.page.page.keyboard.down)("w")
                watch.sample()
            held = not held
        for watch in watches:
            early_bytes, late_bytes = (statistics.median(part) for part in fifths(watch.num_bytes))
            early_s, late_s = (statistics.median(part) for part in fifths(watch.delays_s))
            early_rate, late_rate = (
                CHUNK_S * (chunks[-1] - chunks[0]) / (times_s[-1] - times_s[0])
                for chunks, times_s in zip(fifths(watch.chunk_indexes), fifths(watch.times_s), strict=True)
            )
            print(f"bytes {early_bytes} -> {late_bytes}, delay {early_s:.3f} s -> {late_s:.3f} s")
            print(f"media time over wall time {early_rate:.3f} -> {late_rate:.3f}, most kept {watch.most_kept}")
            assert min(early_rate, late_rate) > 0.9
            assert late_bytes - early_bytes < MAX_GROWTH_BYTES
            assert late_s < early_s + CHUNK_S
            assert late_s < 3 * CHUNK_S
            segments, fragments, trail, notes = watch.most_kept
            assert segments < 15 / CHUNK_S
            assert fragments < 1500
            assert trail <= 500
            assert notes < 10
            assert watch.page.read("app.world.epoch") == 0
            assert watch.page.complaints == []
            watch.page.close()
