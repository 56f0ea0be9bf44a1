"""Which session a robot's request is for, and what becomes of it: names, owners, places, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from server.config import LimitsSection, RobotSection, ServerSection
from server.errors import ServerError
from server.wire.robot_arrays import pack_message
from tests.support.robot_client import (
    OFFICIAL,
    RobotServer,
    RobotWorker,
    error_text,
    holding,
    number_of,
    observation,
    serving_robots,
)
from tests.support.server_client import ANSWER_TIMEOUT_S
from worldmodel.errors import OutcomeUnknown

TOKEN = {"Authorization": "Api-Key one"}
ONE_SESSION: dict[str, Any] = {
    "server": ServerSection(tokens=("one",)),
    "limits": LimitsSection(max_sessions_per_token=1),
}


def rest_of(server: RobotServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"{server.url}v1/robot/sessions", trust_env=False, timeout=ANSWER_TIMEOUT_S)


async def test_connections_without_a_session_id_share_nothing() -> None:
    async with serving_robots() as server:
        first, second = await server.connect(), await server.connect()
        assert number_of(await first.infer(1)) == (1, 0, 1)
        assert number_of(await second.infer(2)) == (2, 0, 2)
        assert number_of(await first.infer(3)) == (3, 1, 2)
        assert len(server.worker.sessions) == 2


async def test_sessions_of_one_connection_keep_their_state() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        for chunk_index in range(3):
            for number, name in ((1, "a"), (2, "b")):
                assert number_of(await robot.infer(number, session_id=name))[:2] == (number, chunk_index)


async def test_a_connection_with_too_many_sessions_gives_up_the_oldest_and_says_so() -> None:
    async with serving_robots(robot=RobotSection(max_sessions_per_connection=1)) as server:
        robot = await server.connect()
        await robot.infer(1, session_id="a")
        assert number_of(await robot.infer(2, session_id="b"))[1] == 0
        await server.until(lambda: len(server.worker.sessions) == 1)
        assert "session_evicted" in error_text(await robot.infer(1, session_id="a"))
        assert number_of(await robot.infer(1, session_id="a"))[1] == 0


async def test_a_session_that_waits_on_its_connection_gives_way_to_another_robot() -> None:
    async with serving_robots(RobotWorker(capacity_sessions=2)) as server:
        first, second = await server.connect(), await server.connect()
        await first.infer(1, session_id="old episode")
        await first.infer(2, session_id="new episode")
        assert number_of(await second.infer(3)) == (3, 0, 3)
        assert number_of(await first.infer(4, session_id="new episode"))[1] == 1
        assert "session_evicted" in error_text(await first.infer(5, session_id="old episode"))


@pytest.mark.parametrize("name", ["arm", None])
async def test_who_resets_a_session_that_has_ended_begins_anew_at_once(name: str | None) -> None:
    async with serving_robots() as server:
        robot = await server.connect(OFFICIAL)
        await robot.infer(1, session_id="arm")
        await server.robots.find("arm", None).begin_close("deleted")
        assert await robot.reset(session_id=name) == "reset successful"
        assert number_of(await robot.infer(2, session_id="arm")) == (2, 0, 2)


async def test_who_resets_a_session_that_was_evicted_begins_anew_at_once() -> None:
    async with serving_robots(robot=RobotSection(max_sessions_per_connection=1)) as server:
        robot = await server.connect(OFFICIAL)
        await robot.infer(1, session_id="a")
        await robot.infer(2, session_id="b")
        await server.until(lambda: len(server.worker.sessions) == 1)
        assert await robot.reset(session_id="a") == "reset successful"
        assert number_of(await robot.infer(3, session_id="a"))[:2] == (3, 0)


async def test_a_session_that_was_deleted_is_told_so_once() -> None:
    async with serving_robots() as server:
        robot = await server.connect(OFFICIAL)
        await robot.infer(1, session_id="arm")
        await server.robots.find("arm", None).begin_close("deleted")
        told = await robot.infer(2, session_id="arm")
        assert told == "session_lost: the session 'arm' has ended: deleted; ask again to begin anew"
        assert number_of(await robot.infer(3, session_id="arm")) == (3, 0, 2)


async def test_a_session_whose_close_failed_is_told_why_it_was_closed() -> None:
    async with serving_robots() as server:
        robot = await server.connect(OFFICIAL)
        await robot.infer(1, session_id="arm")
        actor = server.robots.find("arm", None)
        server.worker.close_failures.append(OutcomeUnknown("no"))
        with pytest.raises(ServerError, match="did not release"):
            await actor.begin_close("deleted")
        assert "has ended: deleted" in await robot.infer(2, session_id="arm")
        # Its name is free as soon as the worker lets go, which asking again brings about.
        assert (await robot.infer(3, session_id="arm")).startswith("cleanup_failed: the worker has not released")
        await server.until(lambda: not server.robots.all())
        assert actor.end_reason == "deleted"
        assert number_of(await robot.infer(4, session_id="arm")) == (4, 0, 2)


async def test_a_full_worker_refuses_and_the_connection_lives() -> None:
    async with serving_robots(RobotWorker(capacity_sessions=1)) as server:
        first, second = await server.connect(), await server.connect()
        await first.infer(1)
        assert "all 1 places" in error_text(await second.infer(2))
        await first.drop()
        await server.until(lambda: not server.worker.sessions)
        assert number_of(await second.infer(3))[0] == 3


async def test_a_disconnect_frees_the_worker_and_the_next_robot_need_not_wait() -> None:
    async with serving_robots(RobotWorker(capacity_sessions=1)) as server:
        for number in range(5):
            robot = await server.connect()
            assert number_of(await robot.infer(number))[0] == number
            await robot.drop()
            await server.until(lambda: not server.robots.all())
        assert server.worker.memory is not None
        assert server.worker.memory.free_pages == server.worker.memory.total_pages


async def test_a_second_connection_with_the_same_session_is_refused() -> None:
    async with serving_robots() as server:
        first, second = await server.connect(), await server.connect(OFFICIAL)
        await first.infer(1, session_id="arm")
        assert (await second.infer(2, session_id="arm")).startswith("session_in_use: session_id 'arm' is in use")
        assert number_of(await first.infer(3, session_id="arm"))[:2] == (3, 1)
        assert number_of(await second.infer(4, session_id="another"))[0] == 4
        await first.drop()
        await server.until(lambda: len(server.worker.sessions) == 1)
        assert number_of(await second.infer(5, session_id="arm"))[:2] == (5, 0)


async def test_a_name_that_rest_holds_is_said_to_be_in_use_by_it() -> None:
    async with serving_robots() as server, rest_of(server) as rest:
        robot = await server.connect()
        assert (await rest.post("/", json={"session_id": "arm"})).status_code == 201
        assert error_text(await robot.infer(1, session_id="arm")) == (
            "session_in_use: session_id 'arm' is in use by the REST interface (robot.same_session)"
        )
        await robot.infer(1, session_id="leg")
        refused = (await rest.post("/", json={"session_id": "leg"})).json()["error"]
        assert refused["message"] == "session_id 'leg' is in use by another connection (robot.same_session)"


async def test_a_small_step_over_rest_does_not_overtake_a_large_one() -> None:
    async with serving_robots() as server, rest_of(server) as rest:
        await rest.post("", json={"session_id": "arm"})
        (actor,) = server.robots.all()
        packed = pack_message(observation(1, step_id=1))
        rest_may_come = asyncio.Event()

        async def slow_body() -> AsyncIterator[bytes]:
            yield packed[:100]
            await rest_may_come.wait()
            yield packed[100:]

        def step(content: bytes | AsyncIterator[bytes]) -> asyncio.Task[httpx.Response]:
            headers = {"Content-Type": "application/msgpack"}
            return asyncio.create_task(rest.post("/arm/step", content=content, headers=headers))

        large = step(slow_body())
        await server.until(lambda: actor.arrivals.num_unread == 1)
        small = step(pack_message(observation(2, step_id=2)))
        await server.until(lambda: actor.arrivals.num_unread == 2)
        rest_may_come.set()
        answers = [(await each).json() for each in (large, small)]
        assert [answer["actions"][0][0] for answer in answers] == [1.0, 2.0], answers
        assert server.worker.seen == [1.0, 2.0]


@pytest.mark.parametrize("name", ["a/b c", "a/step", "/", "a//b/", "ü?#%2F"])
async def test_rest_finds_a_session_by_any_name(name: str) -> None:
    async with serving_robots() as server, rest_of(server) as rest:
        robot = await server.connect()
        await robot.infer(1, session_id=name)
        address = "/" + quote(name, safe="")
        assert (await rest.get(address)).json()["session_id"] == name
        for verb in ("step", "reset"):
            step = {"step_id": 0, "observation": {}} if verb == "step" else None
            refused = (await rest.post(f"{address}/{verb}", json=step)).json()["error"]
            assert refused["message"] == f"session {name!r} belongs to a WebSocket connection"
        assert (await rest.delete(address)).status_code == 204
        assert not server.robots.all()
        assert "POST" in (await rest.put(address + "/step")).headers["allow"]


async def test_a_second_connection_takes_the_session_over_if_so_configured() -> None:
    async with serving_robots(RobotWorker(capacity_sessions=1), robot=RobotSection(same_session="take_over")) as server:
        first, second = await server.connect(), await server.connect()
        await first.infer(1, session_id="arm")
        assert number_of(await second.infer(2, session_id="arm")) == (2, 0, 2)
        assert "taken_over" in error_text(await first.receive())
        code, reason = await first.closed()
        assert code == 1008
        assert "'arm'" in reason
        assert number_of(await second.infer(3, session_id="arm"))[1] == 1


async def test_tokens_have_names_of_their_own() -> None:
    section = ServerSection(tokens=("one", "two"))
    async with serving_robots(server=section) as server:
        robots = [
            await server.connect(additional_headers={"Authorization": f"Api-Key {token}"}) for token in ("one", "two")
        ]
        for number, robot in enumerate(robots):
            assert number_of(await robot.infer(number, session_id="arm"))[:2] == (number, 0)


async def test_sessions_per_token_are_bounded() -> None:
    async with serving_robots(**ONE_SESSION) as server:
        first, second = [await server.connect(additional_headers=TOKEN) for _ in range(2)]
        await first.infer(1)
        assert "limits.max_sessions_per_token" in error_text(await second.infer(2))


async def test_who_is_taken_over_does_not_count_for_the_token() -> None:
    async with serving_robots(robot=RobotSection(same_session="take_over"), **ONE_SESSION) as server:
        first, second = [await server.connect(additional_headers=TOKEN) for _ in range(2)]
        await first.infer(1, session_id="arm")
        assert "limits.max_sessions_per_token" in error_text(await second.infer(2, session_id="leg"))
        assert number_of(await second.infer(3, session_id="arm"))[:2] == (3, 0)
        assert "taken_over" in error_text(await first.receive())


async def test_a_name_for_every_episode_keeps_the_limit_of_the_token() -> None:
    async with serving_robots(**ONE_SESSION) as server:
        robot = await server.connect(additional_headers=TOKEN)
        for number in range(3):
            assert number_of(await robot.infer(number, session_id=f"episode {number}"))[:2] == (number, 0)
            await server.until(lambda: len(server.robots.all()) == 1)
        assert error_text(await robot.infer(4, session_id="episode 0")).startswith("session_evicted")


async def test_sessions_that_close_count_for_the_token() -> None:
    async with serving_robots(robot=RobotSection(same_session="take_over"), **ONE_SESSION) as server:
        robots = [await server.connect(additional_headers=TOKEN) for _ in range(3)]
        server.worker.hold()
        await robots[0].send(observation(1, session_id="arm"))
        await holding(server)
        await robots[1].send(observation(2, session_id="arm"))
        assert "taken_over" in error_text(await robots[0].receive())
        assert "limits.max_sessions_per_token" in error_text(await robots[2].infer(3, session_id="arm"))
        server.worker.release()
        assert number_of(await robots[1].receive())[:2] == (2, 0)
