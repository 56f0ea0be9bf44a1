"""The arithmetic of the benchmark, worked out by hand and against other ways to say the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.bench.samples import ChunkSample
from clients.bench.statistics import (
    deadline_attainment,
    first_media_frame,
    intervals_ms,
    media_fps,
    percentile,
    realtime_factor,
    stall_share,
    steady,
    summarize,
    view,
)

SAMPLES = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50)
GAPS = st.lists(st.tuples(st.floats(min_value=0, max_value=10), st.integers(1, 24)), min_size=1, max_size=40)


def session(*arrivals_s: float, first: int = 9, further: int = 12) -> list[ChunkSample]:
    """Chunks with these arrival times."""
    return [
        ChunkSample(chunk_index=index, arrived_s=at_s, num_frames=further if index else first, num_bytes=100)
        for index, at_s in enumerate(arrivals_s)
    ]


def arrivals(gaps: list[tuple[float, int]]) -> list[ChunkSample]:
    """Chunks by the gap before each, and its media frames."""
    at_s, chunks = 0.0, []
    for index, (gap_s, num_frames) in enumerate(gaps):
        at_s += gap_s
        chunks.append(ChunkSample(chunk_index=index, arrived_s=at_s, num_frames=num_frames, num_bytes=1))
    return chunks


# ---------------------------------------------------------------- percentiles


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.95, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.5, 3.0),
        # h = 0.95 * 4 = 3.8: four fifths of the way from 40 to 50.
        ([10.0, 20.0, 30.0, 40.0, 50.0], 0.95, 48.0),
        ([10.0, 20.0, 30.0, 40.0, 50.0], 0.0, 10.0),
        ([10.0, 20.0, 30.0, 40.0, 50.0], 1.0, 50.0),
    ],
)
def test_percentile_by_hand(values: list[float], share: float, expected: float):
    assert percentile(values, share) == pytest.approx(expected)


@given(SAMPLES, st.floats(min_value=0, max_value=1))
def test_percentile_is_that_of_numpy(values: list[float], share: float):
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)), abs=1e-6)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_no_percentile_of_nothing(values: list[float], share: float):
    with pytest.raises(ValueError, match="expected values and a share from 0 to 1"):
        percentile(values, share)


@given(SAMPLES)
def test_a_summary_is_in_order(values: list[float]):
    summary = summarize(values)
    assert summary is not None
    assert summary.count == len(values)
    assert summary.min <= summary.median <= summary.p95 <= summary.p99 <= summary.max
    assert summary.mean == pytest.approx(math.fsum(values) / len(values))


def test_no_summary_of_nothing():
    assert summarize([]) is None


# ---------------------------------------------------------------- intervals and rates


def test_intervals_after_a_chunk():
    chunks = session(1.0, 3.0, 4.0, 4.5, 5.0)
    assert intervals_ms(chunks, 0) == pytest.approx([2000, 1000, 500, 500])
    assert intervals_ms(chunks, 2) == pytest.approx([500, 500])
    assert intervals_ms(chunks, 4) == []
    assert [chunk.chunk_index for chunk in steady(chunks, 2)] == [3, 4]


def test_media_rate_by_hand():
    # After chunk 1: 12 + 12 frames in 2 s.
    assert media_fps([session(0.0, 1.0, 2.5, 3.0)], 1) == pytest.approx(12.0)


def test_media_rate_is_that_of_one_session():
    # 24 frames in 2 s beside 24 frames in 4 s: 48 frames in 6 seconds of sessions.
    assert media_fps([session(0.0, 1.0, 2.0), session(5.0, 7.0, 9.0)], 0) == pytest.approx(8.0)
    assert media_fps([session(0.0, 1.0, 2.0), session(0.0)], 0) == pytest.approx(12.0)


def test_no_media_rate_without_a_second_chunk():
    assert media_fps([session(1.0)], 0) is None
    assert media_fps([], 0) is None


def test_realtime_factor():
    assert realtime_factor(6.0, 12) == 0.5
    assert realtime_factor(24.0, 16) == 1.5


# ---------------------------------------------------------------- viewers


def test_a_viewer_who_never_waits():
    # 12 frames a second: chunk 0 plays from 1.0 to 1.75, chunk 1 until 2.75.
    viewing = view(session(1.0, 1.7, 2.75), 12)
    assert viewing.shown_s == pytest.approx([1.0, 1.75, 2.75])
    assert viewing.stalls_s == [0, 0, 0]
    assert viewing.played_s == pytest.approx(1.75)
    assert deadline_attainment([viewing]) == 1
    assert stall_share([viewing]) == 0


def test_a_viewer_who_waits():
    # Chunk 1 comes half a second late, which moves the deadline of chunk 2 from 2.75 to 3.25.
    viewing = view(session(1.0, 2.25, 3.0), 12)
    assert viewing.shown_s == pytest.approx([1.0, 2.25, 3.25])
    assert viewing.stalls_s == pytest.approx([0, 0.5, 0])
    assert deadline_attainment([viewing]) == 0.5
    # Half a second of the 0.5 + 0.75 + 1.0 until the last chunk is on screen.
    assert stall_share([viewing]) == pytest.approx(0.5 / 2.25)


def test_viewers_together():
    on_time, late = view(session(0.0, 0.5), 12), view(session(0.0, 1.5), 12)
    assert deadline_attainment([on_time, late]) == 0.5
    assert stall_share([on_time, late]) == pytest.approx(0.75 / (0.75 + 1.5))


def test_a_single_chunk_has_no_deadline():
    viewing = view(session(1.0), 12)
    assert deadline_attainment([viewing]) is None
    assert stall_share([viewing]) is None


@given(GAPS, st.sampled_from([12, 16]))
def test_waiting_and_playing_are_all_there_is(gaps: list[tuple[float, int]], fps: int):
    chunks = arrivals(gaps)
    viewing = view(chunks, fps)
    wall_s = viewing.shown_s[-1] - viewing.shown_s[0]
    assert math.fsum(viewing.stalls_s) + viewing.played_s == pytest.approx(wall_s, abs=1e-6)
    assert all(shown_s >= chunk.arrived_s for shown_s, chunk in zip(viewing.shown_s, chunks, strict=True))
    share = stall_share([viewing])
    assert share is None or 0 <= share < 1


@given(GAPS)
def test_a_faster_viewer_waits_no_less(gaps: list[tuple[float, int]]):
    chunks = arrivals(gaps)
    slow, fast = view(chunks, 12), view(chunks, 16)
    assert math.fsum(fast.stalls_s) >= math.fsum(slow.stalls_s) - 1e-9
    assert fast.num_on_time <= slow.num_on_time


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize(
    ("chunk_index", "num_media_frames", "expected"),
    [(0, 9, [0, 1, 5]), (1, 12, [0, 4, 8]), (5, 12, [0, 4, 8]), (0, 13, [0, 1, 5, 9]), (1, 16, [0, 4, 8, 12])],
)
def test_first_media_frame(chunk_index: int, num_media_frames: int, expected: list[int]):
    length = len(expected)
    found = [
        first_media_frame(
            latent_frame,
            num_media_frames=num_media_frames,
            num_latent_frames=length,
            is_first_chunk=chunk_index == 0,
        )
        for latent_frame in range(length)
    ]
    assert found == expected


def test_first_media_frame_of_a_chunk_of_one():
    assert first_media_frame(0, num_media_frames=1, num_latent_frames=1, is_first_chunk=True) == 0
