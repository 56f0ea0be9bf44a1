"""The in-process half of `worldserve bench`: the same model and ticks without a server, sockets or an encoder.

`python -m worldmodel.tools.bench_inprocess` reads one JSON job from standard input (`Job`) and writes what it saw to
the job's `out` as JSON, in the form of `clients/bench/samples.py`. A chunk counts as arrived when its pixels are in
host memory. Progress goes to standard error. Exit codes: 0 done, 1 a chunk failed (what came before is written), 3 the
model can't be loaded.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from worldmodel.catalog import control_parser
from worldmodel.errors import LoadFailed, WorldModelError
from worldmodel.messages import (
    CloseSession,
    Control,
    ControlEvent,
    ImageSize,
    LoadStage,
    ModelInfo,
    OpenSession,
    RequestId,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.runtime import DeviceLost, Runtime
from worldmodel.start_image import read_image

EXIT_FAILED = 1
EXIT_LOAD_FAILED = 3

TRACK, SCHEMA = "camera", "lingbot.camera_actions.v1"
KEYS = ("w", "a", "s", "d", "i", "j", "k", "l")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run. `image_rgb` is RGB24 of size `image`. Each of `num_sessions` makes `num_chunks` chunks, in turn.

    With `steer` every chunk has one event with random keys of `seed`.
    """

    start: StartWorker
    prompt: str
    image: ImageSize
    image_rgb: bytes
    seed: int
    num_sessions: int
    num_chunks: int
    time_limit_s: float
    steer: bool
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSample:
    """One chunk; see `clients/bench/samples.py`."""

    chunk_index: int
    arrived_s: float
    num_frames: int
    num_bytes: int
    timings_ms: dict[str, float]


@dataclass(slots=True, kw_only=True)
class SessionSamples:
    """One session; see `clients/bench/samples.py`."""

    began_s: float
    started_s: float
    fps: int
    width: int
    height: int
    latent_frames_per_chunk: int
    chunks: list[ChunkSample] = field(default_factory=list)
    ended: str | None = None


def main() -> int:
    """Run the job on standard input and return the exit code."""
    logging.basicConfig(level=logging.WARNING)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    torch.set_num_threads(job.start.cpu_threads)
    began_s = time.perf_counter()
    try:
        runtime = Runtime.load(job.start, _Progress().show)
    except LoadFailed as error:
        print(f"worldserve: in process: {error.message}", file=sys.stderr)
        return EXIT_LOAD_FAILED
    load_s = time.perf_counter() - began_s
    info = runtime.info(job.start.model)
    if info.capacity_sessions < job.num_sessions:
        print(
            f"worldserve: in process: {job.num_sessions} sessions were asked for, and there is room for "
            f"{info.capacity_sessions}",
            file=sys.stderr,
        )
        return EXIT_FAILED
    sessions = run(runtime, info, job)
    Path(job.out).write_bytes(msgspec.json.encode(document(runtime, info, sessions, load_s=load_s)))
    return EXIT_FAILED if any(session.ended for session in sessions) else 0


def run(runtime: Runtime, info: ModelInfo, job: Job) -> list[SessionSamples]:
    """Open all sessions, make their chunks in turn, close them. A failure or the time limit ends the run early."""
    deadline_s = time.perf_counter() + job.time_limit_s
    source = random.Random(job.seed)
    sessions = [_open(runtime, info, job, number) for number in range(job.num_sessions)]
    for chunk_index in range(job.num_chunks):
        for number, session in enumerate(sessions):
            if time.perf_counter() >= deadline_s:
                return _end(sessions, f"the time limit of {job.time_limit_s:g} s was reached")
            events = _events(job, source, event_id=chunk_index) if job.steer else ()
            try:
                session.chunks.append(_make_chunk(runtime, number, chunk_index, events))
            except (WorldModelError, DeviceLost) as error:
                return _end(sessions, f"session {number}, chunk {chunk_index}: {error}")
    for number in range(len(sessions)):
        runtime.close(CloseSession(request_id=RequestId(f"bench-close-{number}"), session_id=_session_id(number)))
    return sessions


def _end(sessions: list[SessionSamples], reason: str) -> list[SessionSamples]:
    for session in sessions:
        session.ended = reason
    return sessions


def _session_id(number: int) -> SessionId:
    return SessionId(f"bench-{number}")


def _open(runtime: Runtime, info: ModelInfo, job: Job, number: int) -> SessionSamples:
    began_s = time.perf_counter()
    opening = OpenSession(
        request_id=RequestId(f"bench-open-{number}"),
        session_id=_session_id(number),
        prompt=job.prompt,
        seed=job.seed + number,
        image=job.image,
    )
    runtime.open(opening, read_image(job.image, memoryview(job.image_rgb)))
    return SessionSamples(
        began_s=began_s,
        started_s=time.perf_counter(),
        fps=info.fps,
        width=info.width,
        height=info.height,
        latent_frames_per_chunk=info.latent_frames_per_chunk,
    )


def _events(job: Job, source: random.Random, *, event_id: int) -> tuple[ControlEvent, ...]:
    keys = sorted(source.sample(KEYS, source.randint(0, 2)))
    data = control_parser(job.start.model)(TRACK, SCHEMA, {"mode": "state", "held": keys})
    return (ControlEvent(event_id=event_id, controls=(Control(track=TRACK, schema=SCHEMA, data=data),)),)


def _make_chunk(runtime: Runtime, number: int, chunk_index: int, events: Sequence[ControlEvent]) -> ChunkSample:
    """Make a chunk as the worker's loop does: tick, then media; the next tick starts when the pixels are here."""
    chunk = runtime.tick(
        Tick(
            request_id=RequestId(f"bench-{number}-{chunk_index}"),
            session_id=_session_id(number),
            chunk_index=chunk_index,
            events=tuple(events),
        )
    )
    media, parts = chunk.to_host()
    timings = chunk.committed.timings
    return ChunkSample(
        chunk_index=chunk_index,
        arrived_s=time.perf_counter(),
        num_frames=media.num_media_frames,
        num_bytes=sum(part.nbytes for part in parts),
        timings_ms={
            "denoise": timings.denoise_ms,
            "commit": timings.commit_ms,
            "decode": timings.decode_ms,
            "transfer": media.transfer_ms,
        },
    )


def document(runtime: Runtime, info: ModelInfo, sessions: list[SessionSamples], *, load_s: float) -> dict[str, object]:
    """Build what the job\'s `out` holds."""
    memory = runtime.memory()
    sample = {
        "at_s": time.perf_counter(),
        "worker_bytes": memory.rss_bytes,
        "device_bytes": memory.device_bytes or None,
    }
    model = {name: value for name, value in msgspec.to_builtins(info).items() if name != "versions"}
    return {
        "sessions": sessions,
        "memory": [sample],
        # Named as /v1/info names it.
        "model": {"name": model.pop("model"), **model},
        "versions": info.versions,
        "capacity_sessions": info.capacity_sessions,
        "kv_bytes_per_session": info.kv_bytes_per_session,
        "load_s": load_s,
    }


class _Progress:
    """One line on standard error for each stage of loading."""

    def __init__(self) -> None:
        self._stage: LoadStage | None = None

    def show(self, stage: LoadStage, fraction: float, detail: str) -> None:
        if stage is not self._stage:
            self._stage = stage
            print(f"in process: {stage}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
