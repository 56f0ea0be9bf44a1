"""Where a frame was seen from, as numbers that a linear layer can predict; a lesson of the training, not of the model.

The world is periodic, so that positions and headings are angles. A network that can tell its pose halfway up knows
where it is; what it draws follows.

Shape suffixes: T latent frames, E pose features.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch.nn.functional as functional
from torch import Tensor, nn

from training.demo_world.scene import PERIOD_M
from training.demo_world.trajectories import METRES_PER_UNIT, Cameras
from worldmodel.lingbot.poses import MAX_PITCH_RAD

HARMONICS = (1, 2, 3, 4)
NUM_FEATURES = 3 * 2 * len(HARMONICS) + 1


def pose_features(cameras: Cameras) -> npt.NDArray[np.float32]:
    """Return [..., T, E] within [-1, 1]: sines and cosines of x, z and heading at some harmonics, then the pitch."""
    turns = 2 * math.pi / PERIOD_M * METRES_PER_UNIT
    angles = (turns * cameras.position[..., 0], turns * cameras.position[..., 1], cameras.yaw)
    columns = [wave(k * angle) for angle in angles for k in HARMONICS for wave in (np.sin, np.cos)]
    return np.stack([*columns, cameras.pitch / MAX_PITCH_RAD], axis=-1).astype(np.float32)


class PoseHeads(nn.Module):
    """One linear reader of the residual stream for each of `num_heads` depths."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(width, NUM_FEATURES) for _ in range(num_heads))
        for reader in self.readers:
            nn.init.zeros_(reader.weight)
            nn.init.zeros_(reader.bias)

    def errors(self, index: int, h: Tensor, poses: Tensor) -> Tensor:
        """Return the mean squared error of the poses read from tokens [..., tokens of a frame, D], [...]."""
        read = self.readers[index](functional.layer_norm(h, h.shape[-1:])).float()
        return (read - poses[..., None, :]).square().mean(dim=(-1, -2))
