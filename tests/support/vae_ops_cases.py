"""Random cases for the fused operations of a VAE, compared with the plain twin."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.layer_ops_cases import distance
from worldmodel.kernels.vae_ops import PlainVaeOps, VaeOps

PLAIN = PlainVaeOps()


def check_vae_ops(ops: VaeOps, *, channels: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Compare every operation on a clip of two, with frames behind a history as the decoder has them."""
    generator = torch.Generator().manual_seed(channels)

    def draw(*shape: int) -> Tensor:
        return (0.2 + 2.0 * torch.randn(*shape, generator=generator)).to(dtype).to(device)

    x, skip = draw(2, 3, 5, 7, channels), draw(2, 3, 5, 7, channels)
    x[0, 0, 0, 0] = 0.0
    bias, gamma = draw(channels), draw(channels)
    for input_bias in (None, bias):
        got, expected = (torch.full((2, 5, 5, 7, channels), 7.0, dtype=dtype, device=device) for _ in range(2))
        ops.norm_silu(x, input_bias, gamma, got[:, 2:])
        PLAIN.norm_silu(x, input_bias, gamma, expected[:, 2:])
        assert distance(got, expected) < tolerance
        assert (got[:, :2] == 7.0).all()
        got, expected = (torch.full((2, 3, 5, 7, 3 * channels), 7.0, dtype=dtype, device=device) for _ in range(2))
        ops.norm_silu_taps(x, input_bias, gamma, got)
        PLAIN.norm_silu_taps(x, input_bias, gamma, expected)
        assert distance(got, expected) < tolerance
        assert torch.equal(got == 7.0, expected == 7.0)
    assert distance(ops.add_bias_and_skip(x.clone(), bias, skip), PLAIN.add_bias_and_skip(x, bias, skip)) < tolerance
    y = draw(2, 3, 6, 8, 4 * channels)
    assert distance(ops.join_doubled(y, bias), PLAIN.join_doubled(y, bias)) < tolerance
