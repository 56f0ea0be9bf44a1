"""Noise of a session: a generator state that is part of the session, and the order in which numbers are drawn from it.

The same seed gives the same noise on the same kind of device, whatever other sessions do. CPU and CUDA generators give
different numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseState:
    """Where a session's generator stands, as `torch.Generator.get_state` gives it. Never written to."""

    generator_state: torch.Tensor


class NoiseSource(Protocol):
    """Gives the noise of a session's chunks in order, from a state that the session owns."""

    def start(self, seed: int) -> NoiseState:
        """Return the state before the first chunk."""
        ...

    def draw(self, state: NoiseState, shape_CFYX: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], NoiseState]:
        """Return the noise of the next chunk, one float32 [C, F, Y, X] per denoising step, and the state after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PerChunkNoise:
    """Draws for each chunk one tensor [1, C, F, Y, X] per denoising step: the first noise, then what re-noises.

    Source of the order: vLLM-Omni, diffusion/models/lingbot_world/pipeline.py.
    """

    device: torch.device
    num_draws: int

    def start(self, seed: int) -> NoiseState:
        """Return the state before the first chunk."""
        return NoiseState(generator_state=torch.Generator(self.device).manual_seed(seed).get_state())

    def draw(self, state: NoiseState, shape_CFYX: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], NoiseState]:
        """Return the noise of the next chunk, float32 [C, F, Y, X] each, and the state after it."""
        generator = torch.Generator(self.device)
        generator.set_state(state.generator_state)
        draws = tuple(
            torch.randn((1, *shape_CFYX), generator=generator, device=self.device, dtype=torch.float32)[0]
            for _ in range(self.num_draws)
        )
        return draws, NoiseState(generator_state=generator.get_state())
