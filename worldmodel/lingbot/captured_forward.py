"""The forwards of LingBot-World v2 in CUDA graphs: one for a denoising step and one for the clean history of a chunk.

One graph serves all sessions, fill states, prompts and steps. What the five forwards of a chunk share lies at one place
and is computed into it once a chunk: a copy of the camera's scales and shifts would hold them twice. Latents and a
step's constants are copied for each forward, K/V is found through device memory (`kvcache/indexed.py`).

Shapes: C channels, F latent frames, Y and X latent rows and columns, T tokens of a chunk, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from kvcache.transaction import ChunkTransaction, LayerKV
from worldmodel.lingbot.pipeline import Forward, ServedChunk
from worldmodel.lingbot.transformer import TEXT_STORE, ChunkInputs, LingBotTransformer
from worldmodel.wan.captured import CapturedForwards, ForwardCall
from worldmodel.wan.fixed_value import allocate_alike
from worldmodel.wan.transformer import TimeConstants

OutT = TypeVar("OutT")


class CapturedForward:
    """Takes the place of a forward, which is what its graphs hold and what runs where there is none.

    The inputs of a chunk must come from `chunk_inputs`, and are valid until it is asked for others. `merges_padding`
    tells whether texts have a row that stands for many.
    """

    def __init__(
        self,
        forward: Forward,
        graphs: CapturedForwards,
        transformer: LingBotTransformer,
        *,
        merges_padding: bool,
    ) -> None:
        self._forward = forward
        self._graphs = graphs
        self._transformer = transformer
        self._biased_stores = (TEXT_STORE,) if merges_padding else ()
        self._inputs: ChunkInputs | None = None
        self._inputs_bytes = 0
        self._is_given_up = False

    @property
    def description(self) -> str:
        """What is captured and what that gained, for operators."""
        return self._graphs.description

    @property
    def num_bytes(self) -> int:
        """Bytes that graphs and what they read hold on the device."""
        return self._graphs.num_bytes + self._inputs_bytes

    def seal(self) -> None:
        """Capture nothing from here on; if no graph was kept, hold nothing either."""
        self._graphs.seal()
        if not self._graphs.has_any:
            self._is_given_up = True
            self._inputs = None
            self._inputs_bytes = 0

    def chunk_inputs(self, condition_CFYX: Tensor, projected_rays_TD: Tensor, first_latent_frame: int) -> ChunkInputs:
        """Prepare a chunk as `LingBotTransformer.chunk_inputs` does, at the place that the graphs read."""
        if self._inputs is None and not self._is_given_up:
            empty = self._transformer.empty_inputs(*condition_CFYX.shape[-2:])
            self._inputs, memory = allocate_alike(empty, self._transformer.device)
            self._inputs_bytes = memory.nbytes
        return self._transformer.chunk_inputs(condition_CFYX, projected_rays_TD, first_latent_frame, into=self._inputs)

    def flow(self, x_CFYX: Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ChunkTransaction) -> Tensor:
        """Predict the flow of noisy latents, float32 [C, F, Y, X]. Writes the chunk's K and V into `chunk`."""

        def run(x_CFYX: Tensor, time: TimeConstants, kv: ChunkTransaction) -> Tensor:
            return self._forward.flow(x_CFYX, time, inputs, kv)

        return self._run("a step", run, x_CFYX, time, inputs, chunk)

    def store_clean(self, x0_CFYX: Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ServedChunk) -> None:
        """Write K and V of the clean latents of a chunk, `time` being that of the commit timestep."""

        def run(x0_CFYX: Tensor, time: TimeConstants, kv: LayerKV) -> None:
            self._forward.store_clean(x0_CFYX, time, inputs, kv)

        self._run("clean history", run, x0_CFYX, time, inputs, chunk)

    def _run(
        self,
        name: str,
        run: Callable[[Tensor, TimeConstants, ChunkTransaction], OutT],
        latents_CFYX: Tensor,
        time: TimeConstants,
        inputs: ChunkInputs,
        chunk: ServedChunk,
    ) -> OutT:
        if inputs is not self._inputs and not self._is_given_up:
            raise ValueError(f"{name}: expected the inputs that chunk_inputs gave for this chunk")
        for layer in range(self._transformer.config.num_layers):
            # A graph writes all of them and tells nobody.
            chunk.rows_to_write(layer)
        return self._graphs(
            ForwardCall(
                name=name,
                run=run,
                arguments=latents_CFYX,
                constants=time,
                kv=chunk,
                biased_stores=self._biased_stores,
            )
        )
