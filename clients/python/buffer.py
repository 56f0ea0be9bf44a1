"""Chunks between the reader and whoever takes them, and the viewer that tells when they are shown. No I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from clients.python.chunk import Chunk

MOST_OF_LIMIT = 4
"""Chunks that are kept at most, in limits; then the socket is read no further."""


class ChunkBuffer:
    """Chunks that arrived and were not taken yet, then perhaps an end or an error.

    From `limit` chunks on it is full, and whoever fills it asks the server to pause until it is half empty. What is on
    its way then still finds room: `room` waits only while `MOST_OF_LIMIT` times as many lie here, for servers that do
    not pause. While someone awaits an answer that bound is off, because the answer comes behind the chunks.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_buffered_chunks: expected at least 1, got {limit}")
        self._limit = limit
        self._items: deque[Chunk | Exception] = deque()
        self._num_awaiting = 0
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, item: Chunk | Exception) -> None:
        self._items.append(item)
        self._wake()

    def end(self) -> None:
        """Let `take` return None once everything before it is taken."""
        self._ended = True
        self._wake()

    async def take(self) -> Chunk | None:
        """Return the next chunk, or None at the end; raises an error that was put."""
        while not self._items:
            if self._ended:
                return None
            await self._next_change()
        item = self._items.popleft()
        self._wake()
        if isinstance(item, Exception):
            raise item
        return item

    async def full(self) -> None:
        """Wait until so many chunks lie here that no more should be made."""
        while len(self._items) < self._limit:
            await self._next_change()

    async def half_empty(self) -> None:
        while len(self._items) > self._limit // 2:
            await self._next_change()

    async def room(self) -> None:
        while len(self._items) >= MOST_OF_LIMIT * self._limit and not self._num_awaiting:
            await self._next_change()

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Turn the bound off for as long as the caller awaits an answer."""
        self._num_awaiting += 1
        self._wake()
        try:
            yield
        finally:
            self._num_awaiting -= 1

    def waiting_s(self) -> float:
        """Return how many seconds of video lie here."""
        return sum(item.duration_s for item in self._items if isinstance(item, Chunk))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()


class VirtualViewer:
    """A viewer who shows each chunk for its duration, and waits for chunks that come late. Seconds of any clock."""

    def __init__(self) -> None:
        self._free_s = float("-inf")

    def show(self, now_s: float, duration_s: float) -> float:
        """Take a chunk and return when its first frame is shown."""
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + duration_s
        return start_s

    def left_s(self, now_s: float) -> float:
        """Return how much of the chunks taken is not shown yet."""
        return max(0.0, self._free_s - now_s)
