"""Golden case 4: keys -> poses (1e-9 in float64), two translation scales and packed rays (1e-5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.lingbot_golden import assert_close, manifest, tensors
from worldmodel.lingbot.camera import pack, rays
from worldmodel.lingbot.config import CameraScale, LingBotOptions, ReferenceIntrinsics
from worldmodel.lingbot.controls import ACTIONS_SCHEMA, parse_control
from worldmodel.lingbot.poses import Float64
from worldmodel.lingbot.reducer import CameraPlan, CameraReducer
from worldmodel.messages import Control, ControlEvent

CASE = tensors("case4_keyboard")
SCRIPT: list[list[list[str]]] = manifest()["keyboard_script_blocks"]


def event(event_id: int, data: dict[str, object]) -> ControlEvent:
    control = Control(track="camera", schema=ACTIONS_SCHEMA, data=parse_control("camera", ACTIONS_SCHEMA, data))
    return ControlEvent(event_id=event_id, controls=(control,))


def size() -> tuple[int, int]:
    """Return the pixel width and height of the packed tensors."""
    _, _, height, width = next(tensor for name, tensor in CASE.items() if ".packed" in name).shape
    return width * 8, height * 8


def run_script(options: LingBotOptions) -> list[CameraPlan]:
    """Send each chunk's key sets as one script control."""
    reducer = CameraReducer(options, *size())
    state, plans = reducer.initial(), []
    for index, frames in enumerate(SCRIPT):
        plans.append(reducer.prepare(state, [event(index, {"mode": "script", "frames": frames})], len(frames)))
        state = plans[-1].state
    return plans


def difference(got: Float64, want: torch.Tensor) -> float:
    assert got.shape == tuple(want.shape)
    return float(np.abs(got - want.double().numpy()).max())


def test_lingbot_script_poses_and_pitch() -> None:
    plans = run_script(LingBotOptions())
    assert difference(np.concatenate([plan.poses_n44 for plan in plans]), CASE["script.absolute_c2w_f64"]) <= 1e-9
    pitch = np.array([plan.state.pitch_rad for plan in plans])
    assert difference(pitch, CASE["script.pitch_after_block_rad"]) <= 1e-9
    assert [list(map(set, plan.keys)) for plan in plans] == [list(map(set, frames)) for frames in SCRIPT]


def test_lingbot_one_long_script_gives_the_same_poses() -> None:
    reducer = CameraReducer(LingBotOptions(), *size())
    frames = [keys for chunk in SCRIPT for keys in chunk]
    state, events, poses = reducer.initial(), [event(0, {"mode": "script", "frames": frames})], []
    for chunk in SCRIPT:
        plan = reducer.prepare(state, events, len(chunk))
        state, events = plan.state, []
        poses.append(plan.poses_n44)
    assert difference(np.concatenate(poses), CASE["script.absolute_c2w_f64"]) <= 1e-9


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (CameraScale.UNIT, "script.relative_unit_0p05"),
        (CameraScale.CHUNK_MAX, "script.relative_maxnorm_per_block"),
        (None, "script.relative_maxnorm_per_block"),
    ],
)
def test_lingbot_script_relative_poses(scale: CameraScale | None, name: str) -> None:
    plans = run_script(LingBotOptions(camera_scale=scale))
    assert difference(np.concatenate([plan.relative_n44 for plan in plans]), CASE[name]) <= 1e-5


@pytest.mark.parametrize("name", sorted(name for name in CASE if ".packed_" in name))
def test_lingbot_script_packed_rays(name: str) -> None:
    index = int(name.split(".")[1].removeprefix("block"))
    scale = CameraScale.UNIT if name.endswith("_unit") else CameraScale.CHUNK_MAX
    plan = run_script(LingBotOptions(camera_scale=scale))[index]
    width, height = size()
    packed = pack(
        rays(
            torch.tensor(plan.relative_n44, dtype=torch.float32),
            torch.tensor(plan.intrinsics_n4, dtype=torch.float32),
            height,
            width,
        )
    )
    assert_close(packed, CASE[name], 1e-5, name)


def test_lingbot_intrinsics_are_500_px_at_the_target_size() -> None:
    width, height = size()
    fx, fy, cx, cy = CASE["script.intrinsics_reference_832x480"].tolist()
    reference = ReferenceIntrinsics(width=832, height=480, fx=fx, fy=fy, cx=cx, cy=cy)
    assert reference.scaled_to(width, height) == pytest.approx(LingBotOptions().default_intrinsics(width, height), 1e-6)


@pytest.mark.parametrize("name", sorted(name for name in CASE if name.startswith("single.")))
def test_lingbot_one_held_key(name: str) -> None:
    key, want = name.split(".")[1], CASE[name]
    reducer = CameraReducer(LingBotOptions(), *size())
    plan = reducer.prepare(reducer.initial(), [event(0, {"mode": "state", "held": [key]})], len(want))
    assert difference(plan.poses_n44, want) <= 1e-9


def test_lingbot_pitch_stops_at_the_clamp() -> None:
    want = CASE["pitch_clamp_25xI.absolute_c2w_f64"]
    reducer = CameraReducer(LingBotOptions(), *size())
    plan = reducer.prepare(reducer.initial(), [event(0, {"mode": "state", "held": ["i"]})], len(want))
    assert difference(plan.poses_n44, want) <= 1e-9
    assert difference(np.array(plan.state.pitch_rad), CASE["pitch_clamp_25xI.pitch_rad"]) <= 1e-9
