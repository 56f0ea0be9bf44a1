"""Noise of a session: a generator state that is part of the session, and the order in which numbers are drawn from it.

The same seed gives the same noise on the same kind of device, whatever other sessions do. CPU and CUDA generators give
different numbers.

    PerChunkNoise     chunk 0: x, r, r, r    chunk 1: x, r, r, r    ...
    WholeClipNoise    x of every chunk of the clip, in one draw    chunk 0: r, r, r    chunk 1: r, r, r    ...

Shape suffixes: C channels, F latent frames, Y and X latent rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseState:
    """Where a session's generator stands, as `torch.Generator.get_state` gives it. Never written to.

    `clip_CFYX` is what is left of a clip drawn at once, views of one tensor; None before it is drawn and where none is.
    """

    generator_state: torch.Tensor
    clip_CFYX: torch.Tensor | None = None


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
        generator = _generator_at(state, self.device)
        draws = tuple(_normal((1, *shape_CFYX), generator)[0] for _ in range(self.num_draws))
        return draws, NoiseState(generator_state=generator.get_state())


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeClipNoise:
    """Draws the first noise of a clip of `clip_latent_frames` at once, then for each chunk what re-noises it.

    Source of the order: LingBot-World v2 official code, wan/image2video.py. A chunk that the clip does not hold whole
    has its first noise drawn when it comes, before what re-noises it; the official code makes no such chunk.
    """

    device: torch.device
    num_draws: int
    clip_latent_frames: int

    def start(self, seed: int) -> NoiseState:
        """Return the state before the first chunk; the clip is drawn with it, when its size is known."""
        return NoiseState(generator_state=torch.Generator(self.device).manual_seed(seed).get_state())

    def draw(self, state: NoiseState, shape_CFYX: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], NoiseState]:
        """Return the noise of the next chunk, float32 [C, F, Y, X] each, and the state after it."""
        generator = _generator_at(state, self.device)
        channels, num_frames, *grid = shape_CFYX
        clip_CFYX = state.clip_CFYX
        if clip_CFYX is None:
            clip_CFYX = _normal((channels, self.clip_latent_frames, *grid), generator)
        first_CFYX, rest_CFYX = clip_CFYX[:, :num_frames], clip_CFYX[:, num_frames:]
        if first_CFYX.shape[1] < num_frames:
            first_CFYX = _normal(shape_CFYX, generator)
        renoise = tuple(_normal(shape_CFYX, generator) for _ in range(self.num_draws - 1))
        return (first_CFYX, *renoise), NoiseState(generator_state=generator.get_state(), clip_CFYX=rest_CFYX)


def _generator_at(state: NoiseState, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state.generator_state)
    return generator


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
