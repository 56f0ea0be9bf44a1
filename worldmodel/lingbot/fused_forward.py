"""The forwards of `LingBotTransformer` with fused operations between the matrix products; equal to it up to rounding.

Owns the order of work only: the operations are `worldmodel/kernels`, the weights are the transformer's own. q, k and v
are one product; keys and values go straight to their place in the cache; a layer's last sum and the next layer's first
norm are one pass over the residual stream.

Shapes: T tokens of a chunk in (frame, row, column) order, D model width, H heads, K head size, C channels, F latent
frames of the chunk, Y and X latent rows and columns, R rotated pairs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvcache.transaction import ChunkTransaction, LayerKV
from worldmodel.kernels.fused_layer import FusedFormat, FusedLayer
from worldmodel.kernels.layer_ops import LayerOps, RowScaled, Update
from worldmodel.lingbot.transformer import TEXT_STORE, ChunkInputs, Layer, LingBotTransformer
from worldmodel.wan.layers import unpatchify
from worldmodel.wan.transformer import TimeConstants


class FusedForward:
    """Runs a transformer's forwards with fused operations. Takes the place of its `flow` and `store_clean`.

    With `quantize` the large linears of the layers are float8 and their original weights are given up: the plain
    forward can't run any more. `layers` are those of the transformer in their fused form, None fuses them here.
    Raises ValueError for a plan whose rounding it does not follow.
    """

    def __init__(
        self,
        transformer: LingBotTransformer,
        ops: LayerOps,
        *,
        quantize: bool = False,
        layers: Sequence[FusedLayer] | None = None,
    ) -> None:
        if transformer.plan.rounds_as_official:
            raise ValueError(f"the precision plan {transformer.plan.name!r} rounds where fused operations don't")
        self._transformer = transformer
        self._ops = ops
        self._format = FusedFormat(ops, transformer.plan.linear, quantize=quantize)
        if layers is None:
            layers = [fuse_layer(layer, self._format) for layer in transformer.layers]
        self._layers = tuple(layers)

    # ------------------------------------------------------------ the forwards

    def flow(self, x_CFYX: Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ChunkTransaction) -> Tensor:
        """Predict the flow of noisy latents, float32 [C, F, Y, X]. Writes the chunk's K and V into `chunk`."""
        h_TD, a_TD = self._start(x_CFYX, time, inputs)
        rotations_TR2 = _real_rotations(inputs)
        last = len(self._layers) - 1
        weights = self._transformer.weights.forward
        for index in range(last):
            with weights.layer(index):
                h_TD, update = self._layer(index, h_TD, a_TD, rotations_TR2, time, inputs, chunk)
            h_TD, a_TD = self._attention_input(index + 1, h_TD, update, time)
        with weights.layer(last):
            h_TD, update = self._layer(last, h_TD, a_TD, rotations_TR2, time, inputs, chunk)
        head = self._transformer.head
        _, a_TD = self._ops.residual_norm(h_TD, update, time.head_scale, time.head_shift, head.eps, torch.float32)
        return unpatchify(
            head.head(a_TD),
            num_frames=inputs.num_latent_frames,
            latent_height=inputs.latent_height,
            latent_width=inputs.latent_width,
        )

    def store_clean(self, x0_CFYX: Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: LayerKV) -> None:
        """Write K and V of the clean latents of a chunk, `time` being that of the commit timestep.

        Stops after K and V of the last layer: nothing behind them is used.
        """
        h_TD, a_TD = self._start(x0_CFYX, time, inputs)
        rotations_TR2 = _real_rotations(inputs)
        last = len(self._layers) - 1
        weights = self._transformer.weights.forward
        for index in range(last):
            with weights.layer(index):
                h_TD, update = self._layer(index, h_TD, a_TD, rotations_TR2, time, inputs, chunk)
            h_TD, a_TD = self._attention_input(index + 1, h_TD, update, time)
        with weights.layer(last):
            self._query_and_cache(last, a_TD, rotations_TR2, chunk)

    # ------------------------------------------------------------ parts of a layer

    def _start(self, x_CFYX: Tensor, time: TimeConstants, inputs: ChunkInputs) -> tuple[Tensor, Tensor | RowScaled]:
        h_TD = self._transformer.embed_latents(x_CFYX, inputs)
        return self._attention_input(0, h_TD, None, time)

    def _attention_input(
        self, index: int, h_TD: Tensor, update: Update | None, time: TimeConstants
    ) -> tuple[Tensor, Tensor | RowScaled]:
        m = time.layers[index]
        return self._format.norm(
            h_TD, update, m.attention_scale, m.attention_shift, self._transformer.layers[index].eps
        )

    def _query_and_cache(self, index: int, a_TD: Tensor | RowScaled, rotations_TR2: Tensor, chunk: LayerKV) -> Tensor:
        """Write the layer's K and V of this chunk and return its queries [T, H, K]."""
        attention = self._transformer.layers[index].self_attn
        return self._ops.heads_to_cache(
            self._layers[index].qkv(a_TD),
            attention.norm_q.weight,
            attention.norm_k.weight,
            rotations_TR2,
            attention.norm_q.eps,
            chunk.rows_to_write(index),
        )

    def _layer(
        self,
        index: int,
        h_TD: Tensor,
        a_TD: Tensor | RowScaled,
        rotations_TR2: Tensor,
        time: TimeConstants,
        inputs: ChunkInputs,
        chunk: LayerKV,
    ) -> tuple[Tensor, Update]:
        """Run one layer on its normalised input; its last sum is left to the next norm."""
        layer, fused, m = self._transformer.layers[index], self._layers[index], time.layers[index]
        query_THK = self._query_and_cache(index, a_TD, rotations_TR2, chunk)
        attended_TD = self._format.linear_input(chunk.attend(index, query_THK).flatten(1))
        camera = self._transformer.camera_at(index, inputs)
        update = Update(
            branch_TD=fused.self_output(attended_TD),
            gate_D=m.attention_gate,
            camera_scale_TD=camera.scale,
            camera_shift_TD=camera.shift,
        )
        h_TD, a_TD = self._format.norm(h_TD, update, layer.norm3.weight, layer.norm3.bias, layer.eps)
        text_TD = self._cross_attention(index, a_TD, chunk)
        update = Update(branch_TD=fused.cross_output(self._format.linear_input(text_TD)))
        h_TD, a_TD = self._format.norm(h_TD, update, m.feed_forward_scale, m.feed_forward_shift, layer.eps)
        return h_TD, Update(branch_TD=self._format.feed_forward(fused, a_TD), gate_D=m.feed_forward_gate)

    def _cross_attention(self, index: int, a_TD: Tensor | RowScaled, chunk: LayerKV) -> Tensor:
        cross = self._transformer.layers[index].cross_attn
        query_TD = self._layers[index].cross_query(a_TD)
        # float8 keys are met by float8 queries.
        query_TD = self._ops.rms_norm(query_TD, cross.norm_q.weight, cross.norm_q.eps, self._transformer.plan.kv)
        query_THK = query_TD.unflatten(-1, (cross.num_heads, -1))
        return chunk.cross_store(TEXT_STORE).attend(index, query_THK).flatten(1)


