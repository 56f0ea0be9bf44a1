"""What a benchmark saw, before any arithmetic: when each chunk came and what became of each event.

Written by the driver of a served run, and by `worldmodel/tools/bench_inprocess.py` in the same JSON form. All times are
seconds on one monotonic clock of the process that measured; only differences mean something.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STAGES = ("queue", "denoise", "commit", "decode", "transfer", "encode")
"""Stages of a chunk, in the order in which it passes them. A run without a server has no `queue` and no `encode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSample:
    """One media chunk. `arrived_s`: when all of its bytes were here. `timings_ms`: by stage, as the header says."""

    chunk_index: int
    arrived_s: float
    num_frames: int
    num_bytes: int
    timings_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSample:
    """One event that was accepted. The last three fields are null for one that no counted chunk applied.

    `wait_ms`: from its acceptance to the start of its chunk, by the server's clock. `latent_frame`: of that chunk, from
    0.
    """

    event_id: int
    sent_s: float
    chunk_index: int | None = None
    latent_frame: int | None = None
    wait_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSamples:
    """One session, from the moment before it connected. `ended`: why it has fewer chunks than were asked for.

    `fps` and `latent_frames_per_chunk` are those of the model; `width` and `height` in pixels. `num_refused_events`
    counts events that the server did not take.
    """

    began_s: float
    started_s: float | None = None
    fps: int = 0
    width: int = 0
    height: int = 0
    latent_frames_per_chunk: int = 0
    chunks: list[ChunkSample] = field(default_factory=list)
    events: list[EventSample] = field(default_factory=list)
    num_refused_events: int = 0
    ended: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory at one moment, in bytes; null where nobody could tell."""

    at_s: float
    server_bytes: int | None = None
    worker_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything one way of running gave. `model` and `versions` are what the server, or the loaded model, says.

    `capacity_sessions`: places in the worker. `load_s`: from the start of the process to a model that is ready, where
    that was seen.
    """

    sessions: list[SessionSamples]
    memory: list[MemorySample] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    capacity_sessions: int | None = None
    kv_bytes_per_session: int | None = None
    load_s: float | None = None
    server_version: str | None = None
