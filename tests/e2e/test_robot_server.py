"""A real server with the test robot in a real worker process: the real openpi-client, REST, a worker that is killed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.checks import positive_data_acceptance

from clients.examples import robot_replay
from server.wire.robot_arrays import pack_message, unpack_message
from tests.support.openpi_process import OpenPiClient
from tests.support.robot_client import CAMERAS, HEIGHT, JOINTS, OFFICIAL, OPENPI, WIDTH, RobotSocket
from tests.support.server_process import ANSWER_TIMEOUT_S, ServerProcess, running_configuration
from tests.support.tidy_process import TIDIES_UP, own_bytes
from worldmodel.fake_robot import EMPTY, actions_of, observe

CONFIG = f"""\
[model]
name = "fake_robot"
checkpoint = "package:worldmodel/data/demo_world"
width = {WIDTH}
height = {HEIGHT}
fps = 5
precision = "fp32"

[model.options]
chunk_ms = 5.0
prompt_commands = true

[kvcache]
requested_sessions = 10

[worker]
cpu_threads = 1
restart_backoff_s = 0.1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_configuration(tmp_path_factory.mktemp("robots"), CONFIG, environment=TIDIES_UP) as server:
        yield server


def seen(number: int, *, frames: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    """An observation that is like no other."""
    generator = np.random.default_rng(number)
    pictures = {name: generator.integers(0, 256, (frames, HEIGHT, WIDTH, 3), np.uint8) for name in CAMERAS}
    return pictures | {JOINTS: generator.standard_normal(7, np.float32)}


class Twin:
    """What a robot must do that observes this, alone in the world."""

    def __init__(self) -> None:
        self.digest = EMPTY.digest

    def step(self, arrays: dict[str, np.ndarray[Any, Any]], prompt: str = "go") -> np.ndarray[Any, Any]:
        self.digest = observe(self.digest, prompt, arrays)
        return actions_of(self.digest)


def websocket(server: ServerProcess, path: str) -> str:
    return server.url.replace("http://", "ws://") + path


POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""How many threads the pool of the event loop may have. It grows when all are busy, on a busy machine at any time."""


# ---------------------------------------------------------------- the real client


@pytest.mark.openpi
@pytest.mark.parametrize("path", [OFFICIAL, OPENPI, ""])
def test_the_real_client_gets_the_actions_of_the_model(server: ServerProcess, tmp_path: Path, path: str) -> None:
    twin = Twin()
    with OpenPiClient(websocket(server, path), tmp_path) as policy:
        assert policy.metadata["image_resolution"] == [HEIGHT, WIDTH]
        for number in range(3):
            actions = policy.infer({**seen(number), "prompt": "go"})
            assert (actions.shape, actions.dtype) == ((24, 8), np.float32)
            np.testing.assert_array_equal(actions, twin.step(seen(number)))
        policy.reset()
        np.testing.assert_array_equal(policy.infer({**seen(9), "prompt": "go"}), twin.step(seen(9)))
        answer = policy.infer({**seen(10), "prompt": "go", "step_id": 5, "session_id": "x"})
        assert (answer["step_id"], answer["session_id"]) == (5, "x")
        np.testing.assert_array_equal(np.float32(answer["actions"]), Twin().step(seen(10)))


@pytest.mark.openpi
def test_the_real_client_raises_what_the_server_says(server: ServerProcess, tmp_path: Path) -> None:
    with OpenPiClient(websocket(server, OFFICIAL), tmp_path) as policy:
        incomplete = {name: array for name, array in seen(1).items() if name != CAMERAS[2]}
        with pytest.raises(RuntimeError, match="bad_observation: observation/wrist_image_left: expected pictures"):
            policy.infer({**incomplete, "prompt": "go"})
        np.testing.assert_array_equal(policy.infer({**seen(1), "prompt": "go"}), Twin().step(seen(1)))


@pytest.mark.slow
@pytest.mark.openpi
def test_four_real_clients_in_turn_act_as_alone(server: ServerProcess, tmp_path: Path) -> None:
    clients = [OpenPiClient(websocket(server, OFFICIAL), tmp_path) for _ in range(4)]
    twins = [Twin() for _ in clients]
    try:
        for step in range(4):
            for index, client in enumerate(clients):
                client.send({**seen(100 * index + step), "prompt": "go"})
            for index, (client, twin) in enumerate(zip(clients, twins, strict=True)):
                np.testing.assert_array_equal(client.receive(), twin.step(seen(100 * index + step)))
    finally:
        for client in clients:
            client.close()
    server.until_empty()


# ---------------------------------------------------------------- many robots


async def test_ten_robots_at_once_act_as_alone(server: ServerProcess) -> None:
    # They take all places.
    server.until_empty()

    async def run(index: int) -> None:
        robot, twin = await RobotSocket.open(server.url, OFFICIAL), Twin()
        for step in range(8):
            arrays = seen(1000 * index + step)
            actions = await robot.ask({**arrays, "prompt": "go", "session_id": f"robot {index}"})
            np.testing.assert_array_equal(actions, twin.step(arrays))
        await robot.connection.close()

    await asyncio.gather(*(run(index) for index in range(10)))


async def test_a_worker_that_is_killed_in_a_call(server: ServerProcess) -> None:
    robot, other = await RobotSocket.open(server.url, OFFICIAL), await RobotSocket.open(server.url, OPENPI)
    await robot.ask({**seen(1), "prompt": "go"})
    await other.ask({**seen(2), "prompt": "go"})
    reply = await robot.ask({**seen(3), "prompt": "!crash"})
    assert reply.startswith("worker_unavailable: the worker"), reply
    told = await other.ask({**seen(4), "prompt": "go"})
    assert told["type"] == "error"
    await asyncio.to_thread(server.until_ready)
    for client, reset in ((robot, "reset successful"), (other, {"status": "reset successful"})):
        assert await client.reset() == reset
        np.testing.assert_array_equal(await client.ask({**seen(5), "prompt": "go"}), Twin().step(seen(5)))
        await client.connection.close()
    await asyncio.to_thread(server.until_empty)


async def cycles(server: ServerProcess, number: int) -> None:
    for index in range(number):
        robot = await RobotSocket.open(server.url, OFFICIAL if index % 2 else OPENPI)
        await robot.send({**seen(index), "prompt": "go"})
        if index % 3:
            actions = await robot.receive()
            np.testing.assert_array_equal(actions, Twin().step(seen(index)))
        await robot.drop()


@pytest.mark.parametrize(
    ("number", "num_warm_up", "max_bytes_a_cycle"),
    [(20, 10, 30_000), pytest.param(200, 100, 4_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
async def test_connect_infer_drop_leaves_nothing(
    server: ServerProcess, number: int, num_warm_up: int, max_bytes_a_cycle: int
) -> None:
    """Early cycles fill the heap of malloc. A session that stayed would keep a request of 12 pictures and an answer."""

    def counts() -> dict[str, float]:
        server.until_empty()
        process, worker = server.ps, server.worker()
        return {
            "tasks": server.metric("worldserve_asyncio_tasks"),
            "descriptors": process.num_fds(),
            "worker descriptors": worker.num_fds(),
            "threads": process.num_threads(),
            "worker threads": worker.num_threads(),
            "children": len(process.children(recursive=True)),
        }

    def memory() -> list[int]:
        return [own_bytes(process) for process in (server.ps, server.worker())]

    await cycles(server, num_warm_up)
    before = await asyncio.to_thread(counts)
    memory_before = await asyncio.to_thread(memory)
    await cycles(server, number)

    # The connection of the last question may still be closing, so that a count is wrong once, but not for good.
    def settled() -> bool:
        more = {"threads": POOL_THREADS}
        return all(count <= before[name] + more.get(name, 0) for name, count in counts().items())

    await asyncio.to_thread(server.until, settled, what=f"everything is as before: {before}")
    memory_after = await asyncio.to_thread(memory)
    grown = [after - before for before, after in zip(memory_before, memory_after, strict=True)]
    assert max(grown) < number * max_bytes_a_cycle, f"the server and the worker have grown by {grown} bytes"


def test_the_example_draws_what_a_robot_was_told(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = tmp_path / "actions.svg"
    assert robot_replay.main([websocket(server, OFFICIAL), "--calls", "3", "--out", str(drawing)]) == 0
    assert ElementTree.parse(drawing).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told[:3]] == ["call 0", "call 1", "call 2"]


async def test_the_example_may_run_twice_at_once(server: ServerProcess) -> None:
    url = websocket(server, OFFICIAL)
    runs = [asyncio.to_thread(robot_replay.replay, url, num_calls=20, prompt="go") for _ in range(2)]
    first, second = await asyncio.gather(*runs)
    assert len(first) == len(second) == 20
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)


# ---------------------------------------------------------------- REST


class Rest:
    """The REST interface as a reinforcement-learning loop uses it."""

    def __init__(self, server: ServerProcess) -> None:
        self.http = httpx.Client(base_url=server.url + "v1", trust_env=False, timeout=ANSWER_TIMEOUT_S)

    def create(self, **fields: Any) -> str:
        answer = self.http.post("/robot/sessions", json=fields)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["session_id"])

    def step(self, session_id: str, step_id: int, arrays: dict[str, Any], **fields: Any) -> httpx.Response:
        def packed(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            data = base64.b64encode(value.tobytes()).decode()
            return {"dtype": value.dtype.str, "shape": value.shape, "data": data}

        body = {"step_id": step_id, "prompt": "go", **fields}
        body["observation"] = {name: packed(array) for name, array in arrays.items()}
        return self.http.post(f"/robot/sessions/{session_id}/step", json=body)

    def send_msgpack(self, session_id: str, arrays: dict[str, Any], **fields: Any) -> httpx.Response:
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        body = pack_message({**arrays, "prompt": "go", **fields})
        return self.http.post(f"/robot/sessions/{session_id}/step", content=body, headers=headers)

    def msgpack_step(self, session_id: str, step_id: int, arrays: dict[str, Any], **fields: Any) -> Any:
        answer = self.send_msgpack(session_id, arrays, step_id=step_id, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/msgpack"
        return unpack_message(answer.content)


@pytest.fixture
def rest(server: ServerProcess) -> Iterator[Rest]:
    rest = Rest(server)
    yield rest
    for session in rest.http.get("/robot/sessions").json()["sessions"]:
        assert rest.http.delete(f"/robot/sessions/{session['session_id']}").status_code == 204
    rest.http.close()


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_the_model_is_described(rest: Rest) -> None:
    robot = rest.http.get("/robot").json()
    assert robot["cameras"] == list(CAMERAS)
    assert (robot["action_horizon"], robot["action_dims"]) == (24, 8)
    assert robot["config"]["image_resolution"] == [HEIGHT, WIDTH]


def test_a_loop_of_steps_in_both_forms(rest: Rest) -> None:
    session_id, twin = rest.create(), Twin()
    for step_id in range(4):
        arrays = seen(step_id)
        if step_id % 2:
            answer = rest.msgpack_step(session_id, step_id, arrays)
        else:
            answer = rest.step(session_id, step_id, arrays, run=0).json()
        assert (answer["session_id"], answer["run"], answer["step_id"]) == (session_id, 0, step_id)
        np.testing.assert_array_equal(np.float32(answer["actions"]), twin.step(arrays))
        assert answer["server_timing"]["total_ms"] >= answer["server_timing"]["infer_ms"] >= 0
    view = rest.http.get(f"/robot/sessions/{session_id}").json()
    assert (view["state"], view["num_steps"], view["last_step_id"], view["run"]) == ("active", 4, 3, 0)


def test_a_step_that_is_sent_again_is_not_computed_again(rest: Rest) -> None:
    session_id = rest.create(session_id="loop")
    first = rest.step(session_id, 3, seen(1)).json()
    again = rest.step(session_id, 3, seen(2)).json()
    assert again == first
    assert code_of(rest.step(session_id, 2, seen(1))) == (409, "stale")
    assert code_of(rest.step(session_id, 4, seen(1), run=1)) == (409, "bad_state")
    assert rest.http.get(f"/robot/sessions/{session_id}").json()["num_steps"] == 1


def test_steps_that_come_together_are_computed_in_their_order(rest: Rest) -> None:
    session_id = rest.create()
    rest.step(session_id, 0, seen(0))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: rest.step(session_id, 1, seen(1)).json(), range(8)))
    assert all(answer == answers[0] for answer in answers)
    twin = Twin()
    twin.step(seen(0))
    np.testing.assert_array_equal(np.float32(answers[0]["actions"]), twin.step(seen(1)))


def test_a_reset_begins_a_run(rest: Rest) -> None:
    session_id = rest.create()
    rest.step(session_id, 5, seen(1))
    view = rest.http.post(f"/robot/sessions/{session_id}/reset").json()
    assert (view["run"], view["last_step_id"], view["state"]) == (1, None, "active")
    assert code_of(rest.step(session_id, 0, seen(2), run=0)) == (409, "bad_state")
    assert code_of(rest.send_msgpack(session_id, seen(2), step_id=0, run=0)) == (409, "bad_state")
    answer, twin = rest.step(session_id, 0, seen(2), run=1).json(), Twin()
    np.testing.assert_array_equal(np.float32(answer["actions"]), twin.step(seen(2)))
    answer = rest.msgpack_step(session_id, 1, seen(3), run=1)
    np.testing.assert_array_equal(answer["actions"], twin.step(seen(3)))


def test_closing_twice_succeeds_and_frees_the_place(server: ServerProcess, rest: Rest) -> None:
    # Robots of other tests whose connection is lost may be there for a moment.
    server.until_empty()
    session_id = rest.create()
    rest.step(session_id, 0, seen(1))
    for _ in range(2):
        assert rest.http.delete(f"/robot/sessions/{session_id}").status_code == 204
    assert server.is_empty()
    assert code_of(rest.step(session_id, 1, seen(1))) == (404, "not_found")
    assert code_of(rest.http.get(f"/robot/sessions/{session_id}")) == (404, "not_found")


async def test_a_session_of_a_connection_is_not_stepped_over_rest(server: ServerProcess, rest: Rest) -> None:
    robot = await RobotSocket.open(server.url, OFFICIAL)
    await robot.ask({**seen(1), "prompt": "go", "session_id": "arm"})
    assert code_of(await asyncio.to_thread(rest.step, "arm", 0, seen(1))) == (409, "session_in_use")
    assert code_of(rest.http.post("/robot/sessions", json={"session_id": "arm"})) == (409, "session_in_use")
    view = rest.http.get("/robot/sessions/arm").json()
    assert view["connected"] is True
    await robot.connection.close()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"step_id": 0}, 422, "bad_message"),
        ({"step_id": -1, "observation": {}}, 422, "bad_message"),
        ({"step_id": 0, "observation": {}, "more": 1}, 422, "bad_message"),
        ({"step_id": 0, "observation": {}}, 422, "bad_observation"),
        ({"step_id": 0, "observation": {"a": {"dtype": "|O", "shape": [1], "data": "AA=="}}}, 422, "bad_message"),
        ({"step_id": 0, "prompt": "x" * 2001, "observation": {}}, 422, "prompt_too_long"),
        ({"step_id": 0, "prompt": "!late", "observation": {"go": 1.0}}, 422, "bad_observation"),
    ],
)
def test_a_wrong_step_is_refused(rest: Rest, body: dict[str, Any], status: int, code: str) -> None:
    session_id = rest.create()
    assert code_of(rest.http.post(f"/robot/sessions/{session_id}/step", json=body)) == (status, code)
    np.testing.assert_array_equal(np.float32(rest.step(session_id, 0, seen(1)).json()["actions"]), Twin().step(seen(1)))


@pytest.mark.parametrize(
    ("kind", "content", "status", "code"),
    [
        ("text/plain", b"{}", 415, "bad_content_type"),
        ("application/json", b"{", 400, "bad_json"),
        ("application/msgpack", b"\xc1", 422, "bad_message"),
        ("application/msgpack", pack_message({"endpoint": "reset"}), 422, "bad_message"),
        ("application/x-msgpack", pack_message({"prompt": "go"}), 422, "bad_message"),
        ("application/msgpack", pack_message({"step_id": 0, "session_id": "another"}), 422, "bad_message"),
    ],
)
def test_a_body_of_another_kind_is_refused(rest: Rest, kind: str, content: bytes, status: int, code: str) -> None:
    session_id = rest.create()
    answer = rest.http.post(f"/robot/sessions/{session_id}/step", content=content, headers={"Content-Type": kind})
    assert code_of(answer) == (status, code)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 129, 5])
def test_a_name_that_makes_no_address_is_refused(rest: Rest, name: object) -> None:
    assert code_of(rest.http.post("/robot/sessions", json={"session_id": name})) == (422, "bad_message")


def test_a_session_of_a_world_is_refused(rest: Rest) -> None:
    body = {"prompt": "a town", "image": {"name": "day"}}
    status, code = code_of(rest.http.post("/sessions", json=body))
    assert (status, code) != (500, "internal")
    assert 400 <= status < 500


def test_a_failed_step_needs_a_reset(rest: Rest) -> None:
    session_id = rest.create()
    assert code_of(rest.step(session_id, 0, seen(1), prompt="!late")) == (500, "tick_failed")
    assert code_of(rest.step(session_id, 0, seen(1))) == (409, "bad_state")
    assert rest.http.post(f"/robot/sessions/{session_id}/reset").status_code == 200
    assert rest.step(session_id, 0, seen(1)).status_code == 200


def test_the_interface_is_described(server: ServerProcess, rest: Rest) -> None:
    api = server.get("openapi.json").json()
    step = api["paths"]["/v1/robot/sessions/{session_id}/step"]["post"]
    bodies = step["requestBody"]["content"]
    assert bodies.keys() == {"application/json", "application/msgpack"}
    body = {"step_id": 1, "observation": {"a": {"dtype": "|u1", "shape": [1], "data": "AA=="}, "b": [1.0], "c": 2.0}}
    Draft202012Validator(bodies["application/json"]["schema"]).validate(body)
    assert "$ref" not in json.dumps(bodies)
    assert step["responses"]["200"]["content"].keys() == {"application/json", "application/msgpack"}


@pytest.mark.slow
def test_generated_requests_get_documented_answers(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}openapi.json", timeout=ANSWER_TIMEOUT_S)
    operations = [found.ok() for found in schema.include(path_regex="^/v1/robot").get_all_operations()]
    assert len(operations) == 8

    for operation in operations:

        @settings(
            max_examples=20,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(case=operation.as_strategy())
        def answers_as_documented(case: schemathesis.Case) -> None:
            # A schema can't say which names exist and which pictures fit, so valid requests may be refused.
            answer = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=ANSWER_TIMEOUT_S)
            if answer.status_code == 201:
                path = f"v1/robot/sessions/{answer.json()['session_id']}"
                assert httpx.delete(server.url + path, trust_env=False, timeout=ANSWER_TIMEOUT_S).status_code == 204

        answers_as_documented()
    server.until_empty()
