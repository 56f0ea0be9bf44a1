"""Encoded walks, with a renderer and an encoder that show nothing but the heading."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from training.demo_world import dataset
from training.demo_world.dataset import CONDITION_FRAMES, LATER_FRAMES, OPENING_FRAMES, LatentSpace, build_walks
from training.demo_world.poses import HARMONICS
from training.demo_world.trajectories import Cameras

SINE = 2 * 2 * len(HARMONICS)
"""The column of poses that holds the sine of the heading."""


def _headings(cameras: Cameras, styles_BT: np.ndarray, device: torch.device, rays: int) -> Tensor:
    """Show the sine of each media frame's last latent frame's heading as one pixel."""
    media = (np.arange(1 + 4 * (cameras.yaw.shape[1] - 1)) + 3) // 4
    return torch.from_numpy(np.sin(cameras.yaw))[:, media, None, None, None].float().expand(-1, -1, 1, 1, 3)


class _Space:
    def encode(self, frames: Tensor) -> Tensor:
        return frames[:, ::4].permute(0, 4, 1, 2, 3)[:, :1].expand(-1, 16, -1, -1, -1)

    def opening_condition(self, first_frames: Tensor) -> Tensor:
        return first_frames.permute(0, 3, 1, 2)[:, :1, None].expand(-1, 20, CONDITION_FRAMES, -1, -1)


def test_walks_and_what_is_astray_of_them_are_seen_from_where_their_poses_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "draw", _headings)
    space = cast(LatentSpace, _Space())
    walks = build_walks(space, np.random.default_rng(0), 40, torch.device("cpu"), portion=16)
    shown, astray = walks.latents_WTCYX[:, :, 3, 0, 0].float(), walks.astray_WTCYX[:, :, 3, 0, 0].float()
    torch.testing.assert_close(shown, walks.poses_WTE[..., SINE], atol=0.005, rtol=0)
    torch.testing.assert_close(astray, walks.astray_poses_WTE[..., SINE], atol=0.005, rtol=0)
    assert shown.shape == (40, OPENING_FRAMES + LATER_FRAMES)
    # True headings are whole steps of a key, those astray are not, but for the start image's.
    assert walks.poses_WTE[..., -1].abs().max() < 1e-3
    assert walks.astray_poses_WTE[:, 1:, -1].abs().mean() > 1
    torch.testing.assert_close(walks.astray_poses_WTE[:, 0], walks.poses_WTE[:, 0])
    torch.testing.assert_close(walks.conditions_WTCYX[:, 0, 3, 0, 0].float(), shown[:, 0], atol=0, rtol=0)
    # Motion is what it is without the gaps; where there is none, headings follow from it.
    continuous = walks.gap_W == 0
    turned = torch.atan2(walks.rotations_WT33[..., 0, 2], walks.rotations_WT33[..., 0, 0])[continuous]
    assert continuous.any()
    assert (turned[:, 1:].abs() < 0.11).all()
