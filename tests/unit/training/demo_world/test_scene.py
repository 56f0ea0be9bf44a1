"""Tiles that leave out what they can't show draw the same picture; needs a C++ compiler, so it is in the slow set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.demo_world import scene
from training.demo_world.trajectories import Cameras, media_poses


@pytest.mark.slow
@pytest.mark.parametrize("cutaway_m", [0.0, 1.5])
def test_leaving_out_what_a_tile_cannot_show_changes_no_pixel(
    monkeypatch: pytest.MonkeyPatch, cutaway_m: float
) -> None:
    monkeypatch.setattr(scene, "PALETTES", scene.PALETTES.copy())
    scene.change(cutaway_m=cutaway_m)
    rng = np.random.default_rng(0)
    num_frames = 60
    # Anywhere, inside of objects too, and up to steep looks up and down.
    cameras = Cameras(
        position=rng.uniform(-2, 2, (num_frames, 1, 2)),
        yaw=rng.uniform(-np.pi, np.pi, (num_frames, 1)),
        pitch=rng.uniform(-1.5, 1.5, (num_frames, 1)) * (rng.random((num_frames, 1)) < 0.5),
    )
    poses = torch.from_numpy(media_poses(cameras)[:, 0])
    styles = torch.from_numpy(rng.integers(0, len(scene.STYLES), num_frames).astype(np.int32))
    plain = scene.render_cpu(poses, styles, 1, culls=False)
    assert plain.float().std() > 20
    assert torch.equal(scene.render_cpu(poses, styles, 1), plain)


@pytest.mark.slow
def test_poplars_stand_on_the_horizon_in_one_place_for_every_second_step_of_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scene, "PALETTES", scene.PALETTES.copy())
    # From up here, looking over all roofs but not down, nothing else is to be seen.
    poses = np.zeros((4, 12), np.float32)
    for pose, degrees in zip(poses, (0.0, 36.0, 6.0, 39.0), strict=True):
        cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        pose[:3], pose[3:] = (6.0, -30.0, 6.0), (cos, 0, sin, 0, 1, 0, -sin, 0, cos)
    scene.change(poplars=0.0)
    plain = scene.render(poses, np.zeros(4, np.int32), 1).int()
    scene.change(poplars=1.0)
    shown = (scene.render(poses, np.zeros(4, np.int32), 1).int() - plain).abs().sum(-1) > 20
    assert not shown[:, 48:].any()
    assert not shown[:, :12].any()
    columns = shown[:, 40]
    assert 0.3 < columns.float().mean() < 0.7
    assert (columns[0] != columns[1]).float().mean() < 0.05
    assert (columns[0] & columns[2]).float().mean() < 0.1
    assert (columns[0] != columns[3]).float().mean() > 0.2


@pytest.mark.slow
def test_what_is_near_fades_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "PALETTES", scene.PALETTES.copy())
    # Before the blue house, whose wall is at z = 1.48, looking north.
    places = (-2.0, 0.3, 0.7)
    poses = np.zeros((len(places), 12), np.float32)
    poses[:, 0], poses[:, 2], poses[:, 3:] = 9.8, places, np.eye(3, dtype=np.float32).flatten()
    blue = []
    for cutaway_m in (0.0, 1.5):
        scene.change(poplars=0.0, cutaway_m=cutaway_m)
        shown = scene.render(poses, np.zeros(len(places), np.int32), 1)
        blue.append(shown[:, 40:56, 72:88].float().mean(dim=(1, 2)))
    far, fading, near = range(3)
    torch.testing.assert_close(blue[0][far], blue[1][far], atol=0, rtol=0)
    torch.testing.assert_close(blue[0][near], blue[0][fading], atol=25, rtol=0)
    behind = blue[1][near]
    assert (blue[0][near] - behind).abs().max() > 40
    # Half-way the wall is seen through.
    share = ((blue[1][fading] - behind) / (blue[0][near] - behind))[(blue[0][near] - behind).abs() > 40]
    assert ((share > 0.05) & (share < 0.95)).all()


def test_more_objects_than_a_tile_has_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "OBJECTS", np.zeros((57, 12), np.float32))
    with pytest.raises(ValueError, match="at most 56 objects, got 57"):
        scene.render(np.zeros((1, 12), np.float32), np.zeros(1, np.int32))
