"""The table of robot sessions: names, places, time, a worker that does not let go. Clock and worker are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from server.config import RobotSection
from server.errors import ErrorCode, ServerError
from server.metrics import Metrics
from server.robot_actor import RobotActor
from server.robot_session import Observation, RobotPhase
from server.robot_table import RobotTable
from server.session_table import SessionTable
from server.worker import CommittedTick
from tests.support.robot_client import JOINTS, RobotWorker, robot_model
from tests.support.server_client import fake_config
from tests.support.server_scripted import ManualClock
from worldmodel.errors import OutcomeUnknown
from worldmodel.messages import ChunkMedia, Tick
from worldmodel.observations import pack_arrays


@dataclass
class Holder:
    lost: list[str | None] = field(default_factory=list)
    title: str = "another connection"

    def taken_over(self, actor: RobotActor) -> None:
        self.lost.append(actor.name)


@dataclass
class Setting:
    """A running table with what it stands on."""

    table: RobotTable
    worlds: SessionTable
    worker: RobotWorker
    clock: ManualClock
    holder: Holder = field(default_factory=Holder)

    def begin(self, name: str | None = None, **options: Any) -> RobotActor:
        return self.table.begin(name, **{"owner": None, "holder": self.holder, **options})

    async def step(self, actor: RobotActor, number: float = 1.0, **options: Any) -> float:
        answer = await actor.submit(seen(number), **options).answer()
        return float(answer.actions[0, 0])


def seen(number: float) -> Observation:
    parts, payload = pack_arrays({JOINTS: np.full(7, number, np.float32)})
    return Observation(prompt="go", arrays=parts, payload=tuple(payload))


@asynccontextmanager
async def running(*, capacity: int = 2, **robot: Any) -> AsyncIterator[Setting]:
    config = fake_config(model=robot_model(), robot=RobotSection(**robot))
    worker, clock, metrics = RobotWorker(capacity_sessions=capacity), ManualClock(), Metrics()
    with ThreadPoolExecutor(1) as pool:
        worlds = SessionTable(config, worker, metrics, encode_pool=pool, clock=clock)
        table = RobotTable(config, worker, worlds, metrics, clock=clock)
        worlds.start()
        table.start()
        try:
            yield Setting(table, worlds, worker, clock)
        finally:
            worker.release()
            await table.shut_down()
            await worlds.shut_down()


async def refused(awaitable: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await awaitable
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until something is true."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_a_session_takes_its_place_with_its_first_step_and_gives_it_back_at_its_end() -> None:
    async with running() as it:
        actor = it.begin("a")
        assert it.worlds.num_resident == 0
        assert await it.step(actor, 7) == 7
        assert it.worlds.num_resident == 1
        await actor.begin_close("test")
        assert (it.worlds.num_resident, it.table.all(), it.worker.sessions) == (0, (), {})
        assert it.table.has_ended("a", None)
        assert not it.table.has_ended("a", "another owner")


async def test_a_session_has_a_seed_of_its_own_and_keeps_it_through_a_reset() -> None:
    async with running() as it:
        actors = it.begin("a"), it.begin("b")
        for actor in actors:
            await actor.open()
        before = [it.worker.sessions[actor.session_id].seed for actor in actors]
        assert before[0] != before[1]
        await actors[0].begin_reset()
        assert it.worker.sessions[actors[0].session_id].seed == before[0]


async def test_a_session_may_take_its_place_before_its_first_step() -> None:
    async with running(capacity=1) as it:
        actor = it.begin("a")
        await actor.open()
        assert (actor.session.phase, it.worlds.num_resident) == (RobotPhase.ACTIVE, 1)
        await actor.open()
        assert it.worker.num_opened == 1
        assert await it.step(actor, 7) == 7
        other = it.begin("b")
        assert (await refused(other.open())).code is ErrorCode.CAPACITY
        assert other.session.phase is RobotPhase.EMPTY
        await actor.begin_close("test")
        it.worker.open_failures.append(OutcomeUnknown("no"))
        assert (await refused(other.open())).code is ErrorCode.WORKER_UNAVAILABLE
        assert it.worlds.num_resident == 0


async def test_what_an_opening_left_in_the_worker_keeps_its_place_until_it_is_closed() -> None:
    async with running(capacity=1) as it:
        actor = it.begin("a")
        it.worker.open_failures.append(OutcomeUnknown("no"))
        it.worker.close_failures.extend([OutcomeUnknown("stuck"), OutcomeUnknown("stuck")])
        for _ in range(2):
            assert (await refused(actor.open())).code is ErrorCode.WORKER_UNAVAILABLE
            assert (it.worlds.num_resident, it.worker.num_opened) == (1, 0)
        assert await it.step(actor, 7) == 7
        assert (it.worlds.num_resident, it.worker.num_opened) == (1, 1)


async def test_what_an_opening_left_in_the_worker_dies_with_it() -> None:
    async with running(capacity=1) as it:
        actor = it.begin("a")
        it.worker.open_failures.append(OutcomeUnknown("no"))
        it.worker.close_failures.append(OutcomeUnknown("stuck"))
        assert (await refused(actor.open())).code is ErrorCode.WORKER_UNAVAILABLE
        assert it.worlds.num_resident == 1
        it.worker.dies()
        it.worker.becomes_ready()
        assert it.worlds.num_resident == 0
        assert await it.step(it.begin("b"), 7) == 7


async def test_names_belong_to_owners() -> None:
    async with running() as it:
        one, two = it.begin("a", owner="one"), it.begin("a", owner="two")
        assert it.table.find("a", "one") is one
        assert it.table.find("a", "two") is two
        assert it.table.owned_by("one") == [one]
        with pytest.raises(ServerError) as caught:
            it.table.find("a", None)
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_name_in_use_is_refused_until_it_is_free() -> None:
    async with running() as it:
        actor = it.begin("a")
        with pytest.raises(ServerError) as caught:
            it.begin("a")
        assert caught.value.code is ErrorCode.SESSION_IN_USE
        closing = actor.begin_close("test")
        again = it.begin("a")
        await closing
        assert it.table.find("a", None) is again
        assert not it.table.has_ended("a", None)


async def test_who_takes_over_begins_anew_and_waits_for_the_place() -> None:
    async with running(capacity=1, same_session="take_over") as it:
        actor = it.begin("a")
        await it.step(actor)
        it.worker.hold()
        under_way = actor.submit(seen(1))
        again = it.begin("a")
        assert it.holder.lost == ["a"]
        first = again.submit(seen(2))
        it.worker.release()
        assert (await refused(under_way.answer())).code is ErrorCode.BAD_STATE
        answer = await first.answer()
        assert answer.actions[:2, 0].tolist() == [2, 0]
        assert it.table.find("a", None) is again


async def test_one_place_that_becomes_free_is_promised_once() -> None:
    async with running(capacity=1) as it:
        old, first, second = (it.begin() for _ in range(3))
        await it.step(old)
        it.worker.hold()
        # The first waits for the place of the old one, which is closing; the second has nothing to wait for.
        old.submit(seen(0))
        old.begin_close("test")
        calls = [actor.submit(seen(number)) for number, actor in enumerate((first, second))]
        assert (await refused(calls[1].answer())).code is ErrorCode.CAPACITY
        it.worker.release()
        assert float((await calls[0].answer()).actions[0, 0]) == 0


async def test_a_place_that_is_not_released_after_all_is_not_waited_for() -> None:
    async with running(capacity=1) as it:
        old, first, second = (it.begin() for _ in range(3))
        await it.step(old)
        it.worker.hold()
        old.submit(seen(0))
        closing = old.begin_close("test")
        calls = [actor.submit(seen(1)) for actor in (first, second)]
        it.worker.close_failures.append(OutcomeUnknown("no"))
        it.worker.release()
        assert (await refused(closing)).code is ErrorCode.CLEANUP_FAILED
        for call in calls:
            assert (await refused(call.answer())).code is ErrorCode.CAPACITY
        assert it.worlds.num_waiting == 0
        await old.begin_close("test")
        assert await it.step(first, 5) == 5


async def test_another_session_gives_way_when_the_first_is_not_released() -> None:
    async with running(capacity=2) as it:
        actors = [it.begin(name) for name in "ab"]
        for actor in actors:
            await it.step(actor)
            it.clock.now += 1
            actor.is_standby = True
        it.worker.close_failures.append(OutcomeUnknown("no"))
        assert await it.step(it.begin("c"), 5) == 5
        assert [actor.session.phase for actor in actors] == [RobotPhase.CLEANUP_FAILED, RobotPhase.CLOSED]


async def test_who_leaves_while_waiting_for_a_place_is_gone_at_once() -> None:
    async with running(capacity=1) as it:
        old, waiting = it.begin(), it.begin()
        await it.step(old)
        it.worker.hold()
        old.submit(seen(0))
        old.begin_close("test")
        call = waiting.submit(seen(1))
        await until(lambda: it.worlds.num_waiting == 1)
        await waiting.begin_close("left")
        assert (it.worlds.num_waiting, it.table.all()) == (0, (old,))
        assert (await refused(call.answer())).code is ErrorCode.BAD_STATE
        it.worker.release()


@pytest.mark.parametrize("method", ["open_session", "reset_session", "close_session"])
async def test_a_bug_leaves_a_session_that_goes_on_and_ends(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(*_: Any) -> Any:
        raise KeyError("a bug")

    async with running(capacity=1) as it:
        actor = it.begin()
        if method != "open_session":
            await it.step(actor)
        with monkeypatch.context() as patch:
            patch.setattr(it.worker, method, breaks)
            match method:
                case "open_session":
                    error, code = await refused(it.step(actor)), ErrorCode.INTERNAL
                case "reset_session":
                    error, code = await refused(actor.begin_reset()), ErrorCode.RESET_FAILED
                case _:
                    error, code = await refused(actor.begin_close("test")), ErrorCode.CLEANUP_FAILED
        assert error.code is code
        assert "bug" not in error.message, "what is told to clients has no details"
        assert "KeyError: 'a bug'" in caplog.text
        if method != "close_session":
            await actor.begin_reset()
            assert await it.step(actor, 4) == 4
        await actor.begin_close("test")
        assert (it.worlds.num_resident, it.table.all(), it.worker.sessions) == (0, (), {})


async def test_the_session_that_rested_longest_gives_way() -> None:
    async with running(capacity=2) as it:
        actors = [it.begin(name) for name in "ab"]
        for actor in actors:
            await it.step(actor)
            it.clock.now += 1
        newcomer = it.begin("c")
        assert (await refused(it.step(newcomer))).code is ErrorCode.CAPACITY
        actors[0].is_standby = actors[1].is_standby = True
        assert await it.step(newcomer, 5) == 5
        assert actors[0].end_reason == "evicted"
        assert actors[1].end_reason is None


async def test_sessions_nobody_uses_end_and_busy_ones_do_not() -> None:
    async with running(capacity=3) as it:
        rested, used, busy, forever = (it.begin(name, idle_s=10.0) for name in "abcd")
        forever.idle_s = None
        for actor in (rested, used):
            await it.step(actor)
        it.worker.hold()
        call = busy.submit(seen(1))
        it.clock.now += 6
        used.active_at = it.clock.now
        assert it.table.expire(it.clock.now) == it.clock.now + 4
        it.clock.now += 5
        it.table.expire(it.clock.now)
        assert [actor.is_closing for actor in (rested, used, busy, forever)] == [True, False, False, False]
        it.worker.release()
        await call.answer()
        await it.table.find("b", None).begin_close("test")
        await rested.begin_close("joins the close under way")
        assert rested.end_reason == "idle"


async def test_a_session_the_worker_does_not_release_keeps_its_place_until_it_does() -> None:
    async with running(capacity=1) as it:
        actor = it.begin("a")
        await it.step(actor)
        it.worker.close_failures.append(OutcomeUnknown("no"))
        assert (await refused(actor.begin_close("test"))).code is ErrorCode.CLEANUP_FAILED
        assert (it.table.num_tombstones, it.worlds.num_resident) == (1, 1)
        with pytest.raises(ServerError):
            actor.submit(seen(1))
        await actor.begin_close("test")
        assert (it.table.num_tombstones, it.worlds.num_resident) == (0, 0)


async def test_a_failed_reset_fails_the_session_and_the_next_one_mends_it() -> None:
    async with running() as it:
        actor = it.begin()
        await it.step(actor)
        it.worker.reset_failures.append(OutcomeUnknown("no"))
        assert (await refused(actor.begin_reset())).code is ErrorCode.RESET_FAILED
        assert actor.session.phase is RobotPhase.FAILED
        await actor.begin_reset()
        assert actor.session.phase is RobotPhase.EMPTY
        assert await it.step(actor, 3) == 3


async def test_a_reset_that_waited_for_one_that_failed_is_carried_out() -> None:
    async with running() as it:
        actor = it.begin()
        await it.step(actor)
        it.worker.reset_failures.append(OutcomeUnknown("no"))
        first, second = actor.begin_reset(), actor.begin_reset()
        assert (await refused(first)).code is ErrorCode.RESET_FAILED
        await second
        assert (actor.session.phase, actor.session.run) == (RobotPhase.EMPTY, 1)
        assert await it.step(actor, 3) == 3


async def test_actions_that_come_after_a_reset_answer_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as it:
        actor, late = it.begin(), asyncio.Event()
        compute = it.worker.tick

        async def commit_first(tick: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
            answered = await compute(tick, payload)

            async def media() -> tuple[ChunkMedia, memoryview]:
                await late.wait()
                return await answered.media

            return CommittedTick(committed=answered.committed, media=asyncio.ensure_future(media()))

        with monkeypatch.context() as patch:
            patch.setattr(it.worker, "tick", commit_first)
            left_behind = actor.submit(seen(1))
            await until(lambda: actor.session.next_chunk_index == 1)
        await actor.begin_reset()
        assert (await refused(left_behind.answer())).code is ErrorCode.SUPERSEDED
        it.worker.hold()
        waiting = actor.submit(seen(2))
        await until(lambda: actor.session.in_flight is waiting.call)
        late.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert actor.session.in_flight is waiting.call
        it.worker.release()
        assert float((await waiting.answer()).actions[0, 0]) == 2
        assert actor.num_steps == 1


async def test_a_place_is_not_lost_when_a_client_leaves_while_its_session_opens() -> None:
    async with running(capacity=1) as it:
        for number in range(5):
            actor = it.begin()
            call = actor.submit(seen(number))
            await actor.begin_close("left")
            assert (await refused(call.answer())).code is ErrorCode.BAD_STATE
        assert it.worlds.num_resident == 0
        assert it.worker.sessions == {}
        assert await it.step(it.begin(), 9) == 9


async def test_nothing_begins_while_the_server_ends() -> None:
    async with running() as it:
        actor = it.begin()
        it.worker.hold()
        call = actor.submit(seen(1))
        it.worlds.say_goodbye()
        it.table.say_goodbye()
        assert (await refused(call.answer())).code is ErrorCode.SHUTTING_DOWN
        with pytest.raises(ServerError) as caught:
            it.begin()
        assert caught.value.code is ErrorCode.SHUTTING_DOWN


async def test_steps_of_one_session_are_computed_in_order_beside_those_of_others() -> None:
    async with running() as it:
        one, other = it.begin(), it.begin()
        for actor in (one, other):
            await it.step(actor)
        it.worker.seen.clear()
        calls = [actor.submit(seen(number)) for number, actor in ((1, one), (2, one), (3, other), (4, one))]
        await asyncio.gather(*(call.answer() for call in calls))
        assert sorted(it.worker.seen) == [1, 2, 3, 4]
        assert [number for number in it.worker.seen if number != 3] == [1, 2, 4]


async def test_who_asks_first_is_served_first() -> None:
    async with running(capacity=8) as it:
        actors = [it.begin() for _ in range(8)]
        for actor in actors:
            await actor.open()
        it.worker.hold()
        order = [3, 7, 0, 5, 1, 6, 2, 4]
        calls = []
        for index in order:
            calls.append(actors[index].submit(seen(index)))
            it.clock.now += 1
        it.worker.release()
        await asyncio.gather(*(call.answer() for call in calls))
        assert it.worker.seen == order
