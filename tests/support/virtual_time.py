"""An event loop whose clock jumps to the next timer whenever nothing is left to do.

Hours of a server's life pass in seconds and every run is the same, because nothing waits for the real clock and
nothing runs in threads. A loop that has neither work nor timers would wait for ever, and one that always has work while
no time passes would never end; both are errors here, which say what was pending.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

START_S = 1000.0

ASYNCIO_FOLDER = str(Path(asyncio.__file__).parent)

MAX_TURNS_AT_ONCE = 100_000
"""Turns of the loop without time passing, seconds of the real clock; tests that work take some thousands."""

MAX_TURNS = 5_000_000
"""Turns of one test, minutes of the real clock."""


class Wedged(BaseException):
    """Nothing is left that could ever happen, or it takes far too long, and yet somebody waits."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs "threads" inline and never sleeps."""

    def __init__(self) -> None:
        self.now = START_S
        self.limit = math.inf
        self.max_turns: float = MAX_TURNS
        self._num_turns = self._num_turns_now = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """Count one turn. Raises `Wedged` if they are too many; as many may follow, to take down what is pending."""
        self._num_turns += 1
        self._num_turns_now += 1
        if self._num_turns_now > MAX_TURNS_AT_ONCE:
            self._num_turns_now = 0
            raise self.wedged(f"{MAX_TURNS_AT_ONCE} turns of the event loop, and no time passes")
        if self._num_turns > self.max_turns:
            self._num_turns -= MAX_TURNS_AT_ONCE
            raise self.wedged(f"the event loop has taken {self.max_turns:g} turns")

    def jump(self, seconds: float) -> None:
        """Let time pass. Raises `Wedged` if that of the test is over."""
        self.now += seconds
        self._num_turns_now = 0
        if self.now > self.limit:
            raise self.wedged("the time of the test is over")

    def wedged(self, reason: str) -> Wedged:
        return Wedged("; pending: ".join([reason, *sorted(_where(task) for task in asyncio.all_tasks(self))]))

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
        self._loop.turn()
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise self._loop.wedged("the event loop has no work and no timer left")
        self._loop.jump(timeout)
        return []


def _where(task: asyncio.Task[Any]) -> str:
    """Say what a task runs and in which line it stands, the innermost that is not asyncio's own."""
    coroutine: Any = task.get_coro()
    text = name = coroutine.__qualname__
    while inspect.iscoroutine(coroutine):
        frame = coroutine.cr_frame
        if frame is not None and not frame.f_code.co_filename.startswith(ASYNCIO_FOLDER):
            text = f"{name} at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return text


def run_virtual(
    main: Coroutine[Any, Any, ResultT], *, limit_s: float = 3600.0, max_turns: float = MAX_TURNS
) -> ResultT:
    """Run a coroutine to its end in virtual time, of which it may take `limit_s`, and `max_turns` turns of the loop."""
    with asyncio.Runner(loop_factory=VirtualLoop, debug=False) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.limit = START_S + limit_s
        loop.max_turns = max_turns
        return runner.run(main)


def now() -> float:
    """Return the virtual time; fit as a `Clock`."""
    return asyncio.get_running_loop().time()


async def settle(num_turns: int = 60) -> None:
    """Let everything happen that can happen without time passing."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
