"""What a visitor chooses while a world is on screen: another world, player, prompt or address."""

from __future__ import annotations

import pytest

from tests.support.browser_chromium import WatchedPage

pytestmark = pytest.mark.browser


def test_the_frame_rate_begins_anew_where_frames_are_counted_anew(modules: WatchedPage) -> None:
    script = """async () => {
      const { FrameRate } = await import('/static/hud.js');
      const rate = new FrameRate();
      for (const [ms, frames] of [[0, 500], [1000, 512], [1500, 3], [2000, 9]]) rate.sample(ms, frames);
      return rate.fps;
    }"""
    assert modules.page.evaluate(script) == 12