def fuse_layer(layer: Layer, layer_format: FusedFormat) -> FusedLayer:
    """Return a layer's linears in the format of fused ones; `FusedFormat.fuse` says what becomes of its own."""
    attention = layer.self_attn
    if layer.plan.quantizes_kv:
        balance_values(attention.v, attention.o, attention.num_heads)
    return layer_format.fuse(attention, layer.cross_attn, layer.ffn)


def balance_values(value: nn.Linear, output: nn.Linear, num_heads: int) -> None:
    """Give the values of every head a size near 1, so that float8 without a scale holds them; the output undoes it.

    The factor of a head is a power of two, so that nothing is rounded. It follows from the length of the rows of the
    weight: inputs are normalised, so that this is the size of what comes out.
    """
    rows_HKD = value.weight.detach().float().unflatten(0, (num_heads, -1))
    size_H = rows_HKD.square().sum(-1).mean(-1).sqrt()
    factor_H = torch.exp2(-torch.log2(size_H.clamp_min(1e-6)).round())
    factor_N1 = factor_H.repeat_interleave(rows_HKD.shape[1])[:, None].to(value.weight.dtype)
    value.weight.data = value.weight.data * factor_N1
    value.bias.data = value.bias.data * factor_N1[:, 0]
    output.weight.data = output.weight.data / factor_N1.t()


def _real_rotations(inputs: ChunkInputs) -> Tensor:
    """View the unit rotations [T, 1, R] as cosine and sine, float32 [T, R, 2]."""
    return torch.view_as_real(inputs.rotations.to(torch.complex64)).squeeze(1)
