"""One session's turns with the worker: its ticks, and between them one other operation at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from server.metrics import Metrics
from server.worker import CommittedTick, Worker
from worldmodel.errors import WorldModelError
from worldmodel.messages import Tick


class TickGate:
    """Keeps resets, closes and openings of a session out of its ticks and of each other."""

    def __init__(self) -> None:
        self._between_ticks = asyncio.Event()
        self._between_ticks.set()
        self._one_at_a_time = asyncio.Lock()

    @contextmanager
    def tick(self) -> Iterator[None]:
        """Have operations wait; the scheduler runs one tick at a time."""
        self._between_ticks.clear()
        try:
            yield
        finally:
            self._between_ticks.set()

    @asynccontextmanager
    async def operation(self) -> AsyncIterator[None]:
        """Wait for the operation before, and for the tick under way."""
        async with self._one_at_a_time:
            await self._between_ticks.wait()
            yield


async def run_attempts(
    worker: Worker,
    metrics: Metrics,
    tick: Tick,
    payload: Sequence[memoryview] = (),
    *,
    failed: Callable[[Tick, WorldModelError], Tick | None],
    committed: Callable[[Tick, CommittedTick], None],
) -> None:
    """Run a tick until it is committed or `failed` returns nothing to try instead."""
    attempt: Tick | None = tick
    while attempt is not None:
        tick = attempt
        try:
            answered = await worker.tick(tick, payload)
        except WorldModelError as error:
            metrics.ticks_failed.labels(error.code).inc()
            attempt = failed(tick, error)
        else:
            committed(tick, answered)
            return
