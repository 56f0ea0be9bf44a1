"""Training cameras are keyboard cameras."""

from __future__ import annotations

import numpy as np
import pytest

from training.demo_world.scene import OBJECTS, PERIOD_M
from training.demo_world.trajectories import (
    KEYS,
    MAX_ASTRAY_PITCH_RAD,
    MAX_ASTRAY_YAW_RAD,
    METRES_PER_UNIT,
    astray,
    media_poses,
    rotations,
    sample_headings,
    sample_keys,
    sample_starts,
    walk,
)
from worldmodel.lingbot.controls import Action
from worldmodel.lingbot.poses import PITCH_STEP_RAD, YAW_STEP_RAD, key_step, rotation_x, rotation_y


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


def test_all_headings_of_walks_are_whole_steps_of_a_key() -> None:
    rng = np.random.default_rng(3)
    cameras = walk(sample_keys(rng, 64, 100), sample_starts(rng, 64), sample_headings(rng, 64))
    steps = cameras.yaw / YAW_STEP_RAD
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-9)
    assert set(np.round(steps).astype(int).flatten() % 60) == set(range(60))


def test_walks_gone_astray_are_off_by_chunks_and_never_as_far_as_half_a_step_of_a_key() -> None:
    rng = np.random.default_rng(4)
    cameras = walk(sample_keys(rng, 200, 29), sample_starts(rng, 200), sample_headings(rng, 200))
    gone = astray(rng, cameras, 3)
    off = {
        "yaw": (gone.yaw - cameras.yaw) / MAX_ASTRAY_YAW_RAD,
        "pitch": (gone.pitch - cameras.pitch) / MAX_ASTRAY_PITCH_RAD,
        "x": (gone.position - cameras.position)[..., 0],
    }
    for values in off.values():
        assert (values[:, 0] == 0).all()
        # The last chunk of these walks has two frames.
        np.testing.assert_allclose(values[:, 1:27], values[:, [1, 2, *np.repeat(np.arange(3, 27, 3), 3)]], atol=1e-9)
        assert abs(values[:, 1:].mean()) < 0.1 * values.std()
    for name in ("yaw", "pitch"):
        assert np.abs(off[name]).max() <= 1 + 1e-9
        assert off[name][:, 3:].std() == pytest.approx(3**-0.5, rel=0.1)
        # One half of the walks wanders, and is off by much the same in two chunks in a row.
        apart = np.abs(off[name][:, 6] - off[name][:, 3])
        assert 0.5 < (apart < 0.6).mean() < 0.9
    assert MAX_ASTRAY_YAW_RAD < YAW_STEP_RAD / 2
    assert MAX_ASTRAY_PITCH_RAD < PITCH_STEP_RAD / 2
    assert off["x"][:, 3:].std() * METRES_PER_UNIT == pytest.approx(0.02, rel=0.1)
