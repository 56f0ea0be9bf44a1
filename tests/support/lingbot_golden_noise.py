"""The stored noise of golden case 9 in place of a generator: which seed it once came from does not matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.lingbot_golden import manifest, tensors
from worldmodel.lingbot.noise import NoiseState


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenNoise:
    """Implements `NoiseSource`; the state is the seed and the index of the next chunk.

    Behind the stored chunks noise goes on, as the seed and the index decide.
    """

    num_steps: int

    def start(self, seed: int) -> NoiseState:
        return NoiseState(generator_state=torch.tensor([seed, 0]))

    def draw(self, state: NoiseState, shape_CFYX: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], NoiseState]:
        seed, index = state.generator_state.tolist()
        following = NoiseState(generator_state=torch.tensor([seed, index + 1]))
        stored = stored_chunks(self.num_steps)
        if index < len(stored):
            return stored[index], following
        generator = torch.Generator().manual_seed(seed + index)
        return tuple(torch.randn(shape_CFYX, generator=generator) for _ in range(self.num_steps)), following


def stored_chunks(num_steps: int) -> list[tuple[torch.Tensor, ...]]:
    """Return for each chunk of case 9 its first noise and what re-noises it, [C, F, Y, X] each."""
    golden, num_frames = tensors("case9_end_to_end_official"), manifest()["end_to_end"]["chunk"]
    first, renoise = golden["noise_all"].split(num_frames, dim=1), golden["renoise"].split(num_steps - 1)
    return [(x, *r) for x, r in zip(first, renoise, strict=True)]
