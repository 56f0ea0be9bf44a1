"""One suite over every robot model: what the runtime, and so the server, may rely on. CPU, tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.dreamzero_checkpoint import start_worker, write_checkpoint
from worldmodel.catalog import ENTRIES, ModelKind, lookup, options_parser, resolve
from worldmodel.errors import RequestRefused
from worldmodel.messages import (
    CloseSession,
    MediaFormat,
    OpenSession,
    RequestId,
    ResetSession,
    RobotInfo,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.observations import describe_array
from worldmodel.runtime import Runtime

Observation = dict[str, npt.NDArray[Any]]


def dreamzero_start(folder: Path) -> StartWorker:
    return start_worker(write_checkpoint(folder), computed_steps=5)


def fake_start(folder: Path) -> StartWorker:
    return StartWorker(
        model="fake_robot",
        checkpoint="none",
        width=64,
        height=32,
        fps=5,
        requested_sessions=2,
        model_options=options_parser("fake_robot")({}),
    )


STARTS: dict[str, Callable[[Path], StartWorker]] = {"dreamzero": dreamzero_start, "fake_robot": fake_start}


@pytest.fixture(scope="module", params=sorted(STARTS))
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """A runtime that has warmed up."""
    start = STARTS[request.param](tmp_path_factory.mktemp(request.param))
    return Runtime.load(start, lambda stage, fraction, detail: None)


@pytest.fixture
def robot(runtime: Runtime) -> RobotInfo:
    robot = runtime.info("any").robot
    assert robot is not None
    return robot


def observe(robot: RobotInfo, index: int) -> Observation:
    rng = np.random.default_rng(index)
    shape = (1 if index == 0 else 4, robot.image_height, robot.image_width, 3)
    cameras = {key: rng.integers(0, 256, shape, np.uint8) for key in robot.cameras}
    return {**cameras, **{state.name: rng.uniform(-1, 1, state.num_dims) for state in robot.states}}


class Session:
    """One robot; closed at the end of the test whatever happens."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name, self.index = runtime, SessionId(name), 0
        request_id = RequestId("open")
        runtime.open(
            OpenSession(request_id=request_id, session_id=self.name, prompt="", seed=0, outputs=(MediaFormat.ACTIONS,)),
            None,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close(CloseSession(request_id=RequestId("close"), session_id=self.name))

    def act(self, arrays: Observation, prompt: str | None = "move") -> npt.NDArray[np.float32]:
        tick = Tick(
            request_id=RequestId(f"tick-{self.index}"),
            session_id=self.name,
            chunk_index=self.index,
            prompt=prompt,
            arrays=tuple(describe_array(key, array) for key, array in arrays.items()),
        )
        chunk = self.runtime.tick(tick, arrays)
        self.index += 1
        media, (actions,) = chunk.to_host()
        assert (chunk.committed.num_media_frames, media.num_media_frames) == (0, 0)
        assert [part.format for part in media.parts] == [MediaFormat.ACTIONS]
        return np.frombuffer(actions, "<f4").reshape(media.parts[0].shape)

    def reset(self) -> None:
        self.runtime.reset(ResetSession(request_id=RequestId("reset"), session_id=self.name), None)
        self.index = 0


def test_every_robot_model_of_the_catalog_is_here() -> None:
    assert set(STARTS) == {entry.name for entry in ENTRIES if entry.kind is ModelKind.ROBOT}
    for name in STARTS:
        assert resolve(lookup(name).control_schemas)() == {}


def test_actions_have_the_announced_shape_and_depend_on_what_is_seen(runtime: Runtime, robot: RobotInfo) -> None:
    with Session(runtime, "a") as session:
        first, second = (session.act(observe(robot, index)) for index in range(2))
    assert first.shape == second.shape == (robot.action_horizon, robot.action_dims)
    assert np.isfinite(first).all()
    assert not np.array_equal(first, second)


def test_a_reset_begins_a_new_episode_and_frees_all_pages(runtime: Runtime, robot: RobotInfo) -> None:
    total = runtime.memory().free_pages
    with Session(runtime, "a") as session:
        before = [session.act(observe(robot, index)) for index in range(2)]
        session.reset()
        assert runtime.memory().free_pages == total
        after = [session.act(observe(robot, index)) for index in range(2)]
    np.testing.assert_array_equal(before, after)
    assert runtime.memory().free_pages == total


def test_two_robots_do_not_see_each_other(runtime: Runtime, robot: RobotInfo) -> None:
    def both(index: int) -> tuple[Observation, Observation]:
        return observe(robot, index), observe(robot, 100 * (index > 0) + index)

    with Session(runtime, "alone") as session:
        alone = [session.act(both(index)[0]) for index in range(2)]
    with Session(runtime, "a") as one, Session(runtime, "b") as other:
        together = []
        for index in range(2):
            mine, theirs = both(index)
            other.act(theirs, "something else")
            together.append(one.act(mine))
    np.testing.assert_array_equal(alone, together)


def test_a_request_that_can_not_be_read_is_refused_by_name(runtime: Runtime, robot: RobotInfo) -> None:
    with Session(runtime, "a") as session:
        arrays = observe(robot, 0)
        key = robot.cameras[0]
        with pytest.raises(RequestRefused) as caught:
            session.act({**arrays, key: arrays[key].astype(np.float32)})
        assert (caught.value.code, caught.value.field) == ("bad_observation", key)
        refused_then = session.act(arrays)
    with Session(runtime, "b") as session:
        np.testing.assert_array_equal(session.act(observe(robot, 0)), refused_then)


def test_a_robot_needs_no_image_and_gives_no_pictures(runtime: Runtime) -> None:
    with pytest.raises(RequestRefused) as caught:
        runtime.open(
            OpenSession(
                request_id=RequestId("open"),
                session_id=SessionId("a"),
                prompt="",
                seed=0,
                outputs=(MediaFormat.RGB24,),
            ),
            None,
        )
    assert caught.value.code == "bad_outputs"
    assert runtime.memory().sessions == 0
