"""Tiles that leave out what they can't show draw the same picture; needs a C++ compiler, so it is in the slow set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.demo_world import scene
from training.demo_world.trajectories import Cameras, media_poses


@pytest.mark.slow
def test_leaving_out_what_a_tile_cannot_show_changes_no_pixel() -> None:
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


def test_more_objects_than_a_tile_has_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "OBJECTS", np.zeros((57, 12), np.float32))
    with pytest.raises(ValueError, match="at most 56 objects, got 57"):
        scene.render(np.zeros((1, 12), np.float32), np.zeros(1, np.int32))
