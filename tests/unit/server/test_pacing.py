"""When a chunk may start, per pacing mode, as tables of (call, answer)."""

from __future__ import annotations

import math

import pytest

from server.pacing import PacingGate
from server.wire.messages import Pacing

FPS = 12


def gate(mode: Pacing, lead_chunks: int = 1) -> PacingGate:
    return PacingGate(mode=mode, lead_chunks=lead_chunks, fps=FPS)


def deliver(it: PacingGate, chunk_index: int, now: float = 0.0) -> None:
    it.chunk_ready(chunk_index, 12, now)
    it.chunk_sent(chunk_index)


@pytest.mark.parametrize("lead_chunks", [0, 1, 3])
def test_playback_starts_lead_plus_one_chunks_before_anything_was_shown(lead_chunks: int) -> None:
    it = gate(Pacing.PLAYBACK, lead_chunks)
    for chunk_index in range(lead_chunks + 1):
        assert it.opens_at(chunk_index, 0.0) == 0.0
        deliver(it, chunk_index)
    assert it.opens_at(lead_chunks + 1, 0.0) is None


def test_playback_goes_on_with_every_chunk_shown() -> None:
    it = gate(Pacing.PLAYBACK)
    for chunk_index in range(5):
        deliver(it, chunk_index)
    it.chunk_shown(2, 100.0, 1.0)
    assert it.opens_at(4, 1.0) == 1.0
    assert it.opens_at(5, 1.0) is None
    it.chunk_shown(1, 100.0, 2.0)
    assert it.opens_at(4, 2.0) == 2.0, "an older report takes nothing back"


@pytest.mark.parametrize(("lead_chunks", "num_unsent"), [(0, 0), (1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("mode", [Pacing.PLAYBACK, Pacing.CLOCK])
def test_a_chunk_waits_until_those_before_it_were_sent(mode: Pacing, lead_chunks: int, num_unsent: int) -> None:
    it = gate(mode, lead_chunks)
    for chunk_index in range(10):
        deliver(it, chunk_index)
    it.chunk_shown(9, 0.0, 100.0)
    for chunk_index in range(10, 10 + num_unsent):
        assert it.opens_at(chunk_index, 100.0) == 100.0
        it.chunk_ready(chunk_index, 12, 100.0)
    last = 10 + num_unsent
    assert it.opens_at(last, 100.0) == 100.0
    it.chunk_ready(last, 12, 100.0)
    assert it.opens_at(last + 1, 100.0) is None
    it.chunk_sent(10)
    it.chunk_shown(10, 0.0, 200.0)
    assert it.opens_at(last + 1, 200.0) == 200.0


def test_free_stops_only_for_chunks_that_the_socket_has_not_taken() -> None:
    it = gate(Pacing.FREE)
    it.chunk_ready(0, 12, 0.0)
    it.chunk_ready(1, 12, 0.0)
    assert it.opens_at(2, 0.0) is None
    it.chunk_sent(0)
    assert it.opens_at(2, 0.0) == 0.0
    assert it.opens_at(3, 0.0) is None
    assert it.deadline() == math.inf


def test_clock_follows_a_viewer_at_media_rate() -> None:
    it = gate(Pacing.CLOCK)
    deliver(it, 0, now=10.0)
    deliver(it, 1, now=10.1)
    # Chunk 0 plays from 10 to 11, chunk 1 from 11 to 12; chunk 2 may start when chunk 0 is shown, chunk 3 with chunk 1.
    assert it.opens_at(2, 10.1) == 10.1
    deliver(it, 2, now=10.2)
    assert it.opens_at(3, 10.2) == 11.0
    assert it.opens_at(3, 11.5) == 11.5
    deliver(it, 3, now=11.5)
    assert it.opens_at(4, 11.5) == 12.0


def test_clock_viewer_waits_for_a_late_chunk() -> None:
    it = gate(Pacing.CLOCK, lead_chunks=0)
    deliver(it, 0, now=0.0)
    assert it.opens_at(1, 0.0) == 0.0
    deliver(it, 1, now=5.0)
    assert it.opens_at(2, 5.0) == 5.0
    deliver(it, 2, now=5.1)
    assert it.opens_at(3, 5.2) == 6.0


def test_clock_viewer_is_not_moved_by_reports() -> None:
    it = gate(Pacing.CLOCK)
    for chunk_index in range(3):
        it.chunk_shown(-1, 0.0, now=0.1 * chunk_index)
        deliver(it, chunk_index, now=0.1 * chunk_index)
    it.chunk_shown(2, 0.0, now=0.3)
    assert it.opens_at(3, 0.3) == 1.0
    deliver(it, 3, now=0.4)
    assert it.opens_at(4, 0.4) == 2.0


@pytest.mark.parametrize("mode", [Pacing.PLAYBACK, Pacing.CLOCK])
def test_deadline_is_when_the_viewer_runs_dry(mode: Pacing) -> None:
    it = gate(mode)
    assert it.deadline() is None
    deliver(it, 0, now=10.0)
    assert it.deadline() == 11.0
    deliver(it, 1, now=10.5)
    assert it.deadline() == 12.0
    it.chunk_shown(0, 250.0, 11.9)
    assert it.deadline() == pytest.approx(12.15)


def test_a_client_that_comes_back_is_not_stuck_behind_chunks_it_never_showed() -> None:
    it = gate(Pacing.PLAYBACK)
    for chunk_index in range(2):
        deliver(it, chunk_index)
    assert it.opens_at(2, 1.0) is None
    it.resume(1, 1.0)
    assert it.opens_at(2, 1.0) == 1.0


def test_a_client_that_lost_chunks_must_get_them_before_new_ones() -> None:
    it = gate(Pacing.FREE)
    for chunk_index in range(4):
        deliver(it, chunk_index)
    it.resume(1, 1.0)
    assert it.sent == 1
    assert it.opens_at(4, 1.0) is None
    it.chunk_sent(2)
    assert it.opens_at(4, 1.0) == 1.0


@pytest.mark.parametrize("mode", [Pacing.PLAYBACK, Pacing.CLOCK])
def test_a_client_that_comes_back_may_have_lost_its_buffer(mode: Pacing) -> None:
    it = gate(mode)
    for chunk_index in range(2):
        deliver(it, chunk_index)
    assert it.deadline() == 2.0
    it.resume(1, 0.5)
    assert it.deadline() == 0.5


@pytest.mark.parametrize("mode", Pacing)
def test_a_new_run_starts_from_nothing(mode: Pacing) -> None:
    it = gate(mode)
    for chunk_index in range(3):
        deliver(it, chunk_index, now=0.0)
    it.restart()
    assert (it.shown, it.sent) == (-1, -1)
    assert it.opens_at(0, 50.0) == 50.0
    assert it.opens_at(2, 50.0) is None
