"""Camera paths from files: refusals, resampling, and the control they become."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.lingbot_camera import relative_path
from worldmodel.errors import RequestRefused
from worldmodel.lingbot.controls import TRAJECTORY_SCHEMA, parse_control
from worldmodel.lingbot.poses import quaternions_from_rotations, rotation_x, rotation_y, rotations_from_quaternions
from worldmodel.lingbot.trajectory import (
    CameraClip,
    interpolate,
    load_clip,
    num_latent_frames,
    resample,
    trajectory_control,
)


def turning(count: int) -> CameraClip:
    """A clip that turns a full circle and more, and moves with its index."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    for index in range(count):
        poses[index, :3, :3] = rotation_y(0.2 * index) @ rotation_x(0.01 * index)
        poses[index, :3, 3] = (index, 2 * index, -index)
    rows = np.array([[500.0 + index, 510.0, 416.0, 240.0] for index in range(count)])
    return CameraClip(poses_n44=poses, intrinsics_n4=rows)


def write(folder: Path, clip: CameraClip, dtype: type = np.float32) -> Path:
    np.save(folder / "poses.npy", clip.poses_n44.astype(dtype))
    np.save(folder / "intrinsics.npy", clip.intrinsics_n4.astype(dtype))
    return folder


def refuse(folder: Path, name: str, text: str, **options: int) -> None:
    with pytest.raises(RequestRefused, match=text) as caught:
        load_clip(folder, **options)
    assert (caught.value.code, caught.value.field) == ("bad_trajectory", name)
    assert str(folder) not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_clip_is_read_as_float64(tmp_path: Path, dtype: type) -> None:
    clip = load_clip(write(tmp_path, turning(5), dtype))
    assert clip.poses_n44.dtype == np.float64
    assert np.abs(clip.poses_n44 - turning(5).poses_n44).max() < 1e-6
    assert np.array_equal(clip.intrinsics_n4, turning(5).intrinsics_n4)


def test_fortran_order_and_one_row_of_intrinsics_are_understood(tmp_path: Path) -> None:
    np.save(tmp_path / "poses.npy", np.asfortranarray(turning(4).poses_n44))
    np.save(tmp_path / "intrinsics.npy", np.array([[1.0, 2.0, 3.0, 4.0]]))
    clip = load_clip(tmp_path)
    assert np.array_equal(clip.poses_n44, turning(4).poses_n44)
    assert clip.intrinsics_n4.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 4


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    write(real, turning(4))
    linked_folder = tmp_path / "linked"
    linked_folder.symlink_to(real)
    refuse(linked_folder, "folder", "cannot be opened")
    (real / "poses.npy").rename(real / "other.npy")
    (real / "poses.npy").symlink_to("other.npy")
    refuse(real, "poses.npy", "cannot be opened")
    (real / "poses.npy").unlink()
    os.mkfifo(real / "poses.npy")
    refuse(real, "poses.npy", "regular file")
    (real / "poses.npy").unlink()
    refuse(real, "poses.npy", "No such file")
    (real / "poses.npy").mkdir()
    refuse(real, "poses.npy", "regular file")


