"""Training cameras are keyboard cameras."""

from __future__ import annotations

import numpy as np
import pytest

from training.demo_world.scene import OBJECTS, PERIOD_M
from training.demo_world.trajectories import (
    KEYS,
    METRES_PER_UNIT,
    media_poses,
    rotations,
    sample_keys,
    sample_starts,
    walk,
)
from worldmodel.lingbot.controls import Action
from worldmodel.lingbot.poses import key_step, rotation_x, rotation_y


@pytest.mark.parametrize("seed", range(4))
def test_many_walks_at_once_equal_one_key_step_after_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys_BTK = rng.random((3, 80, len(KEYS))) < 0.3
    start_B2, yaw_B, pitch_B = rng.normal(size=(3, 2)), rng.normal(size=3), rng.normal(size=3) * 0.2
    cameras = walk(keys_BTK, start_B2, yaw_B, pitch_B)
    for index in range(3):
        pose = np.eye(4)
        pose[:3, :3] = rotation_y(yaw_B[index]) @ rotation_x(pitch_B[index])
        pose[[0, 2], 3] = start_B2[index]
        pitch = pitch_B[index]
        for frame in range(80):
            held = [Action(key) for key, down in zip(KEYS, keys_BTK[index, frame], strict=True) if down]
            pose, pitch = key_step(pose, pitch, held)
            # A key step divides by the length plus 1e-6, which adds up over a walk.
            np.testing.assert_allclose(cameras.position[index, frame], pose[[0, 2], 3], atol=1e-5)
            rotation = rotations(cameras.yaw[index, frame], cameras.pitch[index, frame])
            np.testing.assert_allclose(rotation, pose[:3, :3], atol=1e-9)


def test_media_poses_are_the_first_latent_frame_and_four_between_each_two() -> None:
    rng = np.random.default_rng(0)
    cameras = walk(sample_keys(rng, 2, 5), sample_starts(rng, 2), rng.random(2))
    poses = media_poses(cameras)
    assert poses.shape == (2, 17, 12)
    np.testing.assert_allclose(poses[:, ::4, 0], cameras.position[..., 0] * METRES_PER_UNIT, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(poses[:, 2, :3], (poses[:, 0, :3] + poses[:, 4, :3]) / 2, atol=1e-5)


def test_scripts_hold_turns_of_a_full_circle_and_all_keys() -> None:
    keys = sample_keys(np.random.default_rng(1), 64, 200)
    assert keys.any(axis=(0, 1)).all()
    turning = keys[..., KEYS.index("j")] | keys[..., KEYS.index("l")]
    longest = max(len(run) for walk_ in turning for run in "".join("x" if t else " " for t in walk_).split())
    assert longest >= 60


def test_no_walk_starts_inside_an_object() -> None:
    starts = sample_starts(np.random.default_rng(2), 500) * METRES_PER_UNIT
    offset = starts[:, None] - OBJECTS[None, :, 1:3]
    offset -= PERIOD_M * np.round(offset / PERIOD_M)
    assert (np.linalg.norm(offset, axis=-1) > OBJECTS[:, 5]).all()
