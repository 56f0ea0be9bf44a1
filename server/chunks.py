"""Chunks on their way from the worker to a client: committed, ready, and kept for a socket that comes back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from worldmodel.messages import RequestId, StageTimings

EncodedT = TypeVar("EncodedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReceipt:
    """How an event was applied. `wait_ms` is from acceptance to the start of the chunk."""

    event_id: int
    latent_frame: int
    wait_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedChunk:
    """A chunk that is part of the session's history. `queue_ms` is from runnable to sent to the worker."""

    run: int
    chunk_index: int
    request_id: RequestId
    applied: tuple[EventReceipt, ...]
    num_media_frames: int
    pose: tuple[float, ...] | None
    timings: StageTimings
    queue_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyChunk(Generic[EncodedT]):
    """A committed chunk with its media, ready to be sent in any epoch."""

    chunk: CommittedChunk
    encoded: EncodedT
    transfer_ms: float
    encode_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend(Generic[EncodedT]):
    """What a new socket gets: `chunks` to send again, and how many before them are gone."""

    chunks: tuple[ReadyChunk[EncodedT], ...]
    num_lost_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a client wants to go on; `run` None means the run it was last sent."""

    last_chunk_index: int
    run: int | None


class KeptChunks(Generic[EncodedT]):
    """The last ready chunks of a run, at most `max_chunks`."""

    def __init__(self, max_chunks: int) -> None:
        self._chunks: deque[ReadyChunk[EncodedT]] = deque(maxlen=max_chunks)

    def add(self, ready: ReadyChunk[EncodedT]) -> None:
        """Keep the next chunk of the run."""
        self._chunks.append(ready)

    def clear(self) -> None:
        self._chunks.clear()

    def after(self, last_chunk_index: int) -> Resend[EncodedT]:
        """Return what a client gets that has everything up to a chunk."""
        chunks = tuple(ready for ready in self._chunks if ready.chunk.chunk_index > last_chunk_index)
        first = chunks[0].chunk.chunk_index if chunks else self._first_unready()
        return Resend(chunks=chunks, num_lost_chunks=max(0, first - (last_chunk_index + 1)))

    def _first_unready(self) -> int:
        """Index of the first committed chunk whose media isn't ready yet, or of the next chunk."""
        return self._chunks[-1].chunk.chunk_index + 1 if self._chunks else 0
