"""The one source of time of the server: a callable, so that tests pass their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

Clock = Callable[[], float]
"""Seconds from an arbitrary start; never goes back."""

monotonic: Clock = time.monotonic


async def wait_until(event: asyncio.Event, *, until: float | None, clock: Clock) -> None:
    """Return when `event` is set or the clock reaches `until` (None: never)."""
    if until is None:
        await event.wait()
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, until - clock())):
            await event.wait()
