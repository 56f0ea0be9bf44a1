"""The noise of a call: the same for every call of a seed, as the official server has it.

Video and actions are drawn from generators of their own with the same seed, on the CPU, so that every device starts
from the same numbers. Shapes: C channels, F latent frames, Y and X latent rows and columns, N actions, A action width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

REMEMBERED_SEEDS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """Where the sampler starts, float32."""

    video_CFYX: Tensor
    action_NA: Tensor


class NoiseSource:
    """Draw noise by seed; the most recent seeds are remembered."""

    def __init__(self, video_shape: tuple[int, ...], action_shape: tuple[int, int], device: torch.device) -> None:
        self._video_shape = video_shape
        self._action_shape = action_shape
        self._device = device
        self._known: dict[int, Noise] = {}

    def draw(self, seed: int) -> Noise:
        """Return the noise of a seed."""
        noise = self._known.pop(seed, None)
        if noise is None:
            noise = Noise(
                video_CFYX=self._normal(seed, self._video_shape), action_NA=self._normal(seed, self._action_shape)
            )
            while len(self._known) >= REMEMBERED_SEEDS:
                self._known.pop(next(iter(self._known)))
        self._known[seed] = noise
        return noise

    def _normal(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self._device)
