"""The model without a server: the same chunks, in the form the benchmark reads."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from clients.bench.samples import Run
from tests.support.fake_model import load_fake, start_fake
from worldmodel.messages import ImageSize
from worldmodel.tools.bench_inprocess import Job, document, run


def make_job(*, num_sessions: int = 2, num_chunks: int = 4, time_limit_s: float = 60.0, steer: bool = True) -> Job:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    return Job(
        start=start_fake(sessions=num_sessions),
        prompt="a street",
        image=ImageSize(width=40, height=24),
        image_rgb=pixels.tobytes(),
        seed=1,
        num_sessions=num_sessions,
        num_chunks=num_chunks,
        time_limit_s=time_limit_s,
        steer=steer,
        out="unused",
    )


@pytest.mark.parametrize("steer", [True, False])
def test_sessions_take_turns_and_are_closed(steer: bool):
    runtime = load_fake(sessions=2)
    job = make_job(steer=steer)
    info = runtime.info("fake")
    sessions = run(runtime, info, job)
    assert [[chunk.chunk_index for chunk in session.chunks] for session in sessions] == [[0, 1, 2, 3]] * 2
    turns = [chunk.arrived_s for pair in zip(*(session.chunks for session in sessions), strict=True) for chunk in pair]
    assert turns == sorted(turns)
    assert all(session.ended is None for session in sessions)
    expected = [info.first_chunk_media_frames, *3 * [info.chunk_media_frames]]
    assert [chunk.num_frames for chunk in sessions[0].chunks] == expected
    assert runtime.memory().sessions == 0


def test_the_document_is_what_the_benchmark_reads():
    runtime = load_fake(sessions=1)
    info = runtime.info("fake")
    sessions = run(runtime, info, make_job(num_sessions=1))
    text = msgspec.json.encode(document(runtime, info, sessions, load_s=1.5))
    read = msgspec.json.decode(text, type=Run)
    assert read.load_s == 1.5
    assert read.model["name"] == "fake"
    assert read.model["device"] == "cpu"
    assert read.versions == info.versions
    assert read.capacity_sessions == 1
    (session,) = read.sessions
    assert (session.width, session.height, session.fps) == (info.width, info.height, info.fps)
    assert set(session.chunks[0].timings_ms) == {"denoise", "commit", "decode", "transfer"}
    assert session.chunks[1].num_bytes == info.chunk_media_frames * info.width * info.height * 3 // 2


def test_a_failed_chunk_keeps_what_came_before():
    runtime = load_fake(sessions=1, failures=[{"kind": "early", "chunk_index": 2}])
    (session,) = run(runtime, runtime.info("fake"), make_job(num_sessions=1))
    assert [chunk.chunk_index for chunk in session.chunks] == [0, 1]
    assert session.ended is not None
    assert session.ended.startswith("session 0, chunk 2: ")


def test_the_time_limit_ends_the_run():
    runtime = load_fake(sessions=1)
    (session,) = run(runtime, runtime.info("fake"), make_job(num_sessions=1, time_limit_s=0.0))
    assert session.chunks == []
    assert session.ended == "the time limit of 0 s was reached"
