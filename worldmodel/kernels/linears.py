"""Linear layers in the number formats that a forward may take: the checkpoint's, or float8 with a scale per row.

Both forms have one interface for tensors that the fused operations hand over. Weights are shared with the module they
come from, or, in float8, take their place.

Shapes: T tokens, D input width, N output width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worldmodel.kernels.layer_ops import RowScaled, quantize_rows


class HighLinear:
    """A linear in the format of its weight, with an optional tanh GELU behind it."""

    def __init__(self, weight_ND: Tensor, bias_N: Tensor) -> None:
        self.weight_ND = weight_ND
        self.bias_N = bias_N

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return x W^T + b."""
        return functional.linear(x_TD, self.weight_ND, self.bias_N)

    def gelu(self, x_TD: Tensor) -> Tensor:
        """Return gelu(x W^T + b). On CUDA the GELU is part of the matrix product."""
        if x_TD.is_cuda:
            # torch's epilogue is the tanh form on CUDA only.
            return torch._addmm_activation(self.bias_N, x_TD, self.weight_ND.t(), use_gelu=True)
        return functional.gelu(self(x_TD), approximate="tanh")


class Fp8Linear:
    """A linear whose weight is float8 e4m3 with one scale per output, for inputs with one scale per token.

    The product is summed in float32 and rounded to `out_dtype`; only CUDA devices with float8 units run it.
    """

    def __init__(self, weight_ND: Tensor, bias_N: Tensor, out_dtype: torch.dtype) -> None:
        quantized = quantize_rows(weight_ND)
        self.values_ND = quantized.values_TD
        self.scales_1N = quantized.scales_T1.t().contiguous()
        self.bias_N = bias_N
        self.out_dtype = out_dtype

    def __call__(self, x: RowScaled) -> Tensor:
        """Return x W^T + b [T, N]."""
        if not x.values_TD.is_cuda:
            return self.plain(x)
        return torch._scaled_mm(
            x.values_TD,
            self.values_ND.t(),
            scale_a=x.scales_T1,
            scale_b=self.scales_1N,
            bias=self.bias_N,
            out_dtype=self.out_dtype,
            use_fast_accum=True,
        )

    def plain(self, x: RowScaled) -> Tensor:
        """Return the same in float32 arithmetic on the dequantised numbers: the twin, and what a CPU runs."""
        x_TD = x.values_TD.float() * x.scales_T1
        weight_ND = self.values_ND.float() * self.scales_1N.t()
        return functional.linear(x_TD, weight_ND, self.bias_N.float()).to(self.out_dtype)


def fold_weights(*linears: torch.nn.Linear) -> tuple[Tensor, Tensor]:
    """Put the weights of linears with one input below each other, and let the linears view their part.

    Takes no memory beyond one copy while it runs. Returns weight [sum of N, D] and bias [sum of N].
    """
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = torch.cat([linear.bias.detach() for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        linear.bias.data = bias[start:end]
        start = end
    return weight, bias
