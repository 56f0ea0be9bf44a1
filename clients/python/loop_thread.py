"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from clients.python.errors import SessionLost

T = TypeVar("T")


class LoopThread:
    """A thread that runs coroutines until `stop`."""

    def __init__(self, name: str) -> None:
        self._begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name, daemon=True)
        self._thread.start()
        self._loop, self._stop = self._begun.result()

    async def _main(self) -> None:
        stop = asyncio.Event()
        self._begun.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for what comes of it; who stops waiting cancels it.

        Raises `SessionLost` after `stop`.
        """
        if not self.is_running:
            coroutine.close()
            raise SessionLost("the connection was closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and the thread. Stopping twice is fine."""
        if self.is_running:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
