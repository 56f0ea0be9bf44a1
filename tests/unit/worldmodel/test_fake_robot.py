"""The test robot in the real runtime: actions follow from everything observed, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from worldmodel.errors import RequestRefused, TickRolledBack
from worldmodel.fake_robot import ACTION_DIMS, ACTION_HORIZON, CAMERAS, EMPTY, actions_of, observe
from worldmodel.fake_robot_options import parse_options
from worldmodel.messages import (
    CloseSession,
    MediaFormat,
    OpenSession,
    RequestId,
    ResetSession,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.observations import describe_array
from worldmodel.runtime import Runtime

HEIGHT, WIDTH = 4, 6
ONE = RequestId("r")


def load(**options: object) -> Runtime:
    start = StartWorker(
        model="fake_robot",
        checkpoint="none",
        width=WIDTH,
        height=HEIGHT,
        fps=5,
        requested_sessions=3,
        memory_bytes=2**24,
        model_options=parse_options(dict(options)),
    )
    return Runtime.load(start, lambda stage, fraction, detail: None)


def seen(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    pictures = {name: generator.integers(0, 256, (4, HEIGHT, WIDTH, 3), np.uint8) for name in CAMERAS}
    return pictures | {"observation/joint_position": generator.standard_normal(7)}


class Robot:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.session_id = SessionId(name)
        self.num_chunks = 0
        runtime.open(
            OpenSession(request_id=ONE, session_id=self.session_id, prompt="", seed=0, outputs=(MediaFormat.ACTIONS,)),
            None,
        )

    def step(self, arrays: dict[str, np.ndarray], prompt: str = "go") -> np.ndarray:
        parts = tuple(describe_array(name, array) for name, array in arrays.items())
        tick = Tick(
            request_id=ONE, session_id=self.session_id, chunk_index=self.num_chunks, prompt=prompt, arrays=parts
        )
        media, payload = self.runtime.tick(tick, arrays).to_host()
        self.num_chunks += 1
        (part,) = media.parts
        return np.frombuffer(payload[0], np.float32).reshape(part.shape)

    def reset(self) -> None:
        self.runtime.reset(ResetSession(request_id=ONE, session_id=self.session_id), None)
        self.num_chunks = 0


def test_actions_follow_from_all_that_was_observed() -> None:
    robot = Robot(load(), "a")
    digest = EMPTY.digest
    for number in range(8):
        digest = observe(digest, "go", seen(number))
        actions = robot.step(seen(number))
        assert actions.shape == (ACTION_HORIZON, ACTION_DIMS)
        assert np.abs(actions).max() <= 1.0
        np.testing.assert_array_equal(actions, actions_of(digest))


def test_robots_in_turn_act_as_alone() -> None:
    def run(robots: list[Robot]) -> list[list[np.ndarray]]:
        return [[robot.step(seen(10 * index + step)) for index, robot in enumerate(robots)] for step in range(5)]

    runtime = load()
    together = run([Robot(runtime, name) for name in "abc"])
    alone = load()
    for index in range(3):
        robot = Robot(alone, str(index))
        for step in range(5):
            np.testing.assert_array_equal(robot.step(seen(10 * index + step)), together[step][index])
        alone.close(CloseSession(request_id=ONE, session_id=robot.session_id))


def test_prompt_order_and_reset_matter() -> None:
    robot = Robot(load(), "a")
    first = robot.step(seen(1))
    second = robot.step(seen(1))
    assert not np.array_equal(first, second)
    robot.reset()
    np.testing.assert_array_equal(robot.step(seen(1)), first)
    robot.reset()
    assert not np.array_equal(robot.step(seen(1), prompt="stop"), first)


def test_a_failed_chunk_was_never_observed() -> None:
    robot, twin = Robot(load(prompt_commands=True), "a"), Robot(load(), "b")
    np.testing.assert_array_equal(robot.step(seen(1)), twin.step(seen(1)))
    for kind in ("early", "late", "transient", "incomplete", "wrong_events", "not_finite"):
        with pytest.raises(TickRolledBack):
            robot.step(seen(2), prompt=f"!{kind}")
    with pytest.raises(RequestRefused, match="as ordered"):
        robot.step(seen(2), prompt="!refuse")
    np.testing.assert_array_equal(robot.step(seen(3)), twin.step(seen(3)))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (CAMERAS[0], None),
        (CAMERAS[1], np.zeros((HEIGHT, WIDTH, 4), np.uint8)),
        (CAMERAS[2], np.zeros((5, HEIGHT, WIDTH, 3), np.uint8)),
        (CAMERAS[0], np.zeros((HEIGHT, WIDTH, 3), np.float32)),
        (CAMERAS[0], np.zeros(3, np.uint8)),
        ("observation/joint_position", np.zeros(6)),
        (CAMERAS[0], np.zeros((1, 4, HEIGHT, WIDTH, 3), np.uint8)),
        ("observation/joint_position", np.zeros(7, bool)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, array: np.ndarray | None) -> None:
    arrays = seen(0)
    if array is None:
        del arrays[name]
    else:
        arrays[name] = array
    with pytest.raises(RequestRefused) as caught:
        Robot(load(), "a").step(arrays)
    assert (caught.value.field, caught.value.code) == (name, "bad_observation")


@pytest.mark.parametrize("options", [{"chunk_ms": -1}, {"prompt_commands": 1}, {"nothing": 1}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    (key,) = options
    with pytest.raises(RequestRefused, match=key):
        parse_options(options)
