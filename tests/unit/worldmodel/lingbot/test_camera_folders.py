"""Camera folders that clients name: what is reached below the trusted root, and what is not."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.lingbot_tiny import cache_of, tiny_adapter
from worldmodel.adapter import SessionOpening
from worldmodel.errors import RequestRefused
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.camera import camera_features
from worldmodel.lingbot.config import CameraScale, LingBotOptions
from worldmodel.lingbot.controls import FOLDER_SCHEMA, TRAJECTORY_SCHEMA, parse_control
from worldmodel.lingbot.poses import rotation_y
from worldmodel.lingbot.reducer import CameraPlan, CameraReducer
from worldmodel.lingbot.trajectory import MAX_FILE_POSES
from worldmodel.messages import Control, ControlEvent, MediaFormat, RequestId, SessionId, Tick

COUNT = 3
INTRINSICS = [502.0, 503.0, 415.0, 239.0]


def poses(count: int) -> np.ndarray:
    path = np.tile(np.eye(4), (count, 1, 1))
    for index in range(count):
        path[index, :3, :3] = rotation_y(0.01 * index)
        path[index, :3, 3] = (0.0, 0.0, 0.1 * index)
    return path


def zoom(count: int) -> np.ndarray:
    """Return a row of intrinsics for each pose, no two alike in any number."""
    return np.array(INTRINSICS) * (1.0 + 0.01 * np.arange(count))[:, None]


def write(folder: Path, count: int, intrinsics: np.ndarray | None = None) -> Path:
    folder.mkdir(parents=True)
    np.save(folder / "poses.npy", poses(count))
    np.save(folder / "intrinsics.npy", np.array([INTRINSICS]) if intrinsics is None else intrinsics)
    return folder


def event(schema: str, data: dict[str, object]) -> ControlEvent:
    return ControlEvent(
        event_id=0, controls=(Control(track="camera", schema=schema, data=parse_control("camera", schema, data)),)
    )


def follow(root: Path | None, folder: str, *, chunks: int = 1) -> list[CameraPlan]:
    subject = CameraReducer(LingBotOptions(camera_root=None if root is None else str(root)), 160, 96)
    plans = [subject.prepare(subject.initial(), [event(FOLDER_SCHEMA, {"folder": folder})], COUNT)]
    for _ in range(chunks - 1):
        plans.append(subject.prepare(plans[-1].state, [], COUNT))
    return plans


def test_a_folder_is_the_trajectory_of_every_fourth_pose(tmp_path: Path) -> None:
    write(tmp_path / "walks" / "first", 21)
    plans = follow(tmp_path, "walks/first", chunks=2)
    subject = CameraReducer(LingBotOptions(), 160, 96)
    data: dict[str, object] = {"poses": poses(21)[::4].tolist(), "intrinsics": [INTRINSICS]}
    first = subject.prepare(subject.initial(), [event(TRAJECTORY_SCHEMA, data)], COUNT)
    twins = [first, subject.prepare(first.state, [], COUNT)]
    for plan, twin in zip(plans, twins, strict=True):
        assert np.array_equal(plan.relative_n44, twin.relative_n44)
        assert np.array_equal(plan.intrinsics_n4, twin.intrinsics_n4)
        assert plan.scale is CameraScale.CLIP_MAX


def test_every_latent_frame_has_the_intrinsics_of_its_own_pose(tmp_path: Path) -> None:
    write(tmp_path / "zoom", 21, zoom(21))
    plans = follow(tmp_path, "zoom", chunks=3)
    rows = zoom(21)[::4] * np.array([160 / 832, 96 / 480, 160 / 832, 96 / 480])
    # The path ends after six latent frames; the camera keeps what it had.
    want = np.concatenate([rows, np.tile(rows[-1], (3, 1))])
    assert np.abs(np.concatenate([plan.intrinsics_n4 for plan in plans]) - want).max() < 1e-12


def test_a_served_camera_folder_zooms_as_the_official_rays_do(tmp_path: Path) -> None:
    write(tmp_path / "zoom", 9, zoom(9))
    write(tmp_path / "still", 9, zoom(9)[:1])
    adapter = tiny_adapter(camera_root=str(tmp_path))
    seen: list[torch.Tensor] = []
    transformer = adapter._transformer
    chunk_inputs = transformer.chunk_inputs

    def listening(condition: torch.Tensor, rays_TD: torch.Tensor, first_latent_frame: int) -> object:
        seen.append(rays_TD)
        return chunk_inputs(condition, rays_TD, first_latent_frame)

    with patch.object(transformer, "chunk_inputs", listening):
        latents = [first_latents(adapter, folder) for folder in ("zoom", "still")]
    assert np.abs(latents[0] - latents[1]).max() > 1e-3
    relative_n44 = torch.from_numpy(follow(tmp_path, "zoom")[0].relative_n44.copy())
    rows_n4 = torch.from_numpy(zoom(9)[::4] * np.array([48 / 832, 32 / 480] * 2))
    features = camera_features(relative_n44, rows_n4, 32, 48)
    linear = transformer.patch_embedding_wancamctrl
    want_TD = functional.linear(features, linear.weight.double(), linear.bias.double())
    assert (seen[0] - want_TD).abs().max() < 1e-5
    assert (seen[1] - want_TD).abs().max() > 1e-3


def first_latents(adapter: LingBotAdapter, folder: str) -> np.ndarray:
    """Generate the first chunk of a session that follows a folder, through a real cache."""
    image = np.full((32, 48, 3), 128, dtype=np.uint8)
    cache = cache_of(adapter)
    cache.open("s")
    opening = SessionOpening(prompt="a small town", seed=3, image=image, outputs=(MediaFormat.LATENT,))
    tick = Tick(
        request_id=RequestId("r"),
        session_id=SessionId("s"),
        chunk_index=0,
        prompt=None,
        events=(event(FOLDER_SCHEMA, {"folder": folder}),),
    )
    with cache.lease("s") as lease:
        result = adapter.generate(tick, adapter.open_state(opening), lease.begin_chunk())
    [latent] = [part.array for part in result.media.to_host() if part.format is MediaFormat.LATENT]
    return np.asarray(latent)


def test_the_longest_folder_fits(tmp_path: Path) -> None:
    write(tmp_path / "long", MAX_FILE_POSES)
    (plan,) = follow(tmp_path, "long")
    assert len(plan.relative_n44) == COUNT
    write(tmp_path / "longer", MAX_FILE_POSES + 1)
    with pytest.raises(RequestRefused, match=r"poses\.npy"):
        follow(tmp_path, "longer")


def test_without_a_root_there_are_no_folders() -> None:
    with pytest.raises(RequestRefused, match="camera_root") as caught:
        follow(None, "walk")
    assert (caught.value.code, caught.value.field) == ("bad_control", "folder")


@pytest.mark.parametrize(
    "name", ["../secret", "walk/../../secret", "/etc", "", ".", "walk//x", ".hidden", "a b", "walk\n"]
)
def test_names_that_could_lead_elsewhere_are_refused_by_the_parser(name: str) -> None:
    with pytest.raises(RequestRefused, match="joined by /") as caught:
        parse_control("camera", FOLDER_SCHEMA, {"folder": name})
    assert caught.value.field == "folder"


def test_links_below_the_root_are_not_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", 5)
    root = tmp_path / "root"
    write(root / "inside", 5)
    (root / "link").symlink_to(outside)
    (root / "deep").mkdir()
    (root / "deep" / "link").symlink_to(root / "inside")
    (root / "files").mkdir()
    (root / "files" / "poses.npy").symlink_to(outside / "poses.npy")
    assert len(follow(root, "inside")) == 1
    for name in ("link", "deep/link", "files", "none", "inside/poses.npy"):
        with pytest.raises(RequestRefused, match="cannot be opened") as caught:
            follow(root, name)
        assert (caught.value.code, caught.value.field) == ("bad_control", "folder")
        assert str(tmp_path) not in str(caught.value)
