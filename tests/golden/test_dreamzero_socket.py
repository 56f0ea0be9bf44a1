"""DreamZero through the front door: the golden policy calls over a real socket, and robots that leave each other alone.

A real server and its worker process load a folder written from the golden weights. The noise of a call is drawn from
the seed of the files; `test_dreamzero_rollout.py` shows that this is their noise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.dreamzero_checkpoint import call_arrays, start_worker, write_checkpoint
from tests.support.dreamzero_golden import assert_close, manifest, tensors
from tests.support.openpi_process import OpenPiClient
from tests.support.robot_client import OFFICIAL, OPENPI, RobotSocket
from tests.support.server_process import ServerProcess, running_configuration

CONFIG = """\
[model]
name = "dreamzero"
checkpoint = "{checkpoint}"
width = {width}
height = {height}
fps = 5
precision = "fp32"

[model.options]
{options}

[kvcache]
requested_sessions = 4

[worker]
cpu_threads = 1
"""

NUM_ROBOTS, NUM_CALLS = 4, 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("dreamzero")
    checkpoint = write_checkpoint(folder / "checkpoint")
    size = start_worker(checkpoint)
    options = {key: value for key, value in json.loads(size.model_options).items() if value is not None}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    text = CONFIG.format(checkpoint=checkpoint.as_posix(), width=size.width, height=size.height, options=lines)
    with running_configuration(folder, text) as server:
        yield server


def requests() -> list[dict[str, Any]]:
    """The eight calls as clients send them."""
    calls = manifest()["cases"]["rollout_default"]["calls"]
    return [
        {**call_arrays(index), "prompt": call["prompt"], "session_id": call["session_id"]}
        for index, call in enumerate(calls)
    ]


def assert_golden(actions: Any, index: int) -> None:
    want = tensors("rollout_default")[f"call{index}/actions"]
    assert actions.dtype == np.float32
    assert_close(torch.from_numpy(np.array(actions)), want, f"call {index}")


@pytest.mark.openpi
@pytest.mark.parametrize("path", [OFFICIAL, pytest.param(OPENPI, marks=pytest.mark.slow)])
def test_dreamzero_eight_calls_of_the_real_client(server: ServerProcess, tmp_path: Path, path: str) -> None:
    with OpenPiClient(server.url.replace("http://", "ws://") + path, tmp_path) as policy:
        view = manifest()["tiny_config"]["view"]
        assert policy.metadata["image_resolution"] == [view["h"], view["w"]]
        for index, request in enumerate(requests()):
            assert_golden(policy.infer(request), index)


async def test_dreamzero_robots_in_turn_act_as_alone(server: ServerProcess) -> None:
    async def run(number: int) -> list[Any]:
        robot = await RobotSocket.open(server.url, OFFICIAL)
        answers = []
        for call in range(NUM_CALLS):
            request = requests()[call] | {"session_id": f"robot {number}", "prompt": f"do {number}"}
            request["observation/joint_position"] = request["observation/joint_position"] + 0.01 * number
            answers.append(await robot.ask(request))
        await robot.connection.close()
        return answers

    alone = [await run(number) for number in range(NUM_ROBOTS)]
    together = await asyncio.gather(*(run(number) for number in range(NUM_ROBOTS)))
    for number in range(NUM_ROBOTS):
        for call in range(NUM_CALLS):
            np.testing.assert_array_equal(together[number][call], alone[number][call])
    assert not np.array_equal(alone[0][0], alone[1][0])
