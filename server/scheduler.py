"""Which session of a worker ticks next: one tick outstanding, nearest playback deadline first, nobody starves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.clock import Clock, wait_until
from server.logs import about
from worldmodel.messages import SessionId

MAX_PASSED_OVER = 4
"""How often a runnable session may see others go first. Among n sessions it waits at most this many ticks + n - 1."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A runnable session. `deadline` is when its viewer runs dry; `num_passed_over` ticks went to others meanwhile."""

    session_id: SessionId
    deadline: float
    num_passed_over: int


def choose(candidates: Sequence[Candidate], *, max_passed_over: int = MAX_PASSED_OVER) -> Candidate | None:
    """Return who ticks next, None if nobody can.

    Whoever was passed over `max_passed_over` times goes first (the longest-waiting of them), else the nearest deadline;
    equal deadlines go to the longest-waiting, then by id.
    """
    if not candidates:
        return None
    starving = [candidate for candidate in candidates if candidate.num_passed_over >= max_passed_over]
    if starving:
        return min(starving, key=lambda it: (-it.num_passed_over, it.deadline, it.session_id))
    return min(candidates, key=lambda it: (it.deadline, -it.num_passed_over, it.session_id))


class Ticker(Protocol):
    """What the scheduler needs of a session."""

    @property
    def session_id(self) -> SessionId: ...

    def opens_at(self, now: float) -> float | None:
        """Return when the next tick may start, None if that depends on someone."""
        ...

    def deadline(self) -> float: ...

    async def run_tick(self) -> None:
        """Run one tick up to its commit. Handles its own failures."""
        ...

    def tick_broke(self, error: Exception) -> None:
        """Fail the session because `run_tick` raised, which is a bug of ours."""
        ...


class Scheduler:
    """Runs the ticks of all sessions of one worker, one after the other, in a task of its own.

    No client's task ever runs a tick, so a lost socket can't cancel a commit.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tickers: dict[SessionId, Ticker] = {}
        self._num_passed_over: dict[SessionId, int] = {}
        self._changed = asyncio.Event()

    def add(self, ticker: Ticker) -> None:
        self._tickers[ticker.session_id] = ticker
        self.wake()

    def remove(self, session_id: SessionId) -> None:
        """Forget a session. Its tick in flight, if any, still ends by itself."""
        self._tickers.pop(session_id, None)
        self._num_passed_over.pop(session_id, None)

    def wake(self) -> None:
        """Look again: something that `opens_at` depends on has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Run ticks until cancelled."""
        while True:
            self._changed.clear()
            ticker, wake_at = self._pick()
            if ticker is None:
                await wait_until(self._changed, until=wake_at, clock=self._clock)
                continue
            try:
                await ticker.run_tick()
            except Exception as error:
                # The boundary of all ticks: a bug in one session must not stop the others.
                log.exception("tick of session %s broke", ticker.session_id, extra=about(session_id=ticker.session_id))
                ticker.tick_broke(error)
                # A session that is still runnable after that would spin here without ever yielding.
                await asyncio.sleep(0)

    def _pick(self) -> tuple[Ticker | None, float | None]:
        """Return who ticks now, or nobody and the time to look again (None: when woken)."""
        now = self._clock()
        candidates: list[Candidate] = []
        wake_at: float | None = None
        for session_id, ticker in self._tickers.items():
            opens_at = ticker.opens_at(now)
            if opens_at is None:
                self._num_passed_over.pop(session_id, None)
            elif opens_at > now:
                self._num_passed_over.pop(session_id, None)
                wake_at = opens_at if wake_at is None else min(wake_at, opens_at)
            else:
                passed_over = self._num_passed_over.get(session_id, 0)
                candidates.append(
                    Candidate(session_id=session_id, deadline=ticker.deadline(), num_passed_over=passed_over)
                )
        chosen = choose(candidates)
        if chosen is None:
            return None, wake_at
        for candidate in candidates:
            self._num_passed_over[candidate.session_id] = candidate.num_passed_over + 1
        self._num_passed_over[chosen.session_id] = 0
        return self._tickers[chosen.session_id], None
