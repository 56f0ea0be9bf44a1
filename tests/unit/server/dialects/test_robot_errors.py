"""What a robot is told that asks wrongly, too much or nothing, or whose step fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from server.app import create_app
from server.config import LimitsSection, RobotSection, SessionSection
from server.dialects.robot import RobotDialog
from server.endpoint import BinaryFrame, Outbox
from server.wire.robot_arrays import pack_message, unpack_message
from server.wire.robot_messages import RobotForm
from tests.support.robot_client import (
    OFFICIAL,
    OPENPI,
    RobotWorker,
    error_text,
    holding,
    number_of,
    observation,
    robot_model,
    serving_robots,
)
from tests.support.server_client import fake_config
from tests.support.virtual_time import now, run_virtual
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack


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
        server.worker.open_failures.append(RequestRefused("no", code="bad_request"))
        assert "request_refused" in error_text(await robot.infer(1))
        for failure in (OutcomeUnknown("who knows"), TickRolledBack("no")):
            server.worker.open_failures.append(failure)
            assert "worker_unavailable" in error_text(await robot.infer(1))
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


async def next_reply(outbox: Outbox) -> Any:
    frame = await outbox.get()
    assert isinstance(frame, BinaryFrame)
    return unpack_message(frame.build())


def test_a_client_that_waits_for_us_is_not_idle() -> None:
    async def main() -> None:
        worker = RobotWorker()
        app = create_app(fake_config(model=robot_model(), robot=RobotSection(idle_s=1.0)), worker=worker, clock=now)
        async with app.router.lifespan_context(app):
            outbox = Outbox()
            dialog = RobotDialog(app.state.context, outbox, form=RobotForm.OPENPI, owner=None)
            dialog.open()
            await next_reply(outbox)
            worker.hold()
            await dialog.on_binary(pack_message(observation(1)))
            await asyncio.sleep(100)
            worker.release()
            assert number_of(await next_reply(outbox))[0] == 1
            answered_at = now()
            assert "nothing was asked for 1 s" in error_text(await next_reply(outbox))
            assert now() - answered_at == pytest.approx(1.0), "its time begins with the answer"
            dialog.on_lost()

    run_virtual(main())


async def test_whoever_sends_a_message_above_the_cap_reads_why_the_connection_ends() -> None:
    async with serving_robots(robot=RobotSection(max_message_bytes=2_000_000)) as server:
        robots = [await server.connect() for _ in range(4)]
        for robot, num_bytes in zip(robots, (2_000_001, 3_000_000, 5_000_000, 8_000_000), strict=True):
            with suppress(ConnectionClosed):
                await robot.connection.send(bytes(num_bytes))
        ends = await asyncio.gather(*(robot.closed() for robot in robots))
        assert [code for code, _ in ends] == [1009] * 4
        assert ends[0][1] == "a message has more than 2000000 bytes (robot.max_message_bytes)"
        assert not server.robots.all()


async def test_requests_may_be_larger_than_those_of_worlds() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        big = np.zeros(LimitsSection().max_message_bytes + 1, np.uint8)
        assert number_of(await robot.infer(1, **{"observation/big": big}))[0] == 1
