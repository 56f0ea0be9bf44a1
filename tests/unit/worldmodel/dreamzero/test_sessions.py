"""Sessions of robots side by side: no cross-talk, nothing left of a failed call, restarts where they belong."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvcache.transaction import ChunkTransaction
from tests.support.dreamzero_checkpoint import camera_frames, start_worker, tiny_config, write_checkpoint
from tests.support.dreamzero_sessions import Answer, call, close_robot, open_robot, reset_robot, runtime_of
from worldmodel.dreamzero.adapter import DreamZeroAdapter, create_adapter
from worldmodel.dreamzero.observation_vae import ObservationVAE
from worldmodel.dreamzero.sampler import DreamZeroSampler
from worldmodel.dreamzero.transformer import DreamZeroTransformer
from worldmodel.errors import RequestRefused, TickRolledBack
from worldmodel.messages import MediaFormat
from worldmodel.runtime import Runtime

NUM_CALLS = 5
"""A whole window and the restart after it."""

PROMPTS = ("Close the drawer.", "Pick up the red block and put it in the bowl")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> DreamZeroAdapter:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return create_adapter(start_worker(folder, computed_steps=5), lambda stage, fraction, detail: None)


def make_runtime(adapter: DreamZeroAdapter, *, sessions: int = 2) -> Runtime:
    adapter._requested_sessions = sessions
    return runtime_of(adapter, start_worker(Path("golden"), requested_sessions=sessions))


def observe(robot: int, index: int) -> dict[str, npt.NDArray[Any]]:
    """Return what a robot sees in its n-th call: one frame first, then four."""
    rng = np.random.default_rng([robot, index])
    first = 40 * robot + 4 * index
    frames = camera_frames([first] if index == 0 else list(range(first, first + 4)))
    states = {"joint_position": rng.uniform(-1, 1, 7), "gripper_position": rng.uniform(0, 1, 1)}
    return {**frames, **{f"observation/{name}": values for name, values in states.items()}}


def prompt_of(robot: int, index: int) -> str:
    """Two robots change their task on the way."""
    return PROMPTS[(robot + (index >= 3 and robot % 2)) % 2]


def act(runtime: Runtime, name: str, robot: int, index: int) -> Answer:
    return call(runtime, name, index, observe(robot, index), prompt_of(robot, index))


@pytest.fixture(scope="module")
def alone(adapter: DreamZeroAdapter) -> Callable[[int], list[Answer]]:
    """What each robot gets when there is no other; worked out once."""

    @functools.cache
    def answers(robot: int) -> list[Answer]:
        runtime = make_runtime(adapter)
        open_robot(runtime, "a")
        return [act(runtime, "a", robot, index) for index in range(NUM_CALLS)]

    return answers


Alone = Callable[[int], list[Answer]]


def assert_same(got: Answer, want: Answer) -> None:
    np.testing.assert_array_equal(got.actions, want.actions)
    assert torch.equal(got.latents, want.latents)


def test_four_robots_in_turns_get_what_each_gets_alone(adapter: DreamZeroAdapter, alone: Alone) -> None:
    expected = [alone(robot) for robot in range(4)]
    runtime = make_runtime(adapter, sessions=4)
    for robot in range(4):
        open_robot(runtime, f"robot-{robot}")
    rng = np.random.default_rng(0)
    counts = [0] * 4
    while min(counts) < NUM_CALLS:
        robot = int(rng.choice([robot for robot in range(4) if counts[robot] < NUM_CALLS]))
        assert_same(act(runtime, f"robot-{robot}", robot, counts[robot]), expected[robot][counts[robot]])
        counts[robot] += 1
    assert not np.array_equal(expected[0][1].actions, expected[2][1].actions)


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("as ordered")


FAILURES = {
    "text": (DreamZeroTransformer, "publish_text"),
    "image": (DreamZeroTransformer, "publish_image"),
    "encode": (ObservationVAE, "encode_clip"),
    "commit": (DreamZeroTransformer, "commit"),
    "denoise": (DreamZeroSampler, "denoise"),
    "end": (ChunkTransaction, "commit"),
}


@pytest.mark.parametrize("where", sorted(FAILURES))
@pytest.mark.parametrize("failed_call", [2, 3])
def test_a_failed_call_leaves_nothing(
    adapter: DreamZeroAdapter, alone: Alone, where: str, failed_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call 2 appends. Robot 1 changes its prompt at call 3, so that a restart fails with history in place."""
    expected = alone(1)
    runtime = make_runtime(adapter)
    open_robot(runtime, "a")
    for index in range(failed_call):
        act(runtime, "a", 1, index)
    before = runtime.memory()
    with monkeypatch.context() as patch:
        patch.setattr(*FAILURES[where], fail)
        if where in ("text", "image") and failed_call == 2:
            # An append touches neither text nor image.
            assert_same(act(runtime, "a", 1, failed_call), expected[failed_call])
            return
        with pytest.raises(TickRolledBack):
            act(runtime, "a", 1, failed_call)
    after = runtime.memory()
    assert (after.free_pages, after.sessions) == (before.free_pages, before.sessions)
    for index in (failed_call, failed_call + 1):
        assert_same(act(runtime, "a", 1, index), expected[index])


