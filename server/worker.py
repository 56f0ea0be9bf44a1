"""What the server knows of a worker: its state, its requests, and a chunk that it has committed.

`server/worker_client.py` runs the real one; tests have others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from worldmodel.messages import (
    ChunkMedia,
    CloseSession,
    LoadProgress,
    MemoryStats,
    ModelInfo,
    OpenSession,
    ResetSession,
    SessionClosed,
    SessionOpened,
    SessionReset,
    Tick,
    TickCommitted,
)


class WorkerStatus(StrEnum):
    """Life of a worker as `/readyz` and the session table see it. FAILED and STOPPED are final."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedTick:
    """A chunk that is committed in the worker. The next tick may be sent before `media` is done.

    `media` fails with `OutcomeUnknown` if the pixels are lost, `WorkerUnavailable` if the worker dies. Nobody has to
    await it.
    """

    committed: TickCommitted
    media: asyncio.Future[tuple[ChunkMedia, memoryview]]


class Worker(Protocol):
    """One model in one process, supervised. Requests run one at a time, in the order of the calls.

    Every request raises `RequestRefused` (nothing was touched), `TickRolledBack` (nothing is left of it),
    `OutcomeUnknown` (release the session) or `WorkerUnavailable` (all sessions of this `generation` are gone).
    Cancelling a call does not cancel the work in the worker; its answer is then dropped.
    """

    @property
    def status(self) -> WorkerStatus: ...

    @property
    def info(self) -> ModelInfo | None:
        """The model, once a process was ready; kept while a later process loads."""
        ...

    @property
    def memory(self) -> MemoryStats | None:
        """The latest accounting the current process sent."""
        ...

    @property
    def progress(self) -> LoadProgress | None: ...

    @property
    def generation(self) -> int:
        """Number of processes spawned so far. Sessions live within one generation."""
        ...

    @property
    def failure(self) -> str | None:
        """Why there is no ready worker, fit for clients; None while all is well."""
        ...

    async def start(self) -> None:
        """Spawn the process and return; loading goes on in the background."""
        ...

    async def stop(self) -> None:
        """Ask, then terminate, then kill. When it returns no process is left. May be called twice."""
        ...

    async def wait_ready(self) -> None:
        """Wait until the model is ready. Raises `LoadFailed` if it never will be."""
        ...

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened: ...

    async def reset_session(self, message: ResetSession, image: bytes | None) -> SessionReset: ...

    async def close_session(self, message: CloseSession) -> SessionClosed: ...

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        """Compute one chunk. `payload` holds the bytes of `message.arrays`, unchanged until the answer."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` in the event loop whenever status or progress changed; returns the unsubscriber."""
        ...
