"""The four-step sampler of LingBot-World v2 around the transformer: noise to latents, latents to history.

Owns the constants of the sampler table. Knows nothing of sessions, prompts as strings, pixels or poses.

Shapes: C latent channels, F latent frames of the chunk, Y and X latent rows and columns.
Source: LingBot-World v2 official code, wan/image2video.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvcache.indexed import IndexableKV
from kvcache.transaction import ChunkTransaction, LayerKV
from worldmodel.lingbot.transformer import ChunkInputs, LingBotTransformer
from worldmodel.wan.flow_scheduler import COMMIT_TIMESTEP, SamplerTable, add_noise, clean_from_flow
from worldmodel.wan.transformer import TimeConstants


class Forward(Protocol):
    """The two forwards of a chunk, as `LingBotTransformer` writes them down; other forms are equal up to rounding."""

    def flow(
        self, x_CFYX: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ChunkTransaction
    ) -> torch.Tensor: ...

    def store_clean(self, x0_CFYX: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: LayerKV) -> None: ...


class ServedChunk(IndexableKV, LayerKV, Protocol):
    """A chunk in flight; `kvcache.transaction.ChunkTransaction`."""


class ServedForward(Protocol):
    """What a sampler needs for chunks: a forward that takes the K/V of sessions alone, as a captured one does."""

    def flow(
        self, x_CFYX: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ChunkTransaction
    ) -> torch.Tensor: ...

    def store_clean(
        self, x0_CFYX: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ServedChunk
    ) -> None: ...


class ChunkSampler:
    """Denoise one chunk and store its history. Holds no state of any session.

    `forward` computes in place of the transformer; None leaves it to the transformer itself.
    """

    def __init__(self, transformer: LingBotTransformer, table: SamplerTable, forward: Forward | None = None) -> None:
        self.use(transformer if forward is None else forward)
        self.table = table
        self._step_times = tuple(transformer.time_constants(step.timestep) for step in table)
        self._commit_time = transformer.time_constants(COMMIT_TIMESTEP)

    def use(self, forward: Forward, served: ServedForward | None = None) -> None:
        """Compute with another form of the same forward from now on, the chunks of sessions with `served` if given."""
        self._forward = forward
        self._served: ServedForward = forward if served is None else served

    @property
    def num_steps(self) -> int:
        return len(self.table)

    def denoise(self, noise: Sequence[torch.Tensor], inputs: ChunkInputs, chunk: ChunkTransaction) -> torch.Tensor:
        """Return the clean latents of a chunk, float32 [C, F, Y, X].

        `noise` has one tensor per step: the start, then what is added before each later step. Leaves K and V of the
        last noisy latents staged in `chunk`; `store_clean` must follow before the commit.
        """
        if len(noise) != self.num_steps:
            raise ValueError(f"noise: expected {self.num_steps} tensors, one per step, got {len(noise)}")
        _, x0_CFYX = self.step(0, noise[0], inputs, chunk)
        for index in range(1, self.num_steps):
            x_CFYX = add_noise(x0_CFYX, noise[index], self.table[index].renoise_sigma)
            _, x0_CFYX = self.step(index, x_CFYX, inputs, chunk)
        return x0_CFYX

    def step(
        self, index: int, x_CFYX: torch.Tensor, inputs: ChunkInputs, chunk: ChunkTransaction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step on noisy latents and return (flow, x0), both float32."""
        flow_CFYX = self._served.flow(x_CFYX, self._step_times[index], inputs, chunk)
        return flow_CFYX, clean_from_flow(x_CFYX, flow_CFYX, self.table[index].x0_sigma)

    def store_clean(self, x0_CFYX: torch.Tensor, inputs: ChunkInputs, chunk: ServedChunk) -> None:
        """Replace the staged K and V by those of the clean latents, as later chunks must see them."""
        self._served.store_clean(x0_CFYX, self._commit_time, inputs, chunk)

    def store_history(self, x0_CFYX: torch.Tensor, inputs: ChunkInputs, part: LayerKV) -> None:
        """Do the same for a part of history that is written anew."""
        self._forward.store_clean(x0_CFYX, self._commit_time, inputs, part)
