"""An event loop whose clock jumps to the next timer whenever nothing is left to do.

Hours of a server's life pass in seconds and every run is the same, because nothing waits for the real clock and
nothing runs in threads. A loop that has neither work nor timers would wait for ever; that is an error here.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

START_S = 1000.0


class Wedged(BaseException):
    """Nothing is left that could ever happen, or it takes far too long, and yet somebody waits."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs "threads" inline and never sleeps."""

    def __init__(self) -> None:
        self.now = START_S
        self.limit = math.inf
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., ResultT], *args: Any
    ) -> asyncio.Future[ResultT]:
        future: asyncio.Future[ResultT] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Wedged("the event loop has no work and no timer left")
        self._loop.now += timeout
        if self._loop.now > self._loop.limit:
            raise Wedged("the time of the test is over")
        return []


def run_virtual(main: Coroutine[Any, Any, ResultT], *, limit_s: float = 3600.0) -> ResultT:
    """Run a coroutine to its end in virtual time, of which it may take `limit_s`."""
    with asyncio.Runner(loop_factory=VirtualLoop, debug=False) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.limit = START_S + limit_s
        return runner.run(main)


def now() -> float:
    """Return the virtual time; fit as a `Clock`."""
    return asyncio.get_running_loop().time()


async def settle(num_turns: int = 60) -> None:
    """Let everything happen that can happen without time passing."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
