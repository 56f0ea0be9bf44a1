"""The forwards of `DreamZeroTransformer` with fused operations between the matrix products; equal up to rounding.

Owns the order of work only: the operations are `worldmodel/kernels`, the weights are the transformer's own. q, k and v
are one product; keys and values of video and registers go straight to their rows in the cache; a layer's last sum and
the next layer's first norm are one pass over the residual stream. All tokens share one timestep, so that noise of video
and actions may not be decoupled.

Shapes: B streams, T tokens of a forward, R = B * T rows, D model width, H heads, K head size, P rotated pairs, C
channels, F latent frames, Y and X latent rows and columns, N actions, A action width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.pool import WritableRows
from kvcache.transaction import BranchedLayerKV
from worldmodel.dreamzero.transformer import (
    IMAGE_STORE,
    NUM_BRANCHES,
    SHARED_LAYERS,
    TEXT_STORE,
    DraftKV,
    DreamZeroTransformer,
    FrameInputs,
    StepTime,
    Velocity,
)
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import LayerOps, RowScaled, Update
from worldmodel.wan.transformer import TimeConstants


class FusedForward:
    """Takes the place of a transformer's `commit` and `velocity`.

    With `quantize` the six large linears of a layer are float8 and their original weights are given up: the plain
    forward can't run any more.
    """

    def __init__(self, transformer: DreamZeroTransformer, ops: LayerOps, *, quantize: bool = False) -> None:
        self._transformer = transformer
        self._ops = ops
        self._format = FusedFormat(ops, transformer.plan.linear, quantize=quantize)
        self._layers = tuple(
            self._format.fuse(layer.self_attn, layer.cross_attn, layer.ffn) for layer in transformer.layers
        )

    # ------------------------------------------------------------ the forwards

    def commit(self, x_CFYX: Tensor, time: TimeConstants, inputs: FrameInputs, chunk: BranchedLayerKV) -> None:
        """Store K and V of observed frames in every layer and branch."""
        h_RD = self._transformer.embed_video(x_CFYX, inputs)
        rotations = _real_rotations(inputs)
        last = len(self._layers) - 1
        h_RD, a_RD = self._attention_input(0, h_RD, None, time)
        for index in range(last):
            q_RHK = self._query_and_cache(index, a_RD, rotations, chunk.rows_to_write_all(index))
            h_RD, update = self._after_query(index, h_RD, q_RHK, time, chunk)
            h_RD, a_RD = self._attention_input(index + 1, h_RD, update, time)
        self._query_and_cache(last, a_RD, rotations, chunk.rows_to_write_all(last))

    def velocity(
        self, x_CFYX: Tensor, action_NA: Tensor, step: StepTime, inputs: FrameInputs, draft: DraftKV
    ) -> Velocity:
        """Predict the flow of noisy latents and actions. Raises ValueError for two timesteps."""
        if step.video is not step.action:
            raise ValueError("fused operations expect one timestep for video and actions")
        time, transformer = step.video, self._transformer
        h_RD = transformer.embed_draft(x_CFYX, action_NA, step, inputs)
        num_registers = h_RD.shape[0] - inputs.num_video_tokens
        rotations = _real_rotations(inputs)
        h_RD, a_RD = self._attention_input(0, h_RD, None, time)
        for index in range(len(self._layers)):
            rows = draft.rows_to_write_all(index, num_registers)
            q_RHK = self._query_and_cache(index, a_RD, rotations, rows)
            h_RD, update = self._after_query(index, h_RD, q_RHK, time, draft)
            if index + 1 < len(self._layers):
                h_RD, a_RD = self._attention_input(index + 1, h_RD, update, time)
        # The head's norm takes its input in whole, so the last sum is formed by a norm whose result nobody reads.
        h_RD, _ = self._attention_input(0, h_RD, update, time)
        return transformer.read_out(h_RD.unflatten(0, (NUM_BRANCHES, -1)), time, action_NA.shape[0], inputs)

    # ------------------------------------------------------------ parts of a layer

    def _attention_input(
        self, index: int, h_RD: Tensor, update: Update | None, time: TimeConstants
    ) -> tuple[Tensor, Tensor | RowScaled]:
        m = time.layers[index]
        return self._norm(index, h_RD, update, m.attention_scale, m.attention_shift)

    def _norm(
        self, index: int, h_RD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor
    ) -> tuple[Tensor, Tensor | RowScaled]:
        return self._format.norm(h_RD, update, scale_D, shift_D, self._transformer.layers[index].eps)

    def _query_and_cache(
        self, index: int, a_RD: Tensor | RowScaled, rotations: dict[int, Tensor], rows: WritableRows
    ) -> Tensor:
        """Write K and V of all tokens to their rows and return queries [R, H, K]."""
        attention = self._transformer.layers[index].self_attn
        streams = 1 if index < SHARED_LAYERS else NUM_BRANCHES
        return self._ops.heads_to_cache(
            self._layers[index].qkv(a_RD),
            attention.norm_q.weight,
            attention.norm_k.weight,
            rotations[streams],
            attention.norm_q.eps,
            rows,
        )

    def _after_query(
        self, index: int, h_RD: Tensor, q_RHK: Tensor, time: TimeConstants, kv: BranchedLayerKV
    ) -> tuple[Tensor, Update]:
        """Run one layer from its queries on; its last sum is left to the next norm."""
        layer, fused, m = self._transformer.layers[index], self._layers[index], time.layers[index]
        streams = 1 if index < SHARED_LAYERS else NUM_BRANCHES
        attended_BTHK = kv.attend_all(index, q_RHK.unflatten(0, (streams, -1)))
        attended_RD = self._format.linear_input(attended_BTHK.flatten(2).flatten(0, 1))
        update = Update(branch_TD=fused.self_output(attended_RD), gate_D=m.attention_gate)
        h_RD, a_RD = self._norm(index, h_RD, update, layer.norm3.weight, layer.norm3.bias)
        cross_RD = self._cross_attention(index, a_RD, streams, kv)
        if streams < NUM_BRANCHES:
            # From here on the branches differ.
            h_RD = h_RD.repeat(NUM_BRANCHES, 1)
        update = Update(branch_TD=fused.cross_output(self._format.linear_input(cross_RD)))
        h_RD, a_RD = self._norm(index, h_RD, update, m.feed_forward_scale, m.feed_forward_shift)
        return h_RD, Update(branch_TD=self._format.feed_forward(fused, a_RD), gate_D=m.feed_forward_gate)

    def _cross_attention(self, index: int, a_RD: Tensor | RowScaled, streams: int, kv: BranchedLayerKV) -> Tensor:
        """Return attention to text plus attention to the image, of all branches, [R, D]."""
        cross = self._transformer.layers[index].cross_attn
        q_RD = self._layers[index].cross_query(a_RD)
        q_RD = self._ops.rms_norm(q_RD, cross.norm_q.weight, cross.norm_q.eps, q_RD.dtype)
        q_RHK = q_RD.unflatten(-1, (cross.num_heads, -1))
        queries = q_RHK.unflatten(0, (streams, -1)).expand(NUM_BRANCHES, -1, -1, -1)
        text_BTHK = torch.stack(
            [
                kv.cross_store(TEXT_STORE, branch=branch).attend(index, q_THK)
                for branch, q_THK in enumerate(queries.unbind(0))
            ]
        )
        image_RHK = kv.cross_store(IMAGE_STORE).attend(index, q_RHK)
        return text_BTHK.add_(image_RHK.unflatten(0, (streams, -1))).flatten(2).flatten(0, 1)


def _real_rotations(inputs: FrameInputs) -> dict[int, Tensor]:
    """View the unit rotations [T, 1, P] as cosine and sine, float32 [R, P, 2], for one stream and for all."""
    one_TP2 = torch.view_as_real(inputs.rotations.to(torch.complex64)).squeeze(1).contiguous()
    return {1: one_TP2, NUM_BRANCHES: one_TP2.repeat(NUM_BRANCHES, 1, 1)}
