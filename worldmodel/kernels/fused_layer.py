"""What the fused forwards of all transformers share: a layer's large linears in one number format, and what feeds them.

Knows no model: the forwards own the order of work.

Shapes: T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from worldmodel.kernels.layer_ops import LayerOps, RowScaled, Update
from worldmodel.kernels.linears import Fp8Linear, HighLinear, fold_weights


class Projections(Protocol):
    """The linears around an attention."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedLayer:
    """The linears of one layer in the order of their use; both kinds are called alike."""

    qkv: Any
    self_output: Any
    cross_query: Any
    cross_output: Any
    feed_forward_in: Any
    feed_forward_out: Any


def large_linears(attention: Projections, cross: Projections, feed_forward: nn.Sequential) -> tuple[nn.Linear, ...]:
    """Return the linears of a layer that every token of every step passes; only these are ever float8."""
    first, last = feed_forward[0], feed_forward[-1]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    return attention.q, attention.k, attention.v, attention.o, cross.q, cross.o, first, last


class FusedFormat:
    """The number format of fused layers: `dtype`, or with `quantize` float8 whose products are rounded to `dtype`."""

    def __init__(self, ops: LayerOps, dtype: torch.dtype, *, quantize: bool) -> None:
        self._ops = ops
        self._dtype = dtype
        self._is_quantized = quantize

    def fuse(self, attention: Projections, cross: Projections, feed_forward: nn.Sequential) -> FusedLayer:
        """Return a layer's linears, q, k and v as one; `feed_forward` begins and ends with a linear.

        They share the weights of the given ones; with float8 those give theirs up and can't run any more.
        """
        linears = large_linears(attention, cross, feed_forward)
        first, last = linears[-2:]
        fused = FusedLayer(
            qkv=self._linear(*fold_weights(attention.q, attention.k, attention.v)),
            self_output=self._linear_of(attention.o),
            cross_query=self._linear_of(cross.q),
            cross_output=self._linear_of(cross.o),
            feed_forward_in=self._linear_of(first),
            feed_forward_out=self._linear_of(last),
        )
        if self._is_quantized:
            for linear in linears:
                linear.weight.data = linear.weight.new_empty(0)
        return fused

    def norm(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | RowScaled]:
        """Return the updated residual stream, and LN of it times `scale_D` plus `shift_D` as a linear's input."""
        if self._is_quantized:
            return self._ops.residual_norm_fp8(h_TD, update, scale_D, shift_D, eps)
        return self._ops.residual_norm(h_TD, update, scale_D, shift_D, eps, self._dtype)

    def linear_input(self, x_TD: Tensor) -> Tensor | RowScaled:
        """Return what is in `dtype` as a linear's input."""
        return self._ops.quantize(x_TD) if self._is_quantized else x_TD

    def feed_forward(self, layer: FusedLayer, a_TD: Tensor | RowScaled) -> Tensor:
        """Return the feed-forward of a linear's input [T, D]."""
        if self._is_quantized:
            out_TD: Tensor = layer.feed_forward_out(self._ops.gelu_fp8(layer.feed_forward_in(a_TD)))
        else:
            out_TD = layer.feed_forward_out(layer.feed_forward_in.gelu(a_TD))
        return out_TD

    def _linear_of(self, linear: nn.Linear) -> HighLinear | Fp8Linear:
        return self._linear(linear.weight.detach(), linear.bias.detach())

    def _linear(self, weight_ND: Tensor, bias_N: Tensor) -> HighLinear | Fp8Linear:
        if self._is_quantized:
            return Fp8Linear(weight_ND, bias_N, self._dtype)
        return HighLinear(weight_ND, bias_N)