def test_a_failed_restart_leaves_the_old_run_to_go_on(
    adapter: DreamZeroAdapter, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(0)
    runtime = make_runtime(adapter)
    open_robot(runtime, "a")
    for index in range(3):
        act(runtime, "a", 0, index)
    with monkeypatch.context() as patch:
        patch.setattr(DreamZeroSampler, "denoise", fail)
        with pytest.raises(TickRolledBack):
            call(runtime, "a", 3, observe(0, 3), "another task")
    assert_same(act(runtime, "a", 0, 3), expected[3])


def test_reset_and_close_free_everything_at_once(adapter: DreamZeroAdapter) -> None:
    runtime = make_runtime(adapter)
    total = runtime.memory().free_pages
    open_robot(runtime, "a")
    first = [act(runtime, "a", 2, index) for index in range(3)]
    assert runtime.memory().free_pages < total
    reset_robot(runtime, "a")
    assert runtime.memory().free_pages == total
    for index, answer in enumerate(first):
        assert_same(act(runtime, "a", 2, index), answer)
    close_robot(runtime, "a")
    assert (runtime.memory().free_pages, runtime.memory().sessions) == (total, 0)


def test_connect_call_drop_cycles_leave_no_page(adapter: DreamZeroAdapter) -> None:
    runtime = make_runtime(adapter)
    total = runtime.memory().free_pages
    for cycle in range(5):
        open_robot(runtime, f"robot-{cycle}")
        act(runtime, f"robot-{cycle}", 0, 0)
        close_robot(runtime, f"robot-{cycle}")
        assert runtime.memory().free_pages == total


def committed_frames(adapter: DreamZeroAdapter, calls: list[Mapping[str, Any]], prompts: list[str]) -> list[int]:
    """Return how many frames are committed after each call."""
    runtime, seen = make_runtime(adapter), []
    open_robot(runtime, "a")
    for index, (arrays, prompt) in enumerate(zip(calls, prompts, strict=True)):
        call(runtime, "a", index, arrays, prompt)
        seen.append(runtime._cache.num_latent_frames("a"))
    return seen


def test_runs_begin_anew_where_the_window_or_the_prompt_ends(adapter: DreamZeroAdapter) -> None:
    calls = [observe(0, index) for index in range(9)]
    assert committed_frames(adapter, calls, ["a"] * 9) == [1, 3, 5, 7, 1, 3, 5, 7, 1]
    assert committed_frames(adapter, calls[:5], ["a", "a", "b", "b", "B"]) == [1, 3, 1, 3, 5]


@pytest.mark.parametrize(
    ("max_chunk_size", "frames"), [(1, [1, 1, 1, 1]), (2, [1, 3, 1, 3]), (3, [1, 3, 5, 1]), (-1, [1, 1, 1, 1])]
)
def test_the_window_is_that_of_the_checkpoint(tmp_path: Path, max_chunk_size: int, frames: list[int]) -> None:
    network = tiny_config()["action_head_cfg"]["config"]["diffusion_model_cfg"] | {"max_chunk_size": max_chunk_size}
    folder = write_checkpoint(tmp_path, diffusion_model_cfg=network)
    adapter = create_adapter(start_worker(folder, computed_steps=5), lambda stage, fraction, detail: None)
    assert committed_frames(adapter, [observe(0, index) for index in range(4)], ["a"] * 4) == frames


def test_one_frame_a_call_is_padded_to_four_and_appended(adapter: DreamZeroAdapter) -> None:
    single = [{**observe(0, 0), **camera_frames([index])} for index in range(3)]
    assert committed_frames(adapter, single, ["a"] * 3) == [1, 3, 5]


@pytest.mark.parametrize(
    ("silent", "said"),
    [
        (["wrist_image_left"], "got none of observation/wrist_image_left"),
        (
            ["exterior_image_1_left", "wrist_image_left"],
            "got none of observation/exterior_image_1_left and observation/wrist_image_left",
        ),
        (
            ["exterior_image_0_left", "exterior_image_1_left", "wrist_image_left"],
            "expected pictures of every camera (observation/exterior_image_0_left, ",
        ),
    ],
)
def test_a_request_that_lacks_a_camera_is_refused_and_forgotten(
    adapter: DreamZeroAdapter, alone: Alone, silent: list[str], said: str
) -> None:
    runtime = make_runtime(adapter)
    open_robot(runtime, "a")
    for index in range(2):
        arrays = observe(0, index)
        lacking = {key: array for key, array in arrays.items() if key.removeprefix("observation/") not in silent}
        other = {"observation/image": arrays["observation/wrist_image_left"]}
        with pytest.raises(RequestRefused, match=re.escape(said)) as caught:
            call(runtime, "a", index, lacking | other, PROMPTS[1])
        assert (caught.value.code, caught.value.field) == ("bad_observation", f"observation/{silent[0]}")
        assert_same(act(runtime, "a", 0, index), alone(0)[index])


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("wrist_image_left", np.zeros((20, 32, 3), np.float32), r"expected uint8 \[20, 32, 3\]"),
        ("wrist_image_left", np.zeros((32, 20, 3), np.uint8), r"expected pictures of \[20, 32, 3\], got \[32, 20, 3\]"),
        ("wrist_image_left", np.zeros((0, 20, 32, 3), np.uint8), "1 to 64 frames, got 0"),
        ("wrist_image_left", np.zeros((65, 20, 32, 3), np.uint8), "1 to 64 frames, got 65"),
        ("joint_position", np.zeros(6), "expected 7 numbers"),
        ("joint_position", np.full(7, np.nan), "expected finite numbers"),
        ("joint_position", np.full(7, -1e39), "expected finite numbers"),
        ("gripper_position", np.array([True]), "expected 1 number, got bool"),
    ],
)
def test_a_bad_observation_is_refused_and_forgotten(
    adapter: DreamZeroAdapter, alone: Alone, key: str, value: npt.NDArray[Any], problem: str
) -> None:
    expected = alone(0)
    runtime = make_runtime(adapter)
    open_robot(runtime, "a")
    act(runtime, "a", 0, 0)
    with pytest.raises(RequestRefused, match=problem) as caught:
        call(runtime, "a", 1, {**observe(0, 1), f"observation/{key}": value}, PROMPTS[1])
    assert (caught.value.code, caught.value.field) == ("bad_observation", f"observation/{key}")
    assert_same(act(runtime, "a", 0, 1), expected[1])


