"""Positions in media time and the chunks they lie in."""

from __future__ import annotations

import pytest

from server.dialects.omni_playhead import Playhead, Shown


def playhead() -> Playhead:
    """Return one of chunks at 0, 0.75 and 1.75 s that ends at 2.75 s."""
    it = Playhead()
    for chunk_index, num_media_frames in enumerate((9, 12, 12)):
        it.sent(run=0, chunk_index=chunk_index, num_media_frames=num_media_frames)
    return it


def move(it: Playhead, position_s: float) -> tuple[int, float]:
    shown = it.move(position_s, 12)
    assert isinstance(shown, Shown)
    return shown.chunk.chunk_index, shown.buffered_ms


@pytest.mark.parametrize(
    ("position_s", "expected"),
    [(0.0, (0, 2750.0)), (0.74, (0, 2010.0)), (0.75, (1, 2000.0)), (1.75, (2, 1000.0)), (1e300, (2, 0.0))],
)
def test_a_position_lies_in_a_chunk(position_s: float, expected: tuple[int, float]) -> None:
    assert move(playhead(), position_s) == (expected[0], pytest.approx(expected[1]))


def test_backwards_is_the_start_of_the_chunk_on_screen() -> None:
    it = playhead()
    assert move(it, 1.0)[0] == 1
    assert move(it, 0.1) == (1, pytest.approx(2000.0))


def test_nothing_is_shown_before_the_first_chunk() -> None:
    assert Playhead().move(3.0, 12) is None
