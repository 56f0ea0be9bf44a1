"""The order in which one session's steps came over REST, kept while their bodies are received and read.

Every request is read on its own: a large one takes longer to come and is read in a thread. Without this file a small
step would overtake it, and the large one would be stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

MAX_WAIT_S = 5.0
"""How long a step that was read waits for those before it. One that takes longer has likely lost its connection, and
its client, which asks again over another one, must not wait for it."""


class Arrivals:
    """Steps that have come and are not queued yet."""

    def __init__(self) -> None:
        self._unread: list[asyncio.Event] = []

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    @asynccontextmanager
    async def arrival(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Take a place in the order for as long as this lasts; yields what waits for all that came before."""
        before, done = tuple(self._unread), asyncio.Event()
        self._unread.append(done)

        async def wait() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT_S):
                    for earlier in before:
                        await earlier.wait()

        try:
            yield wait
        finally:
            self._unread.remove(done)
            done.set()
