"""The report of a benchmark: every number that is published, from samples. Its JSON form is stable and has a schema.

`python -m clients.bench.report` prints the JSON Schema, which is kept in `docs/bench_report.schema.json`. A change that
an old reader would not survive gets a new number in `SCHEMA`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from clients.bench.provenance import Provenance
from clients.bench.samples import STAGES, ChunkSample, EventSample, Run, SessionSamples
from clients.bench.statistics import (
    Summary,
    Viewing,
    deadline_attainment,
    first_media_frame,
    intervals_ms,
    media_fps,
    median,
    realtime_factor,
    stall_share,
    steady,
    summarize,
    view,
)

SCHEMA = "worldserve.bench/1"

WINDOWS = (0, 6, 12)
"""Intervals are counted after these chunks. After 6 the published window is full, after 12 the condition constant."""

VIEWER_FPS = (12, 16)
"""Viewers that every run is judged by, beside one at the model's own rate."""

MIN_INTERVALS = 3
"""A window with fewer intervals does not make the headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was asked for. `start_image` is a name of the server's, or "synthetic"."""

    num_sessions: int
    num_chunks: int
    pacing: str
    events_per_second: float
    seed: int
    start_image: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Chunks made after chunk `after_chunk`, over all sessions.

    `interval_ms`: between two chunks of one session. `media_fps`: of one session, on average; `total_media_fps`: of all
    together. `realtime_factor`: media time over wall time for a viewer of so many frames a second. `stages_ms` and
    `bytes_per_chunk` are medians.
    """

    after_chunk: int
    interval_ms: Summary | None
    media_fps: float | None
    total_media_fps: float | None
    realtime_factor: dict[str, float]
    stages_ms: dict[str, float]
    bytes_per_chunk: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """A viewer who starts at the first chunk and plays `fps` media frames a second (`clients/bench/statistics.py`)."""

    fps: int
    deadline_attainment: float | None
    stall_share: float | None
    longest_stall_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What became of the keys. `to_chunk` and `to_frame` begin before an event is sent, on the client's clock.

    `wait_ms`: from acceptance to the start of its chunk, by the server's clock. `to_chunk_ms`: until the chunk that
    applies it is here. `to_frame_ms`: until a viewer sees the first media frame that it acts on; with pacing "free"
    that is a viewer who shows each chunk as it comes, otherwise the one who plays at the model's rate.
    `chunks_later`: how many chunks after the last one that was here when it was sent.
    """

    num_applied: int
    num_open: int
    num_refused: int
    wait_ms: Summary | None
    to_chunk_ms: Summary | None
    to_frame_ms: Summary | None
    chunks_later: Summary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Most bytes seen. `server_bytes` and `worker_bytes` are host memory, `device_bytes` what the worker reserved."""

    server_bytes: int | None
    worker_bytes: int | None
    device_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way of running. `first_chunk_ms`: from before the connection, or the open call, to the first chunk.

    `headline_after_chunk`: the latest window with at least 3 intervals. `sessions`: the samples all of it is made from.
    """

    fps: int
    width: int
    height: int
    num_chunks: int
    capacity_sessions: int | None
    kv_bytes_per_session: int | None
    load_s: float | None
    first_chunk_ms: Summary | None
    headline_after_chunk: int
    windows: list[Window]
    viewers: list[Viewer]
    events: Events
    memory: Memory
    sessions: list[SessionSamples]

    @property
    def headline(self) -> Window:
        return next(window for window in self.windows if window.after_chunk == self.headline_after_chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole benchmark. `complete` is false if any session ended early; `problems` says why.

    `served_over_in_process`: ratio of the median chunk intervals in the latest window that both have.
    """

    schema: str
    verdict: str
    complete: bool
    problems: list[str]
    provenance: Provenance
    workload: Workload
    served: Measured | None
    in_process: Measured | None
    served_over_in_process: float | None


# ---------------------------------------------------------------- making one


def make_report(served: Run | None, in_process: Run | None, workload: Workload, provenance: Provenance) -> Report:
    """Reduce samples to the report. At least one of the runs is given, with at least one chunk."""
    served_measured = None if served is None else measure(served, pacing=workload.pacing)
    in_process_measured = None if in_process is None else measure(in_process, pacing="free")
    problems = _problems("served", served) + _problems("in process", in_process)
    headline = served_measured or in_process_measured
    if headline is None:
        raise ValueError("expected a run")
    return Report(
        schema=SCHEMA,
        verdict=verdict(headline, complete=not problems),
        complete=not problems,
        problems=problems,
        provenance=provenance,
        workload=workload,
        served=served_measured,
        in_process=in_process_measured,
        served_over_in_process=ratio(served_measured, in_process_measured),
    )


def measure(run: Run, *, pacing: str) -> Measured:
    """Reduce one run."""
    sessions = [session.chunks for session in run.sessions]
    example = next(session for session in run.sessions if session.chunks)
    windows = [_window(sessions, after_chunk) for after_chunk in WINDOWS]
    rates = sorted({*VIEWER_FPS, example.fps})
    return Measured(
        fps=example.fps,
        width=example.width,
        height=example.height,
        num_chunks=sum(len(chunks) for chunks in sessions),
        capacity_sessions=run.capacity_sessions,
        kv_bytes_per_session=run.kv_bytes_per_session,
        load_s=run.load_s,
        first_chunk_ms=summarize(
            [
                1000 * (session.chunks[0].arrived_s - session.began_s)
                for session in run.sessions
                if session.chunks and session.chunks[0].chunk_index == 0
            ]
        ),
        headline_after_chunk=max(
            (window.after_chunk for window in windows if _count(window) >= MIN_INTERVALS), default=0
        ),
        windows=windows,
        viewers=[_viewer(sessions, fps) for fps in rates],
        events=_events(run.sessions, pacing=pacing),
        memory=_memory(run),
        sessions=run.sessions,
    )


def _count(window: Window) -> int:
    return 0 if window.interval_ms is None else window.interval_ms.count


def _window(sessions: Sequence[Sequence[ChunkSample]], after_chunk: int) -> Window:
    counted = [chunk for chunks in sessions for chunk in steady(chunks, after_chunk)]
    rate = media_fps(sessions, after_chunk)
    num_counted_sessions = sum(bool(intervals_ms(chunks, after_chunk)) for chunks in sessions)
    return Window(
        after_chunk=after_chunk,
        interval_ms=summarize([each for chunks in sessions for each in intervals_ms(chunks, after_chunk)]),
        media_fps=rate,
        total_media_fps=None if rate is None else rate * num_counted_sessions,
        realtime_factor={} if rate is None else {str(fps): realtime_factor(rate, fps) for fps in VIEWER_FPS},
        stages_ms=_stages(counted),
        bytes_per_chunk=median([chunk.num_bytes for chunk in counted]) if counted else None,
    )


def _stages(chunks: Sequence[ChunkSample]) -> dict[str, float]:
    times_ms = {stage: [chunk.timings_ms[stage] for chunk in chunks if stage in chunk.timings_ms] for stage in STAGES}
    return {stage: median(values) for stage, values in times_ms.items() if values}


def _viewer(sessions: Sequence[Sequence[ChunkSample]], fps: int) -> Viewer:
    viewings = [view(chunks, fps) for chunks in sessions if chunks]
    return Viewer(
        fps=fps,
        deadline_attainment=deadline_attainment(viewings),
        stall_share=stall_share(viewings),
        longest_stall_ms=max((1000 * stall_s for each in viewings for stall_s in each.stalls_s), default=None),
    )


def _memory(run: Run) -> Memory:
    def most(values: Sequence[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return Memory(
        server_bytes=most([sample.server_bytes for sample in run.memory]),
        worker_bytes=most([sample.worker_bytes for sample in run.memory]),
        device_bytes=most([sample.device_bytes for sample in run.memory]),
    )


# ---------------------------------------------------------------- events


def _events(sessions: Sequence[SessionSamples], *, pacing: str) -> Events:
    applied = [pair for session in sessions for pair in _applied(session, pacing=pacing)]
    return Events(
        num_applied=len(applied),
        num_open=sum(event.chunk_index is None for session in sessions for event in session.events),
        num_refused=sum(session.num_refused_events for session in sessions),
        wait_ms=summarize([each.wait_ms for each in applied if each.wait_ms is not None]),
        to_chunk_ms=summarize([each.to_chunk_ms for each in applied]),
        to_frame_ms=summarize([each.to_frame_ms for each in applied]),
        chunks_later=summarize([float(each.chunks_later) for each in applied]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AppliedEvent:
    wait_ms: float | None
    to_chunk_ms: float
    to_frame_ms: float
    chunks_later: int


def _applied(session: SessionSamples, *, pacing: str) -> list[_AppliedEvent]:
    """Follow each event of a session to its chunk; the chunks are those of one run, from 0."""
    viewing = view(session.chunks, session.fps) if session.chunks else None
    return [
        _follow(event, session, viewing, pacing=pacing)
        for event in session.events
        if event.chunk_index is not None and viewing is not None
    ]


def _follow(event: EventSample, session: SessionSamples, viewing: Viewing, *, pacing: str) -> _AppliedEvent:
    assert event.chunk_index is not None
    chunk = session.chunks[event.chunk_index]
    shown_s = chunk.arrived_s if pacing == "free" else viewing.shown_s[event.chunk_index]
    frame = first_media_frame(
        event.latent_frame or 0,
        num_media_frames=chunk.num_frames,
        num_latent_frames=session.latent_frames_per_chunk,
        is_first_chunk=chunk.chunk_index == 0,
    )
    last_here = sum(each.arrived_s <= event.sent_s for each in session.chunks) - 1
    return _AppliedEvent(
        wait_ms=event.wait_ms,
        to_chunk_ms=1000 * (chunk.arrived_s - event.sent_s),
        to_frame_ms=1000 * (shown_s + frame / session.fps - event.sent_s),
        chunks_later=event.chunk_index - last_here,
    )


# ---------------------------------------------------------------- words


def _problems(name: str, run: Run | None) -> list[str]:
    return [] if run is None else sorted({f"{name}: {each.ended}" for each in run.sessions if each.ended})


def ratio(served: Measured | None, in_process: Measured | None) -> float | None:
    """Divide the median intervals of the latest window that both runs have at least 3 intervals of; None without."""
    if served is None or in_process is None:
        return None
    for ours, theirs in zip(reversed(served.windows), reversed(in_process.windows), strict=True):
        if ours.interval_ms and theirs.interval_ms and min(_count(ours), _count(theirs)) >= MIN_INTERVALS:
            return ours.interval_ms.median / theirs.interval_ms.median
    return None


def verdict(measured: Measured, *, complete: bool) -> str:
    """Say in one line what the run means."""
    window = measured.headline
    partial = "" if complete else "PARTIAL: "
    if window.interval_ms is None or window.media_fps is None:
        return f"{partial}No second chunk came, so there is no rate to speak of"
    factors = {fps: factor for fps, factor in window.realtime_factor.items() if factor >= 1}
    if factors:
        fastest = max(factors, key=int)
        head = f"Real time at {fastest} fps ({factors[fastest]:.2f}x)"
    else:
        slowest = str(min(VIEWER_FPS))
        head = f"{window.realtime_factor[slowest]:.2f}x real time at {slowest} fps"
    num_sessions = sum(bool(session.chunks) for session in measured.sessions)
    each = " each" if num_sessions > 1 else ""
    text = f"{partial}{head}: {window.media_fps:.1f} frames a second{each}, a chunk every "
    text += f"{window.interval_ms.median:.0f} ms (p95 {window.interval_ms.p95:.0f})"
    return text + (f", {num_sessions} sessions" if num_sessions > 1 else "")


def to_json(report: Report) -> bytes:
    """Write a report, indented; numbers are not rounded."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    schema = msgspec.json.schema(Report)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **schema}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))
