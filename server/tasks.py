"""Background tasks that somebody owns: kept by reference, their bugs logged, cancelled together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from server.errors import ServerError

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class TaskSet:
    """Own tasks until they end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start a task. An exception that nobody awaits is logged, not lost."""
        task = asyncio.get_running_loop().create_task(coroutine, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Ask all tasks to stop."""
        for task in self._tasks:
            task.cancel()

    async def join(self) -> None:
        """Wait until all tasks have ended, however they end."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def finish(self, *, within_s: float) -> int:
        """Wait until all tasks have ended, cancelling those that take longer. Returns how many these were."""
        tasks = tuple(self._tasks)
        if not tasks:
            return 0
        _, late = await asyncio.wait(tasks, timeout=within_s)
        self.cancel()
        await self.join()
        return len(late)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ServerError):
            log.debug("task %s ended with %s: %s", task.get_name(), error.code, error.message)
        else:
            log.error("task %s broke", task.get_name(), exc_info=error)
