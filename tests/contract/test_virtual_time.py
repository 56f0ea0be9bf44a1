"""The event loop of the simulated tests: broken code makes a test fail and say where it hangs, not run for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support import virtual_time
from tests.support.virtual_time import Wedged, now, run_virtual


async def wait_for_nobody() -> None:
    await asyncio.get_running_loop().create_future()


async def spin() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def tick() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("hang", "reason"),
    [
        (wait_for_nobody, "no work and no timer left"),
        (spin, "500 turns of the event loop, and no time passes"),
        (tick, "the time of the test is over"),
    ],
)
def test_what_hangs_is_an_error_that_names_the_line(
    hang: Callable[[], Awaitable[None]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_time, "MAX_TURNS_AT_ONCE", 500)
    is_taken_down = False

    async def main() -> None:
        nonlocal is_taken_down
        beside = asyncio.create_task(wait_for_nobody())
        try:
            await hang()
        finally:
            is_taken_down = True
            beside.cancel()

    with pytest.raises(Wedged, match=rf"{reason}; pending: .*main at test_virtual_time\.py:\d+.*wait_for_nobody at"):
        run_virtual(main(), limit_s=100)
    assert is_taken_down


def test_all_turns_together_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "MAX_TURNS_AT_ONCE", 500)
    with pytest.raises(Wedged, match=r"has taken 2000 turns; pending: tick at test_virtual_time\.py"):
        run_virtual(tick(), limit_s=1e9, max_turns=2000)


def test_a_test_that_works_may_take_many_turns_in_many_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "MAX_TURNS_AT_ONCE", 500)

    async def main() -> float:
        begin = now()
        for _ in range(5):
            for _ in range(400):
                await asyncio.sleep(0)
            await asyncio.sleep(1)
        return now() - begin

    assert run_virtual(main()) == 5