def test_missing_states_are_zero_and_unknown_keys_pass(adapter: DreamZeroAdapter) -> None:
    frames = camera_frames([3])
    zeros = {"observation/joint_position": np.zeros(7, np.float32), "observation/gripper_position": np.zeros(1)}
    other = {"observation/cartesian_position": np.ones(6)}
    answers = []
    for arrays in ({**frames, **zeros}, frames, {**frames, **other}):
        runtime = make_runtime(adapter)
        open_robot(runtime, "a")
        answers.append(call(runtime, "a", 0, arrays, "a"))
    assert_same(answers[1], answers[0])
    assert_same(answers[2], answers[0])


def test_only_actions_and_latents_are_made(adapter: DreamZeroAdapter) -> None:
    with pytest.raises(RequestRefused, match="expected actions or latent, got yuv420p"):
        open_robot(make_runtime(adapter), "a", outputs=(MediaFormat.YUV420,))


def test_the_seed_of_the_session_counts_if_asked_for(tmp_path: Path) -> None:
    start = start_worker(write_checkpoint(tmp_path), computed_steps=5, noise_seed="session")
    adapter = create_adapter(start, lambda stage, fraction, detail: None)
    answers = []
    for seed in (1, 2, 1):
        runtime = make_runtime(adapter)
        open_robot(runtime, "a", seed=seed)
        answers.append(act(runtime, "a", 0, 0))
    assert_same(answers[2], answers[0])
    assert not np.array_equal(answers[1].actions, answers[0].actions)


def test_warm_up_runs_every_start_frame(adapter: DreamZeroAdapter) -> None:
    runtime = make_runtime(adapter)
    runtime.warm_up(lambda stage, fraction, detail: None)
    assert runtime.memory().sessions == 0
