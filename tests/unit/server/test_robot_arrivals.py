"""Steps of one session are queued as they came, however long each takes to be read."""

from __future__ import annotations

import asyncio

import pytest

from server.robot_arrivals import MAX_WAIT_S, Arrivals
from tests.support.virtual_time import now, run_virtual


async def step(arrivals: Arrivals, name: str, read_s: float, queued: list[str], *, fails: bool = False) -> None:
    async with arrivals.arrival() as wait_for_earlier:
        await asyncio.sleep(read_s)
        if fails:
            raise ValueError(name)
        await wait_for_earlier()
        queued.append(name)


def test_a_small_step_waits_for_the_large_one_before_it() -> None:
    async def scenario() -> None:
        queued: list[str] = []
        arrivals = Arrivals()
        await asyncio.gather(
            step(arrivals, "large", 3, queued), step(arrivals, "small", 0, queued), step(arrivals, "third", 1, queued)
        )
        assert queued == ["large", "small", "third"]
        await step(arrivals, "alone", 0, queued)
        assert queued[-1] == "alone"

    run_virtual(scenario())


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_step_that_is_not_queued_holds_nobody_and_lets_nobody_overtake(how: str) -> None:
    async def scenario() -> None:
        queued: list[str] = []
        arrivals = Arrivals()
        first = asyncio.create_task(step(arrivals, "first", 3, queued))
        broken = asyncio.create_task(step(arrivals, "broken", 1, queued, fails=how == "fails"))
        last = asyncio.create_task(step(arrivals, "last", 0, queued))
        await asyncio.sleep(0.5)
        if how == "is cancelled":
            broken.cancel()
        await asyncio.wait([first, broken, last])
        assert queued == ["first", "last"]
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await broken

    run_virtual(scenario())


def test_nobody_waits_long_for_a_step_that_does_not_come() -> None:
    async def scenario() -> None:
        queued: list[str] = []
        arrivals = Arrivals()
        lost = asyncio.create_task(step(arrivals, "lost", 1000, queued))
        await asyncio.sleep(0)
        started_s = now()
        await step(arrivals, "again", 0, queued)
        assert (queued, now() - started_s) == (["again"], MAX_WAIT_S)
        lost.cancel()

    run_virtual(scenario())
