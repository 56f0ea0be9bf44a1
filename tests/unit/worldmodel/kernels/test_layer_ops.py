"""The plain operations of a fused layer against the formulas of the layer as written, and float8 rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.layer_ops_cases import EPS, PLAIN, Draw, OpsCase, dequantized, distance, updates
from worldmodel.kernels.layer_ops import FP8, FP8_MAX, quantize_rows, to_fp8
from worldmodel.wan.layers import RMSNorm
from worldmodel.wan.rope import rotate

CASE = OpsCase(num_frames=3, tokens_per_frame=4, num_heads=2, head_dim=12, dtype=torch.float32)


@pytest.mark.parametrize("index", range(4))
def test_residual_norm_is_the_sum_and_the_norm_behind_it(index: int) -> None:
    draw = Draw(CASE, "cpu", index)
    update = list(updates(draw))[index]
    h_TD, scale_D, shift_D = draw.stream(), draw.factor(1.0), draw.factor(0.0)
    expected = h_TD.double()
    if update is not None:
        gate = 1.0 if update.gate_D is None else update.gate_D.double()
        expected = expected + gate * update.branch_TD.double()
        if update.camera_scale_TD is not None and update.camera_shift_TD is not None:
            expected = (1 + update.camera_scale_TD.double()) * expected + update.camera_shift_TD.double()
    centred = expected - expected.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    got_h, got = PLAIN.residual_norm(h_TD, update, scale_D, shift_D, EPS, torch.float32)
    assert distance(got_h, expected) < 1e-6
    assert distance(got, normed * scale_D.double() + shift_D.double()) < 1e-6


def test_the_stream_keeps_its_dtype_and_the_norm_takes_the_wanted_one() -> None:
    draw = Draw(OpsCase(num_frames=1, tokens_per_frame=2, num_heads=1, head_dim=12, dtype=torch.bfloat16), "cpu", 3)
    h_TD, normed = PLAIN.residual_norm(draw.stream(), None, draw.factor(1.0), draw.factor(0.0), EPS, torch.float32)
    assert (h_TD.dtype, normed.dtype) == (torch.bfloat16, torch.float32)


def test_heads_are_normed_rotated_and_written_where_they_belong() -> None:
    draw = Draw(CASE, "cpu", 5)
    qkv = draw.tensor(CASE.num_tokens, 3 * CASE.width)
    norms = [RMSNorm(CASE.width, EPS) for _ in range(2)]
    for norm in norms:
        norm.weight.data = draw.factor(1.0)
    angles = draw.tensor(CASE.num_tokens, CASE.head_dim // 2)
    rows = draw.rows()
    rotations_TR2 = torch.stack([angles.cos(), angles.sin()], dim=-1)
    got = PLAIN.heads_to_cache(qkv, norms[0].weight, norms[1].weight, rotations_TR2, EPS, rows)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k, v = (part.unflatten(-1, (CASE.num_heads, -1)) for part in qkv.chunk(3, dim=-1))
    assert distance(got, rotate(norms[0](q.flatten(1)).view_as(q), turn)) < 1e-6
    expected_k = rotate(norms[1](k.flatten(1)).view_as(k), turn)
    places = [int(first) + token for first in rows.first_rows_F for token in range(CASE.tokens_per_frame)]
    assert distance(rows.k_XHD[places], expected_k) < 1e-6
    assert torch.equal(rows.v_XHD[places], v)
    others = sorted(set(range(rows.k_XHD.shape[0])) - set(places))
    assert (rows.k_XHD[others] == 7.0).all()
    assert (rows.v_XHD[others] == 7.0).all()


def test_a_float8_cache_takes_rounded_rows_and_is_met_by_float8_queries() -> None:
    draw = Draw(CASE, "cpu", 6)
    qkv, weight = draw.tensor(CASE.num_tokens, 3 * CASE.width), draw.factor(1.0)
    rotations = torch.stack([torch.ones(CASE.num_tokens, 6), torch.zeros(CASE.num_tokens, 6)], dim=-1)
    wide = draw.rows()
    narrow = replace(draw.rows(FP8), first_rows_F=wide.first_rows_F)
    q_wide = PLAIN.heads_to_cache(qkv, weight, weight, rotations, EPS, wide)
    q_narrow = PLAIN.heads_to_cache(qkv, weight, weight, rotations, EPS, narrow)
    assert q_narrow.dtype == FP8
    assert torch.equal(q_narrow.float(), to_fp8(q_wide).float())
    assert torch.equal(narrow.k_XHD.float(), to_fp8(wide.k_XHD).float())
    assert torch.equal(narrow.v_XHD.float(), to_fp8(wide.v_XHD).float())


def test_quantised_rows_use_the_whole_range_and_lose_what_float8_loses() -> None:
    draw = Draw(CASE, "cpu", 7)
    x = draw.tensor(40, 64, spread=3.0) * torch.logspace(-6, 6, 40)[:, None]
    quantized = quantize_rows(x)
    assert (quantized.values_TD.float().abs().amax(-1) == FP8_MAX).all()
    # Three bits of mantissa: half a step is 1/16 of a number at worst.
    assert ((dequantized(quantized) - x).abs() <= x.abs() / 16 + quantized.scales_T1 * 2**-10).all()


def test_rows_of_zeros_and_numbers_out_of_range_stay_finite() -> None:
    x = torch.zeros(2, 8)
    x[1] = 3e38
    back = dequantized(quantize_rows(x))
    assert torch.equal(back[0], torch.zeros(8))
    assert torch.isfinite(back).all()
    assert to_fp8(torch.tensor([1e9, -1e9])).float().tolist() == [FP8_MAX, -FP8_MAX]
