"""Who ticks next, decided without time or tasks; and the loop around it with sessions that only count."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler import MAX_PASSED_OVER, Candidate, Scheduler, choose
from worldmodel.messages import SessionId


def candidate(name: str, deadline: float, num_passed_over: int = 0) -> Candidate:
    return Candidate(session_id=SessionId(name), deadline=deadline, num_passed_over=num_passed_over)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([], None),
        ([candidate("a", 5.0)], "a"),
        ([candidate("a", 5.0), candidate("b", 4.0)], "b"),
        ([candidate("a", 5.0), candidate("b", float("inf"))], "a"),
        ([candidate("a", 4.0, 1), candidate("b", 4.0, 2)], "b"),
        ([candidate("b", 4.0), candidate("a", 4.0)], "a"),
        ([candidate("a", 1.0), candidate("b", 9.0, MAX_PASSED_OVER)], "b"),
        ([candidate("a", 1.0), candidate("b", 2.0, MAX_PASSED_OVER), candidate("c", 9.0, MAX_PASSED_OVER + 1)], "c"),
    ],
)
def test_the_nearest_deadline_goes_first_unless_somebody_starves(
    candidates: list[Candidate], chosen: str | None
) -> None:
    result = choose(candidates)
    assert (None if result is None else result.session_id) == chosen


@given(deadlines=st.lists(st.floats(0, 1e6), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_nobody_waits_longer_than_the_bound(deadlines: list[float]) -> None:
    """Deadlines never move, which is the worst case: the nearest always wants to go first."""
    passed_over = dict.fromkeys(range(len(deadlines)), 0)
    longest = 0
    for _ in range(100):
        chosen = choose([candidate(str(index), deadlines[index], passed_over[index]) for index in passed_over])
        assert chosen is not None
        for index in passed_over:
            passed_over[index] += 1
        passed_over[int(chosen.session_id)] = 0
        longest = max(longest, *passed_over.values())
    assert longest <= MAX_PASSED_OVER + len(deadlines) - 1


class CountingTicker:
    """A session that is runnable for a number of ticks."""

    def __init__(
        self, name: str, num_ticks: int, log: list[str], *, opens_at: float = 0.0, broken: bool = False
    ) -> None:
        self.session_id = SessionId(name)
        self.left = num_ticks
        self.errors: list[Exception] = []
        self.done = asyncio.Event()
        self._log = log
        self._opens_at = opens_at
        self._broken = broken

    def opens_at(self, now: float) -> float | None:
        return max(now, self._opens_at) if self.left else None

    def deadline(self) -> float:
        return 0.0

    async def run_tick(self) -> None:
        self.left -= 1
        self._log.append(self.session_id)
        await asyncio.sleep(0)
        if not self.left:
            self.done.set()
        if self._broken:
            raise RuntimeError("bug")

    def tick_broke(self, error: Exception) -> None:
        self.errors.append(error)


async def run_until_idle(scheduler: Scheduler, tickers: list[CountingTicker]) -> None:
    task = asyncio.create_task(scheduler.run())
    async with asyncio.timeout(10):
        for ticker in tickers:
            await ticker.done.wait()
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_sessions_take_turns() -> None:
    log: list[str] = []
    scheduler = Scheduler(lambda: 0.0)
    tickers = [CountingTicker("a", 3, log), CountingTicker("b", 3, log)]
    for ticker in tickers:
        scheduler.add(ticker)
    await run_until_idle(scheduler, tickers)
    assert log == ["a", "b", "a", "b", "a", "b"]


async def test_a_bug_in_one_session_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    scheduler = Scheduler(lambda: 0.0)
    broken, sound = CountingTicker("a", 1, log, broken=True), CountingTicker("b", 2, log)
    scheduler.add(broken)
    scheduler.add(sound)
    await run_until_idle(scheduler, [broken, sound])
    assert log.count("b") == 2
    assert [str(error) for error in broken.errors] == ["bug"]
    assert "tick of session a broke" in caplog.text


async def test_an_idle_scheduler_starts_when_woken_and_forgets_removed_sessions() -> None:
    log: list[str] = []
    scheduler = Scheduler(lambda: 0.0)
    ticker, gone = CountingTicker("a", 0, log), CountingTicker("b", 0, log)
    scheduler.add(ticker)
    scheduler.add(gone)
    task = asyncio.create_task(scheduler.run())
    for _ in range(3):
        await asyncio.sleep(0)
    scheduler.remove(gone.session_id)
    ticker.left = gone.left = 1
    scheduler.wake()
    async with asyncio.timeout(10):
        await ticker.done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert log == ["a"]


async def test_a_session_that_opens_later_is_looked_at_then() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    log: list[str] = []
    scheduler = Scheduler(clock)
    ticker = CountingTicker("a", 1, log, opens_at=2.0)
    scheduler.add(ticker)
    await run_until_idle(scheduler, [ticker])
    assert log == ["a"]
    assert now >= 2.0
