"""Where a frame was seen from, as numbers that a linear layer can predict; a lesson of the training, not of the model.

The world is periodic, so that positions and headings are angles. A network that can tell its pose halfway up knows
where it is; what it draws follows. Headings of walks are whole steps of a key, so that how far one is off them says how
far to turn back.

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
from worldmodel.lingbot.poses import MAX_PITCH_RAD, YAW_STEP_RAD

HARMONICS = (1, 2, 3, 4, 8)
HEADING_HARMONICS = (*HARMONICS, 15, 30)
NUM_FEATURES = 2 * (2 * len(HARMONICS) + len(HEADING_HARMONICS)) + 2
_LARGEST_OFF = 4.5
"""What half a step of a key off the whole steps counts as: as much as the waves of the heading together."""


def pose_features(cameras: Cameras) -> npt.NDArray[np.float32]:
    """Return [..., T, E]: sines and cosines of x, z and heading at some harmonics, the pitch, and the heading's rest.

    The rest is what the heading is off the nearest whole step of a key, in units of half a step times `_LARGEST_OFF`.
    """
    turns = 2 * math.pi / PERIOD_M * METRES_PER_UNIT
    angles = (
        *((turns * cameras.position[..., axis], HARMONICS) for axis in (0, 1)),
        (cameras.yaw, HEADING_HARMONICS),
    )
    columns = [wave(k * angle) for angle, harmonics in angles for k in harmonics for wave in (np.sin, np.cos)]
    steps = cameras.yaw / YAW_STEP_RAD
    rest = 2 * _LARGEST_OFF * (steps - np.round(steps))
    return np.stack([*columns, cameras.pitch / MAX_PITCH_RAD, rest], axis=-1).astype(np.float32)


class PoseHeads(nn.Module):
    """One linear reader of the residual stream for each of `num_heads` depths."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        readers = [nn.Linear(width, NUM_FEATURES) for _ in range(num_heads)]
        for reader in readers:
            nn.init.zeros_(reader.weight)
            nn.init.zeros_(reader.bias)
        self.readers = nn.ModuleList(readers)

    def errors(self, index: int, h: Tensor, poses: Tensor) -> Tensor:
        """Return the mean squared error of the poses read from tokens [..., tokens of a frame, D], [...]."""
        read = self.readers[index](functional.layer_norm(h, h.shape[-1:])).float()
        return (read - poses[..., None, :]).square().mean(dim=(-1, -2))
