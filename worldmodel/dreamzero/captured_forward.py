"""The forwards of DreamZero in CUDA graphs: one for a draft and one for each number of frames that a call commits.

One graph serves all sessions, start frames and steps. A step's constants, the frames' rotations, condition and state
are copied to fixed places, and K/V is found through device memory (`kvcache/indexed.py`).

Shapes: C channels, F latent frames, Y and X latent rows and columns, N actions, A action width.
"""

from __future__ import annotations

from torch import Tensor

from kvcache.spec import KVSpec
from kvcache.transaction import BranchedLayerKV
from worldmodel.dreamzero.sampler import Forward, ServedChunk, ServedDraft
from worldmodel.dreamzero.transformer import DraftKV, FrameInputs, StepTime, Velocity
from worldmodel.wan.captured import CapturedForwards, ForwardCall
from worldmodel.wan.transformer import TimeConstants


class CapturedForward:
    """Takes the place of a forward, which is what its graphs hold and what runs where there is none."""

    def __init__(self, forward: Forward, graphs: CapturedForwards, kv: KVSpec) -> None:
        self._forward = forward
        self._graphs = graphs
        self._kv = kv

    @property
    def description(self) -> str:
        """What is captured and what that gained, for operators."""
        return self._graphs.description

    @property
    def num_bytes(self) -> int:
        """Bytes that graphs and what they read hold on the device."""
        return self._graphs.num_bytes

    def seal(self) -> None:
        """Capture nothing from here on."""
        self._graphs.seal()

    def commit(self, x_CFYX: Tensor, time: TimeConstants, inputs: FrameInputs, chunk: ServedChunk) -> None:
        """Store K and V of observed frames in every layer and branch."""

        def run(arguments: tuple[Tensor, FrameInputs], time: TimeConstants, kv: BranchedLayerKV) -> None:
            x_CFYX, inputs = arguments
            self._forward.commit(x_CFYX, time, inputs, kv)

        for layer in range(self._kv.num_layers):
            # A graph writes all of them and tells nobody.
            chunk.rows_to_write_all(layer)
        name = f"commit of {inputs.num_latent_frames} latent frames"
        self._graphs(ForwardCall(name=name, run=run, arguments=(x_CFYX, inputs), constants=time, kv=chunk))

    def velocity(
        self, x_CFYX: Tensor, action_NA: Tensor, step: StepTime, inputs: FrameInputs, draft: ServedDraft
    ) -> Velocity:
        """Predict the flow of noisy latents and actions."""

        def run(arguments: tuple[Tensor, Tensor, FrameInputs], step: StepTime, kv: DraftKV) -> Velocity:
            x_CFYX, action_NA, inputs = arguments
            return self._forward.velocity(x_CFYX, action_NA, step, inputs, kv)

        return self._graphs(
            ForwardCall(
                name=f"draft of {inputs.num_latent_frames} latent frames",
                run=run,
                arguments=(x_CFYX, action_NA, inputs),
                constants=step,
                kv=draft,
                num_registers=self._kv.register_tokens,
            )
        )
