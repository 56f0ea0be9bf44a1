"""A session's turns with the worker: ticks, operations between them, and attempts."""

from __future__ import annotations

import asyncio

import pytest

from server.metrics import Metrics
from server.ticking import TickGate, run_attempts
from server.worker import CommittedTick
from tests.support.server_worker import ScriptedWorker
from worldmodel.errors import TickRolledBack, WorldModelError
from worldmodel.messages import RequestId, SessionId, Tick


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_operations_wait_for_the_tick_and_for_each_other() -> None:
    gate, story = TickGate(), list[str]()
    tick_ends, first_ends = asyncio.Event(), asyncio.Event()

    async def tick() -> None:
        with gate.tick():
            story.append("tick")
            await tick_ends.wait()

    async def operate(name: str, ends: asyncio.Event | None = None) -> None:
        async with gate.operation():
            story.append(name)
            if ends is not None:
                await ends.wait()

    tasks = [asyncio.create_task(it) for it in (tick(), operate("reset", first_ends), operate("close"))]
    await settle()
    assert story == ["tick"]
    tick_ends.set()
    await settle()
    assert story == ["tick", "reset"]
    first_ends.set()
    await asyncio.gather(*tasks)
    assert story == ["tick", "reset", "close"]


async def test_a_tick_or_an_operation_that_breaks_keeps_nobody_waiting() -> None:
    gate = TickGate()
    with pytest.raises(KeyError), gate.tick():
        raise KeyError
    with pytest.raises(KeyError):
        async with gate.operation():
            raise KeyError
    async with asyncio.timeout(5), gate.operation():
        pass


class RollingBack(ScriptedWorker):
    """Rolls every tick back and remembers which it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[RequestId] = []

    async def tick(self, message: Tick, payload: object = ()) -> CommittedTick:
        self.given.append(message.request_id)
        raise TickRolledBack("not now")


async def test_what_is_returned_for_a_failed_tick_is_tried_next() -> None:
    ticks = [Tick(request_id=RequestId(f"r-{n}"), session_id=SessionId("s"), chunk_index=0) for n in range(3)]
    failures: list[RequestId] = []

    def failed(tick: Tick, error: WorldModelError) -> Tick | None:
        failures.append(tick.request_id)
        return ticks[len(failures)] if len(failures) < 3 else None

    def committed(tick: Tick, answered: CommittedTick) -> None:
        raise AssertionError(tick)

    worker, metrics = RollingBack(), Metrics()
    await run_attempts(worker, metrics, ticks[0], failed=failed, committed=committed)
    assert worker.given == failures == ["r-0", "r-1", "r-2"]
    failed_ticks = metrics.registry.get_sample_value(
        "worldserve_ticks_failed_total", {"code": TickRolledBack("x").code}
    )
    assert failed_ticks == 3
