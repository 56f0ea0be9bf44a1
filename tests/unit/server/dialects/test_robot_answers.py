"""An answer is that to the newest request, whatever was given up, asked again or reset; robots take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from server.config import KVCacheSection, RobotSection
from server.robot_actor import RobotActor
from server.robot_calls import DROPPED, Submission
from tests.support.robot_client import (
    OFFICIAL,
    RobotServer,
    RobotSocket,
    RobotWorker,
    error_text,
    holding,
    number_of,
    observation,
    serving_robots,
)
from worldmodel.messages import SessionId


def num_dropped(server: RobotServer) -> float:
    """Return how many calls ended because nobody wanted their answer any more."""
    registry = server.server.context.metrics.registry
    return registry.get_sample_value("worldserve_robot_calls_total", {"result": DROPPED}) or 0.0


async def test_an_answer_that_comes_late_is_not_sent_for_the_next_request() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        await robot.send(observation(2))
        await server.until(lambda: server.robots.all()[0].session.num_waiting == 1)
        server.worker.release()
        assert number_of(await robot.receive()) == (2, 1, 1)
        assert number_of(await robot.infer(3)) == (3, 2, 1)


async def test_a_request_that_was_given_up_before_it_began_is_never_seen_by_the_model() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        for number in range(2, 6):
            await robot.send(observation(number))
        session = server.robots.all()[0].session
        await server.until(lambda: (num_dropped(server), session.num_waiting) == (3, 1))
        server.worker.release()
        assert number_of(await robot.receive())[0] == 5
        assert server.worker.seen == [1, 5]


async def test_a_late_answer_of_one_session_is_not_sent_for_another() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        await robot.infer(0, session_id="b")
        server.worker.hold()
        await robot.send(observation(1, session_id="a"))
        await holding(server)
        await robot.send(observation(2, session_id="b"))
        await server.until(lambda: server.robots.find("b", None).session.num_waiting == 1)
        server.worker.release()
        assert number_of(await robot.receive())[0] == 2


async def test_a_wrong_request_makes_an_earlier_one_given_up_too() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        assert "bad_message" in error_text(await robot.ask([1, 2]))
        server.worker.release()
        # The answer is there before anything else is asked, so that it would come first if it were sent.
        await server.until(lambda: not server.robots.all()[0].session.is_busy)
        assert number_of(await robot.infer(3))[:2] == (3, 1)


async def test_a_text_frame_makes_an_earlier_request_given_up_too() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        await robot.connection.send("stop")
        assert "bad_message" in error_text(await robot.receive())
        server.worker.release()
        await server.until(lambda: not server.robots.all()[0].session.is_busy)
        assert number_of(await robot.infer(3))[:2] == (3, 1)


async def test_the_same_step_asked_again_is_computed_once() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1, step_id=1))
        await holding(server)
        server.server.clock.now += 1
        await robot.send(observation(1, step_id=1))
        await server.until(lambda: server.robots.all()[0].active_at == server.server.clock.now)
        server.worker.release()
        answer = await robot.receive()
        assert number_of(answer["actions"])[:2] == (1, 0)
        again = await robot.infer(1, step_id=1)
        np.testing.assert_array_equal(again["actions"], answer["actions"])
        assert server.worker.seen == [1]
        assert "stale" in error_text(await robot.infer(9, step_id=0))
        assert number_of((await robot.infer(2, step_id=2))["actions"])[:2] == (2, 1)


async def test_a_step_for_another_run_is_refused() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        assert (await robot.infer(1, step_id=0, run=0))["run"] == 0
        assert "bad_state: the step is for run 1" in error_text(await robot.infer(2, step_id=1, run=1))
        await robot.reset()
        assert "bad_state: the step is for run 0" in error_text(await robot.infer(3, step_id=0, run=0))
        assert (await robot.infer(4, step_id=0, run=1))["run"] == 1
        assert server.worker.seen == [1, 4]


async def test_a_reset_leaves_the_request_under_way_unanswered() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        await robot.send({"endpoint": "reset"})
        await server.until(lambda: server.robots.all()[0].session.phase == "resetting")
        server.worker.release()
        assert await robot.receive() == {"status": "reset successful"}
        assert number_of(await robot.infer(2)) == (2, 0, 1)


async def test_a_reset_frees_the_pages_at_once_and_only_those_of_its_connection() -> None:
    async with serving_robots() as server:
        robot, other = await server.connect(), await server.connect()
        await robot.infer(1, session_id="a")
        await other.infer(2, session_id="b")
        assert "session_in_use" in error_text(await robot.reset(session_id="b"))
        assert number_of(await other.infer(3, session_id="b"))[1] == 1
        assert await robot.reset() == {"status": "reset successful"}
        assert [session.num_resets for session in server.worker.sessions.values()] == [1, 0]
        assert number_of(await robot.infer(3, session_id="a"))[1] == 0


async def test_a_reset_of_a_session_of_another_connection_is_refused() -> None:
    async with serving_robots() as server:
        first, second = await server.connect(), await server.connect(OFFICIAL)
        await first.infer(1, session_id="arm")
        assert (await second.reset(session_id="arm")).startswith("session_in_use: session_id 'arm' is in use")
        assert await second.reset() == "reset successful"
        assert number_of(await first.infer(2, session_id="arm")) == (2, 1, 1)
        await first.drop()
        await server.until(lambda: not server.worker.sessions)
        assert await second.reset(session_id="arm") == "reset successful"


async def test_a_reset_takes_a_session_over_if_so_configured() -> None:
    async with serving_robots(RobotWorker(capacity_sessions=1), robot=RobotSection(same_session="take_over")) as server:
        first, second = await server.connect(), await server.connect(OFFICIAL)
        await first.infer(1, session_id="arm")
        assert await second.reset(session_id="arm") == "reset successful"
        assert "taken_over" in error_text(await first.receive())
        assert (await first.closed())[0] == 1008
        assert number_of(await second.infer(2, session_id="arm")) == (2, 0, 2)
        assert number_of(await second.infer(3, session_id="arm")) == (3, 1, 2)


async def test_a_reset_before_anything_succeeds() -> None:
    async with serving_robots() as server:
        robot = await server.connect(OFFICIAL)
        assert await robot.reset() == "reset successful"
        assert not server.worker.sessions


async def test_ten_robots_are_served_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again is behind all who wait already."""
    async with serving_robots(
        RobotWorker(capacity_sessions=10), kvcache=KVCacheSection(requested_sessions=10)
    ) as server:
        submit, asked = RobotActor.submit, list[SessionId]()

        def note_and_submit(actor: RobotActor, *arguments: Any, **options: Any) -> Submission:
            server.server.clock.now += 1
            asked.append(actor.session_id)
            return submit(actor, *arguments, **options)

        robots = [await server.connect() for _ in range(10)]
        for number, robot in enumerate(robots):
            await robot.infer(number)
        server.worker.served.clear()
        monkeypatch.setattr(RobotActor, "submit", note_and_submit)

        async def work(robot: RobotSocket, number: int) -> None:
            for _ in range(6):
                assert number_of(await robot.infer(number))[0] == number

        server.worker.hold()
        working = asyncio.gather(*(work(robot, number) for number, robot in enumerate(robots)))
        await server.until(lambda: len(asked) == 10)
        server.worker.release()
        await working
        assert server.worker.max_ticks_in_flight == 1
        assert len(asked) == 60
        assert server.worker.served == asked
