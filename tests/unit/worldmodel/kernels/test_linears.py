"""Folded weights, and float8 linears against the product they stand for."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.layer_ops_cases import dequantized, distance
from worldmodel.kernels.layer_ops import quantize_rows
from worldmodel.kernels.linears import Fp8Linear, HighLinear, fold_weights


def random_linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def test_folded_linears_give_their_outputs_side_by_side_and_share_the_memory() -> None:
    linears = [random_linear(16, outputs, seed) for seed, outputs in enumerate((8, 24, 4))]
    x = torch.randn(5, 16)
    before = [linear(x) for linear in linears]
    weight, bias = fold_weights(*linears)
    got = HighLinear(weight, bias)(x)
    torch.testing.assert_close(got, torch.cat(before, dim=-1))
    torch.testing.assert_close([linear(x) for linear in linears], before)
    assert {linear.weight.untyped_storage().data_ptr() for linear in linears} == {weight.untyped_storage().data_ptr()}


def test_the_gelu_is_the_tanh_form() -> None:
    linear = random_linear(16, 8, 3)
    x = torch.randn(5, 16)
    expected = nn.GELU(approximate="tanh")(linear(x))
    torch.testing.assert_close(HighLinear(linear.weight, linear.bias).gelu(x), expected)


def test_a_float8_linear_is_the_product_of_the_rounded_numbers() -> None:
    linear = random_linear(256, 64, 4)
    x = torch.randn(32, 256)
    quantized = quantize_rows(x)
    low = Fp8Linear(linear.weight.detach(), linear.bias.detach(), torch.float32)
    weight = dequantized(quantize_rows(linear.weight.detach()))
    expected = nn.functional.linear(dequantized(quantized).double(), weight.double(), linear.bias.detach().double())
    assert distance(low(quantized), expected) < 1e-6
    assert 0.005 < distance(low(quantized), linear(x)) < 0.06
