"""A layer's linears in one format: shared or given-up weights, and the same numbers as the modules they come from."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.support.layer_ops_cases import distance
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import PlainOps, RowScaled

WIDTH, HIDDEN, TOKENS, EPS = 64, 96, 5, 1e-6


@dataclass
class Attention:
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    @staticmethod
    def random() -> Attention:
        return Attention(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def modules() -> tuple[Attention, Attention, nn.Sequential]:
    torch.manual_seed(11)
    feed_forward = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(approximate="tanh"), nn.Linear(HIDDEN, WIDTH))
    return Attention.random(), Attention.random(), feed_forward


@pytest.mark.parametrize(("quantize", "largest"), [(False, 1e-6), (True, 0.06)])
@torch.inference_mode()
def test_a_fused_layer_multiplies_as_its_modules(quantize: bool, largest: float) -> None:
    attention, cross, feed_forward = modules()
    h_TD, scale_D, shift_D = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH), torch.randn(WIDTH)
    a_TD = nn.functional.layer_norm(h_TD, (WIDTH,), scale_D, shift_D, EPS)
    linears = [attention.o, cross.q, cross.o]
    want = [torch.cat([attention.q(a_TD), attention.k(a_TD), attention.v(a_TD)], dim=-1), feed_forward(a_TD)]
    want += [linear(a_TD) for linear in linears]
    form = FusedFormat(PlainOps(), torch.float32, quantize=quantize)
    fused = form.fuse(attention, cross, feed_forward)
    _, normed = form.norm(h_TD, None, scale_D, shift_D, EPS)
    assert isinstance(normed, RowScaled) == quantize
    got = [fused.qkv(normed), form.feed_forward(fused, normed)]
    got += [linear(form.linear_input(a_TD)) for linear in (fused.self_output, fused.cross_query, fused.cross_output)]
    assert max(distance(a, b) for a, b in zip(got, want, strict=True)) < largest


@pytest.mark.parametrize("quantize", [False, True])
@torch.inference_mode()
def test_weights_are_shared_or_given_up(quantize: bool) -> None:
    attention, cross, feed_forward = modules()
    fused = FusedFormat(PlainOps(), torch.float32, quantize=quantize).fuse(attention, cross, feed_forward)
    linears = [attention.q, attention.k, attention.v, attention.o, cross.q, cross.o, feed_forward[0], feed_forward[2]]
    assert [linear.weight.numel() == 0 for linear in linears] == [quantize] * len(linears)
    assert cross.k.weight.numel() == WIDTH * WIDTH, "text is projected by the module itself"
    if not quantize:
        assert fused.cross_query.weight_ND.data_ptr() == cross.q.weight.data_ptr()
        assert fused.qkv.weight_ND.data_ptr() == attention.q.weight.data_ptr()