def test_links_are_followed_for_who_may_read_the_files_anyway(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real", turning(4))
    (tmp_path / "real" / "poses.npy").rename(tmp_path / "other.npy")
    (tmp_path / "real" / "poses.npy").symlink_to("../other.npy")
    (tmp_path / "linked").symlink_to("real")
    assert len(load_clip(tmp_path / "linked", follows_links=True).poses_n44) == 4
    (tmp_path / "other.npy").unlink()
    refuse(tmp_path / "linked", "poses.npy", "No such file", follows_links=True)
    os.mkfifo(tmp_path / "other.npy")
    refuse(tmp_path / "linked", "poses.npy", "regular file", follows_links=True)


def test_files_that_are_not_plain_bounded_arrays_are_refused(tmp_path: Path) -> None:
    write(tmp_path, turning(8))
    refuse(tmp_path, "poses.npy", "1 to 7 rows, got 8", max_poses=7)
    good = (tmp_path / "poses.npy").read_bytes()
    for data, text in [
        (b"", "an .npy file"),
        (b"\x93NUMPY\x03\x00" + good[8:], "version 1.0 or 2.0, got 3.0"),
        (good[:-4], "bytes of data, got"),
        (good + b"\0", "bytes of data, got"),
        (good[:128] + b"\0" * 10_000_000, "at most"),
        (b"\x93NUMPY\x02\x00" + (1 << 20).to_bytes(4, "little") + b" " * 8000, "short header"),
    ]:
        (tmp_path / "poses.npy").write_bytes(data)
        refuse(tmp_path, "poses.npy", text, max_poses=100)


@pytest.mark.parametrize(
    ("poses", "text"),
    [
        (np.array([{"a": 1}] * 4, dtype=object), r"float32 or float64, got '\|O'"),
        (np.tile(np.eye(4, dtype=np.int64), (4, 1, 1)), "float32 or float64, got '<i8'"),
        (np.zeros((4, 3, 4)), r"expected the shape \[N, 4, 4\], got \[4, 3, 4\]"),
        (np.zeros((0, 4, 4)), "got 0"),
        (np.tile(np.diag([1.0, 1.0, -1.0, 1.0]), (4, 1, 1)), "pose 0: .*mirrored"),
        (np.tile(np.eye(4) * 1.1, (4, 1, 1)), "rigid motion within 0.001"),
        (np.full((4, 4, 4), np.nan), "finite numbers"),
    ],
)
def test_arrays_that_are_not_poses_are_refused(tmp_path: Path, poses: np.ndarray, text: str) -> None:
    write(tmp_path, turning(4))
    np.save(tmp_path / "poses.npy", poses, allow_pickle=True)
    refuse(tmp_path, "poses.npy", text)


def test_intrinsics_must_fit_the_poses(tmp_path: Path) -> None:
    write(tmp_path, turning(4))
    np.save(tmp_path / "intrinsics.npy", np.ones((3, 4)))
    refuse(tmp_path, "intrinsics.npy", "1 row or 4, one a pose, got 3")
    for row in ([0.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0], [1e-300, 1.0, 1.0, 1.0], [1.0, 7e4, 1.0, 1.0]):
        np.save(tmp_path / "intrinsics.npy", np.array([row]))
        refuse(tmp_path, "intrinsics.npy", "expected focal lengths from 0.001 to 65536 pixels")
    np.save(tmp_path / "intrinsics.npy", np.array([[1.0, 1.0, 1.0, -7e4]]))
    refuse(tmp_path, "intrinsics.npy", "expected principal points within 65536 pixels")


@pytest.mark.parametrize(
    ("media_frames", "poses", "chunk", "want"),
    [(81, 1000, 3, 21), (81, 81, 4, 20), (117, 269, 3, 30), (361, 361, 3, 90), (269, 269, 3, 66), (8, 8, 3, 0)],
)
def test_latent_frames_are_whole_chunks(media_frames: int, poses: int, chunk: int, want: int) -> None:
    assert num_latent_frames(media_frames, poses, chunk) == want


def test_a_compatible_length_takes_each_fourth_pose() -> None:
    clip = turning(40)
    latent = resample(clip, 33, 3)
    assert np.abs(latent.poses_n44 - clip.poses_n44[:33:4]).max() < 1e-12
    assert np.abs(latent.intrinsics_n4 - clip.intrinsics_n4[:33:4]).max() < 1e-9


def test_another_length_is_stretched_over_whole_chunks() -> None:
    latent = resample(turning(17), 17, 4)
    assert len(latent.poses_n44) == 4
    assert latent.poses_n44[:, 0, 3] == pytest.approx([0, 16 / 3, 32 / 3, 16])


def test_a_clip_shorter_than_a_chunk_is_refused() -> None:
    with pytest.raises(RequestRefused, match="at least 9 poses for one chunk, got 8"):
        resample(turning(8), 81, 3)


def test_interpolation_turns_evenly_even_past_half_a_turn() -> None:
    clip = turning(40)
    between = interpolate(clip, np.arange(0.0, 39.0, 0.25))
    turns = np.einsum("nji,njk->nik", between.poses_n44[:-1, :3, :3], between.poses_n44[1:, :3, :3])
    angles = np.arccos(np.clip((np.trace(turns, axis1=1, axis2=2) - 1) / 2, -1, 1)).reshape(-1)
    for start in range(0, len(angles) - 3, 4):
        assert angles[start : start + 4] == pytest.approx([angles[start]] * 4, abs=1e-7)
    assert between.poses_n44[1, :3, 3] == pytest.approx([0.25, 0.5, -0.25])


def test_quaternions_survive_half_turns() -> None:
    rng = np.random.default_rng(1)
    half_turns = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0.6, 0.8, 0, 1e-9], [0, 0, 0, 1]])
    quaternions = np.concatenate([half_turns, rng.normal(size=(200, 4))])
    rotations = rotations_from_quaternions(quaternions)
    got = quaternions_from_rotations(rotations)
    assert np.abs(rotations_from_quaternions(got) - rotations).max() < 1e-12
    assert (np.einsum("ni,ni->n", got[1:], got[:-1]) >= 0).all()


def test_relative_poses_begin_with_the_identity_and_have_a_largest_step_of_one() -> None:
    relative_n44 = relative_path(turning(6))
    assert np.array_equal(relative_n44[0], np.eye(4))
    assert np.linalg.norm(relative_n44[:, :3, 3], axis=-1).max() == pytest.approx(1.0)
    still = np.tile(turning(6).poses_n44[3], (4, 1, 1))
    still_path = CameraClip(poses_n44=still, intrinsics_n4=turning(4).intrinsics_n4)
    assert np.array_equal(relative_path(still_path)[:, :3, 3], np.zeros((4, 3)))


def test_the_control_of_a_clip_is_accepted(tmp_path: Path) -> None:
    clip = resample(load_clip(write(tmp_path, turning(33))), 33, 3)
    assert parse_control("camera", TRAJECTORY_SCHEMA, trajectory_control(clip)).startswith(b'{"poses":[[[')
