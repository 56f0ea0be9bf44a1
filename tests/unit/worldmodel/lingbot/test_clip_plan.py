"""Clips planned before anything is loaded: lengths, sizes, camera paths, options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from worldmodel.clips import MAX_CLIP_MEDIA_FRAMES, ClipPlan, ClipWish
from worldmodel.errors import RequestRefused
from worldmodel.lingbot.clip_plan import plan_clip
from worldmodel.lingbot.poses import rotation_y
from worldmodel.lingbot.trajectory import load_clip, resample


@pytest.fixture
def wish(tmp_path: Path) -> ClipWish:
    write_config(tmp_path, {"num_frames_per_block": 3})
    return ClipWish(
        checkpoint=str(tmp_path),
        options={},
        width=832,
        height=480,
        image_width=1280,
        image_height=720,
        num_media_frames=33,
    )


def write_config(checkpoint: Path, content: object, folder: str = "transformer") -> None:
    (checkpoint / folder).mkdir(exist_ok=True)
    (checkpoint / folder / "config.json").write_text(json.dumps(content))


def write_path(folder: Path, num_poses: int) -> Path:
    poses = np.tile(np.eye(4), (num_poses, 1, 1))
    for index in range(num_poses):
        poses[index, :3, :3] = rotation_y(0.02 * index)
        poses[index, :3, 3] = (0.01 * index * index, 0.0, 0.1 * index)
    folder.mkdir(exist_ok=True)
    np.save(folder / "poses.npy", poses)
    np.save(folder / "intrinsics.npy", np.array([[500.0, 500.0, 416.0, 240.0]]))
    return folder


def refuse(wish: ClipWish, field: str, text: str) -> None:
    with pytest.raises(RequestRefused, match=text) as caught:
        plan_clip(wish)
    assert caught.value.field == field


def path_of(plan: ClipPlan) -> np.ndarray:
    (control,) = plan.controls
    assert control.schema == "lingbot.camera_trajectory.v1"
    return np.array(json.loads(control.data)["poses"])


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("options", "num_media_frames", "num_chunks"),
    [
        ({}, 9, 1),
        ({}, 33, 3),
        ({}, 117, 10),
        ({"preset": "command"}, 13, 1),
        ({"preset": "command"}, 61, 4),
        ({"latent_frames_per_chunk": 1}, 5, 2),
    ],
)
def test_whole_chunks_are_planned(
    wish: ClipWish, options: dict[str, object], num_media_frames: int, num_chunks: int
) -> None:
    plan = plan_clip(replace(wish, options=options, num_media_frames=num_media_frames))
    assert (plan.num_media_frames, plan.num_chunks) == (num_media_frames, num_chunks)
    assert plan.num_media_frames == 4 * plan.num_chunks * plan.latent_frames_per_chunk - 3
    assert (plan.width, plan.height, plan.options, plan.controls) == (832, 480, options, ())


def test_other_lengths_are_refused_with_the_nearest_ones(wish: ClipWish) -> None:
    refuse(replace(wish, num_media_frames=40), "num_media_frames", r"9 \+ 12 k, for example 33 or 45, got 40")
    refuse(replace(wish, num_media_frames=8), "num_media_frames", "at least 9, the first chunk, got 8")
    refuse(replace(wish, num_media_frames=-5, trims=True), "num_media_frames", "at least 9")
    command = replace(wish, options={"preset": "command"}, num_media_frames=33)
    refuse(command, "num_media_frames", r"13 \+ 16 k, for example 29 or 45, got 33")


@pytest.mark.parametrize("trims", [False, True])
def test_a_clip_has_a_longest_length(wish: ClipWish, trims: bool) -> None:
    longest = MAX_CLIP_MEDIA_FRAMES if trims else 99_993
    assert plan_clip(replace(wish, num_media_frames=longest, trims=trims)).num_media_frames == 99_993
    for frames in (MAX_CLIP_MEDIA_FRAMES + 1, 12 * 10**17 + 9, 10**300):
        too_long = replace(wish, num_media_frames=frames, trims=trims)
        refuse(too_long, "num_media_frames", f"at most 100000, got {frames}$")


def test_noise_drawn_at_once_has_a_longest_clip(wish: ClipWish, tmp_path: Path) -> None:
    options: dict[str, object] = {"noise_layout": "official_whole_clip"}
    longest = replace(wish, options=options, num_media_frames=4089)
    assert plan_clip(longest).options["noise_clip_latent_frames"] == 1023
    text = "num_media_frames: expected at most 4089 with noise_layout 'official_whole_clip', got "
    refuse(replace(longest, num_media_frames=4809), "num_media_frames", f"{text}4809")
    refuse(replace(longest, num_media_frames=4110, trims=True), "num_media_frames", f"{text}4101")
    short = write_path(tmp_path / "short", 50)
    assert plan_clip(replace(longest, num_media_frames=9000, trims=True, camera_folder=short)).num_chunks == 4


@pytest.mark.parametrize(("given", "made"), [(9, 9), (44, 33), (45, 45), (81, 81), (361, 357), (360, 357)])
def test_trimming_cuts_to_whole_chunks(wish: ClipWish, given: int, made: int) -> None:
    assert plan_clip(replace(wish, num_media_frames=given, trims=True)).num_media_frames == made


# ---------------------------------------------------------------- the checkpoint's part


def test_the_original_layout_and_random_weights_have_the_published_length(wish: ClipWish, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    write_config(original, {"dim": 5120}, "transformers")
    for checkpoint in (str(original), "random:lingbot-world-v2"):
        assert plan_clip(replace(wish, checkpoint=checkpoint)).latent_frames_per_chunk == 3


def test_a_checkpoint_that_does_not_say_is_refused(wish: ClipWish, tmp_path: Path) -> None:
    refuse(replace(wish, checkpoint=str(tmp_path / "none")), "checkpoint", r"transformer/config\.json")
    for content in ({"num_frames_per_block": "3"}, {"num_frames_per_block": 0}, {"num_frames_per_block": 4097}):
        write_config(tmp_path, content)
        refuse(wish, "checkpoint", "num_frames_per_block")
    for text in ("{", "[" * 100_000):
        (tmp_path / "transformer" / "config.json").write_text(text)
        refuse(wish, "checkpoint", "config.json: is not valid JSON")
    write_config(tmp_path, [])
    refuse(wish, "checkpoint", "config.json: must hold a JSON object, found list")
    refuse(replace(wish, checkpoint="n" * 300), "checkpoint", "cannot be read .File name too long")
    assert plan_clip(replace(wish, options={"latent_frames_per_chunk": 3})).num_chunks == 3


# ---------------------------------------------------------------- sizes


def test_the_size_is_the_forced_one_or_follows_the_image(wish: ClipWish) -> None:
    assert (plan_clip(wish).width, plan_clip(wish).height) == (832, 480)
    follows = plan_clip(replace(wish, follows_image=True))
    assert (follows.width, follows.height) == (832, 464)
    large = plan_clip(replace(wish, width=1280, height=704))
    assert (large.width, large.height) == (1280, 704)
    square = plan_clip(replace(wish, follows_image=True, image_width=512, image_height=512))
    assert (square.width, square.height) == (624, 624)


def test_sizes_that_no_token_grid_has_are_refused(wish: ClipWish) -> None:
    refuse(replace(wish, width=840), "width", "multiple of 16 pixels, got 840")
    refuse(replace(wish, height=0), "height", "multiple of 16 pixels, got 0")
    refuse(replace(wish, follows_image=True, image_width=100_000, image_height=1), "image", "too narrow")


# ---------------------------------------------------------------- camera paths


def test_a_path_gives_each_latent_frame_its_pose(wish: ClipWish, tmp_path: Path) -> None:
    folder = write_path(tmp_path / "walk", 50)
    (tmp_path / "linked").symlink_to("walk")
    plan = plan_clip(replace(wish, camera_folder=tmp_path / "linked"))
    assert np.abs(path_of(plan) - load_clip(folder).poses_n44[:33:4]).max() < 1e-12


def test_trimming_stretches_the_path_as_the_official_code_does(wish: ClipWish, tmp_path: Path) -> None:
    """43 poses are 41 usable ones and eleven latent frames, of which nine remain, spread over all 41."""
    folder = write_path(tmp_path / "walk", 43)
    refuse(replace(wish, num_media_frames=45, camera_folder=folder), "camera_folder", "at least 45 poses.*got 43")
    plan = plan_clip(replace(wish, num_media_frames=45, camera_folder=folder, trims=True))
    assert (plan.num_chunks, plan.num_media_frames) == (3, 33)
    clip = load_clip(folder)
    assert np.array_equal(path_of(plan), resample(clip, 45, 3).poses_n44)
    assert np.abs(path_of(plan)[-1] - clip.poses_n44[40]).max() < 1e-12


def test_paths_that_cannot_be_are_refused(wish: ClipWish, tmp_path: Path) -> None:
    short = write_path(tmp_path / "short", 8)
    refuse(replace(wish, camera_folder=short, trims=True), "camera_folder", "at least 9 poses, the first chunk, got 8")
    refuse(replace(wish, camera_folder=tmp_path / "none"), "camera_folder", "cannot be opened")
    long = write_path(tmp_path / "long", 33)
    limited = replace(wish, camera_folder=long, options={"max_trajectory_poses": 8})
    refuse(limited, "num_media_frames", r"at most 8 latent frames \(max_trajectory_poses\), these are 9")


# ---------------------------------------------------------------- options


def test_the_official_noise_is_drawn_for_the_whole_clip(wish: ClipWish) -> None:
    options: dict[str, object] = {"noise_layout": "official_whole_clip", "noise_clip_latent_frames": 99}
    assert plan_clip(replace(wish, options=options)).options["noise_clip_latent_frames"] == 9
    assert options["noise_clip_latent_frames"] == 99


def test_bad_options_are_refused_by_name(wish: ClipWish) -> None:
    refuse(replace(wish, options={"samplr": "official"}), "samplr", "did you mean")
