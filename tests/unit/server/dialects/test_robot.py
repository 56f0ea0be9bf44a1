"""The robot dialect over real sockets, with a scripted worker: who connects where, and is answered in which form."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from server.config import ServerSection
from tests.support.robot_client import (
    BARE,
    CAMERAS,
    JOINTS,
    OFFICIAL,
    OPENPI,
    RobotSocket,
    RobotWorker,
    error_text,
    holding,
    number_of,
    observation,
    serving_robots,
)
from tests.support.server_scripted import serving


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


async def test_the_worker_gets_every_array_that_the_model_takes_and_the_prompt() -> None:
    async with serving_robots() as server:
        robot = await server.connect()
        unused = {"observation/cartesian_position": np.full(6, np.nan), "observation/task": "x", "mask": np.zeros(3)}
        await robot.infer(7, frames=4, prompt="Pick it up", **unused, seed=3)
        (session,) = server.worker.sessions.values()
        (tick,) = session.ticks
        assert tick.prompt == "Pick it up"
        shapes = {part.name: (part.dtype, part.shape) for part in tick.arrays}
        assert shapes == {JOINTS: ("<f4", (7,))} | dict.fromkeys(CAMERAS, ("|u1", (4, 4, 6, 3)))
        refused = await robot.infer(8, **{JOINTS: np.full(7, np.nan)})
        assert error_text(refused) == f"bad_message: {JOINTS}: expected finite numbers, got NaN or infinity"


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


@pytest.mark.parametrize("path", [BARE, OPENPI])
async def test_without_the_right_the_connection_is_refused_with_a_status(path: str) -> None:
    async with serving_robots(server=ServerSection(tokens=("one",))) as server:
        address = server.url.replace("http://", "ws://") + path
        for headers in ({}, {"Authorization": "Api-Key two"}):
            with pytest.raises(InvalidStatus, match="HTTP 401"):
                await connect(address, proxy=None, additional_headers=headers)
        with pytest.raises(InvalidStatus, match="HTTP 403"):
            await connect(address, proxy=None, origin="http://elsewhere.example")


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
