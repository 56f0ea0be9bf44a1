"""The robot dialect over real sockets, with a scripted worker and a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from server.config import KVCacheSection, LimitsSection, RobotSection, ServerSection, SessionSection
from server.errors import ServerError
from tests.support.robot_client import (
    BARE,
    JOINTS,
    OFFICIAL,
    OPENPI,
    RobotServer,
    RobotSocket,
    RobotWorker,
    number_of,
    observation,
    serving_robots,
)
from tests.support.server_scripted import serving
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack


def error_text(reply: Any) -> str:
    """Return the text of an error in either form."""
    if isinstance(reply, str):
        return reply
    assert isinstance(reply, dict), reply
    assert reply.keys() == {"type", "message"}
    assert reply["type"] == "error"
    return str(reply["message"])


async def holding(server: RobotServer) -> None:
    """Wait until a tick is in flight, which only `release` ends."""
    await server.until(lambda: server.worker.num_ticks_in_flight == 1)


# ---------------------------------------------------------------- the ordinary way


@pytest.mark.parametrize("path", [OFFICIAL, BARE, OPENPI])
async def test_config_first_then_actions_for_each_request(path: str) -> None:
    async with serving_robots() as server:
        robot = await server.connect(path)
        assert robot.config["image_resolution"] == [4, 6]
        assert robot.config["action_space"] == "joint_position"
        assert number_of(await robot.infer(3)) == (3, 0, 1)
        assert number_of(await robot.infer(4, frames=4, endpoint="infer")) == (4, 1, 1)
        expected = "reset successful" if path != OPENPI else {"status": "reset successful"}
        assert await robot.reset() == expected
        assert number_of(await robot.infer(5)) == (5, 0, 1)


async def test_the_order_of_the_config_is_that_of_the_address() -> None:
    async with serving_robots() as server:
        official, openpi = await server.connect(OFFICIAL), await server.connect(OPENPI)
        assert official.config == openpi.config
        assert list(official.config)[1] == "needs_wrist_camera"
        assert list(openpi.config)[1] == "n_external_cameras"


async def test_the_worker_gets_every_array_and_the_prompt() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        await robot.infer(7, frames=4, prompt="Pick it up", **{"observation/gripper_position": 0.5}, seed=3)
        (session,) = server.worker.sessions.values()
        (tick,) = session.ticks
        assert tick.prompt == "Pick it up"
        shapes = {part.name: (part.dtype, part.shape) for part in tick.arrays}
        assert shapes[JOINTS] == ("<f4", (7,))
        assert shapes["observation/wrist_image_left"] == ("|u1", (4, 4, 6, 3))
        assert shapes["observation/gripper_position"] == ("<f8", ())
        assert "seed" not in shapes


async def test_a_step_id_comes_back_with_timing() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        answer = await robot.infer(1, step_id=41, session_id="arm")
        assert (answer["step_id"], answer["session_id"], answer["run"]) == (41, "arm", 0)
        assert number_of(answer["actions"]) == (1, 0, 1)
        assert answer["server_timing"].keys() >= {"queue_ms", "infer_ms", "total_ms", "denoise_ms"}


async def test_pings_are_answered_and_other_robots_connect_during_inference() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        async with asyncio.timeout(20):
            await (await robot.connection.ping())
        other = await server.connect()
        assert other.config == robot.config
        server.worker.release()
        assert number_of(await robot.receive()) == (1, 0, 1)


async def test_the_config_waits_for_the_model() -> None:
    worker = RobotWorker(ready=False)
    async with serving_robots(worker) as server:
        robot = await server.connect(wait=False)
        worker.becomes_ready()
        assert (await robot.receive())["needs_session_id"] is True
        assert number_of(await robot.infer(1)) == (1, 0, 1)


# ---------------------------------------------------------------- sessions


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
    sections = {"server": ServerSection(tokens=("one",)), "limits": LimitsSection(max_sessions_per_token=1)}
    async with serving_robots(**sections) as server:
        headers = {"Authorization": "Api-Key one"}
        first, second = [await server.connect(additional_headers=headers) for _ in range(2)]
        await first.infer(1)
        assert "limits.max_sessions_per_token" in error_text(await second.infer(2))


@pytest.mark.parametrize("path", [BARE, OPENPI])
async def test_without_the_right_the_connection_is_refused_with_a_status(path: str) -> None:
    async with serving_robots(server=ServerSection(tokens=("one",))) as server:
        address = server.url.replace("http://", "ws://") + path
        for headers in ({}, {"Authorization": "Api-Key two"}):
            with pytest.raises(InvalidStatus, match="HTTP 401"):
                await connect(address, proxy=None, additional_headers=headers)
        with pytest.raises(InvalidStatus, match="HTTP 403"):
            await connect(address, proxy=None, origin="http://elsewhere.example")


# ---------------------------------------------------------------- stale answers


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
        async with asyncio.timeout(20):
            await (await robot.connection.ping())
        server.worker.release()
        assert number_of(await robot.receive())[0] == 5
        assert server.worker.seen == [1, 5]


async def test_a_late_answer_of_one_session_is_not_sent_for_another() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        await robot.infer(0, session_id="b")
        server.worker.hold()
        await robot.send(observation(1, session_id="a"))
        await server.until(lambda: len(server.robots.all()) == 2)
        await robot.send(observation(2, session_id="b"))
        async with asyncio.timeout(20):
            await (await robot.connection.ping())
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
        assert number_of(await robot.infer(3))[:2] == (3, 1)


async def test_the_same_step_asked_again_is_computed_once() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1, step_id=1))
        await holding(server)
        await robot.send(observation(1, step_id=1))
        async with asyncio.timeout(20):
            await (await robot.connection.ping())
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


# ---------------------------------------------------------------- fairness


async def test_ten_robots_are_served_in_turn() -> None:
    async with serving_robots(
        RobotWorker(capacity_sessions=10), kvcache=KVCacheSection(requested_sessions=10)
    ) as server:
        robots = [await server.connect() for _ in range(10)]
        for number, robot in enumerate(robots):
            await robot.infer(number)
        server.worker.served.clear()

        async def work(robot: RobotSocket, number: int) -> None:
            for _ in range(6):
                assert number_of(await robot.infer(number))[0] == number

        await asyncio.gather(*(work(robot, number) for number, robot in enumerate(robots)))
        served = server.worker.served
        assert server.worker.max_ticks_in_flight == 1
        # No robot is ever two turns ahead of another.
        for end in range(1, len(served) + 1):
            counts = [served[:end].count(session_id) for session_id in set(served)]
            assert max(counts) - min(counts) <= 2 if len(counts) == 10 else max(counts) <= 2


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("path", [OFFICIAL, OPENPI])
async def test_what_cannot_be_read_is_said_and_the_connection_lives(path: str) -> None:
    async with serving_robots() as server:
        robot = await server.connect(path)
        for message, reason in (
            (b"\xc1", "bad_message"),
            (b"", "bad_message: the request can't be read: the message ends early"),
            (b"\x81\xa1a" + b"\x91" * 20, "nested deeper"),
            ("text", "binary frames"),
        ):
            await robot.connection.send(message)
            text = error_text(await robot.receive())
            assert reason in text
            assert "Traceback" not in text
        assert number_of(await robot.infer(1))[0] == 1


async def test_prompts_are_bounded() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        assert "limits.max_prompt_chars" in error_text(await robot.infer(1, prompt="x" * 2001))


async def test_what_the_model_refuses_was_not_seen() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        await robot.infer(1)
        refusal = RequestRefused("observation/wrist_image_left: expected pictures", code="bad_observation", field="x")
        server.worker.tick_failures.append(refusal)
        assert error_text(await robot.infer(2, step_id=5)).startswith("bad_observation: observation/wrist_image_left")
        assert number_of((await robot.infer(3, step_id=5))["actions"])[:2] == (3, 1)


async def test_a_failed_step_ends_the_run_and_a_reset_begins_another() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        await robot.infer(1)
        server.worker.tick_failures.append(TickRolledBack("chunk 1 failed and was rolled back"))
        assert "tick_failed: chunk 1 failed" in error_text(await robot.infer(2))
        await server.until(lambda: not server.worker.sessions)
        assert "reset it to go on" in error_text(await robot.infer(3))
        assert await robot.reset() == {"status": "reset successful"}
        assert number_of(await robot.infer(4)) == (4, 0, 2)


async def test_actions_that_are_lost_after_the_commit_fail_the_session() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.worker.media_failures.append(OutcomeUnknown("the media of chunk 0 is lost"))
        assert "tick_failed" in error_text(await robot.infer(1))
        await robot.reset()
        assert number_of(await robot.infer(2))[1] == 0


async def test_a_transient_failure_is_tried_again_if_so_configured() -> None:
    async with serving_robots(session=SessionSection(retry_rolled_back_ticks=1)) as server:
        robot = await server.connect()
        server.worker.tick_failures.append(TickRolledBack("busy", transient=True))
        assert number_of(await robot.infer(1))[:2] == (1, 0)


async def test_a_worker_that_dies_in_a_call_is_told_and_a_reset_goes_on() -> None:
    async with serving_robots() as server:
        robot, idle = await server.connect(OFFICIAL), await server.connect()
        await robot.infer(1)
        await idle.infer(2)
        server.worker.hold()
        await robot.send(observation(3))
        await holding(server)
        server.worker.dies()
        assert (await robot.receive()).startswith("worker_unavailable: the worker was killed")
        assert "killed" in error_text(await idle.infer(3))
        assert await robot.reset() == "reset successful"
        assert "worker_unavailable" in await robot.infer(4)
        server.worker.release()
        server.worker.is_back()
        assert number_of(await robot.infer(5)) == (5, 0, 3)
        assert await idle.reset() == {"status": "reset successful"}
        assert number_of(await idle.infer(6)) == (6, 0, 4)


async def test_an_opening_that_fails_leaves_nothing_and_may_be_tried_again() -> None:
    async with serving_robots(RobotWorker(capacity_sessions=1)) as server:
        robot = await server.connect()
        for failure in (RequestRefused("no", code="bad_request"), OutcomeUnknown("who knows"), TickRolledBack("no")):
            server.worker.open_failures.append(failure)
            assert "request_refused" in error_text(await robot.infer(1))
        assert number_of(await robot.infer(2))[:2] == (2, 0)


async def test_a_bug_is_an_internal_error_without_details() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        server.robots.begin = None
        assert await robot.infer(1) == {"type": "error", "message": "Internal inference error"}
        assert (await robot.closed())[0] == 1011


async def test_an_idle_connection_is_closed_with_a_reason() -> None:
    async with serving_robots(robot=RobotSection(idle_s=0.05)) as server:
        robot = await server.connect()
        assert "nothing was asked for 0.05 s (robot.idle_s)" in error_text(await robot.receive())
        code, reason = await robot.closed()
        assert (code, reason[:13]) == (1008, "idle_timeout:")


async def test_a_client_that_waits_for_us_is_not_idle() -> None:
    async with serving_robots(robot=RobotSection(idle_s=0.02)) as server:
        robot = await server.connect()
        server.worker.hold()
        await robot.send(observation(1))
        await holding(server)
        async with asyncio.timeout(20):
            for _ in range(20):
                await (await robot.connection.ping())
                await asyncio.sleep(0.005)
        server.worker.release()
        assert number_of(await robot.receive())[0] == 1


async def test_a_message_above_the_cap_closes_the_connection() -> None:
    async with serving_robots(robot=RobotSection(max_message_bytes=10_000)) as server:
        robot = await server.connect()
        await robot.connection.send(bytes(10_001))
        code, reason = await robot.closed()
        assert code == 1009
        assert "10000" in reason
        assert not server.robots.all()


async def test_requests_may_be_larger_than_those_of_worlds() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        big = np.zeros(LimitsSection().max_message_bytes + 1, np.uint8)
        assert number_of(await robot.infer(1, **{"observation/big": big}))[0] == 1


async def test_clients_are_told_when_the_server_ends() -> None:
    async with serving_robots() as server:
        busy, quiet = await server.connect(), await server.connect(OFFICIAL)
        server.worker.hold()
        await busy.send(observation(1))
        await holding(server)
        server.server.context.say_goodbye()
        assert "shutting_down" in error_text(await busy.receive())
        assert "shutting_down" in await quiet.receive()
        assert (await busy.closed())[0] == (await quiet.closed())[0] == 1012
        server.worker.release()


async def test_a_server_of_worlds_says_that_it_serves_no_robots() -> None:
    async with serving() as server:
        for path in (BARE, OFFICIAL, OPENPI):
            robot = await RobotSocket.open(server.url, path)
            message = json.loads(robot.config)
            assert (message["type"], message["code"]) == ("error", "unsupported")
            assert (await robot.closed())[0] == 1008


async def test_a_server_of_robots_has_no_worlds() -> None:
    async with serving_robots() as server:
        with pytest.raises(InvalidStatus):
            await connect(server.url.replace("http://", "ws://") + "v1/world", proxy=None)


async def test_robots_show_in_the_metrics() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        await robot.infer(1)
        server.robots.observe()
        text = server.server.context.metrics.render().decode()
        assert 'worldserve_robot_sessions{state="active"} 1.0' in text
        assert 'worldserve_robot_calls_total{result="answered"} 1.0' in text
        assert "worldserve_robot_call_seconds_count 1.0" in text
