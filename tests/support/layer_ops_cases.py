"""Random cases for the fused operations of a layer, and the comparison of an implementation with the plain twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache.pool import WritableRows
from worldmodel.kernels.layer_ops import FP8, LayerOps, PlainOps, RowScaled, Update

PLAIN = PlainOps()
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsCase:
    """Sizes of one case."""

    num_frames: int
    tokens_per_frame: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.num_frames * self.tokens_per_frame

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class Draw:
    """Random tensors of a case on a device."""

    def __init__(self, case: OpsCase, device: str, seed: int) -> None:
        self.case = case
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, mean: float = 0.0, spread: float = 1.0) -> Tensor:
        values = mean + spread * torch.randn(*shape, generator=self._generator)
        return values.to(dtype or self.case.dtype).to(self.device)

    def stream(self) -> Tensor:
        return self.tensor(self.case.num_tokens, self.case.width, mean=0.3, spread=3.0)

    def factor(self, mean: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.tensor(self.case.width, mean=mean, spread=0.5, dtype=dtype)

    def rows(self, dtype: torch.dtype | None = None) -> WritableRows:
        """Storage of twice the rows, frames in shuffled places, filled with a mark that must stay elsewhere."""
        case = self.case
        num_places = 2 * case.num_frames + 1
        places = torch.randperm(num_places, generator=self._generator)[: case.num_frames] * case.tokens_per_frame
        shape = (num_places * case.tokens_per_frame, case.num_heads, case.head_dim)
        marked = torch.full(shape, 7.0, device=self.device).to(dtype or case.dtype)
        return WritableRows(
            k_XHD=marked.clone(),
            v_XHD=marked.clone(),
            first_rows_F=places.to(self.device),
            tokens_per_frame=case.tokens_per_frame,
        )


def updates(draw: Draw) -> Iterator[Update | None]:
    """Yield every form of an update."""
    yield None
    yield Update(branch_TD=draw.stream())
    yield Update(branch_TD=draw.stream(), gate_D=draw.factor(0.2, draw.case.dtype))
    yield Update(
        branch_TD=draw.stream(),
        gate_D=draw.factor(0.2, draw.case.dtype),
        camera_scale_TD=draw.tensor(draw.case.num_tokens, draw.case.width, spread=0.2),
        camera_shift_TD=draw.tensor(draw.case.num_tokens, draw.case.width, spread=0.5),
    )


def distance(got: Tensor, expected: Tensor) -> float:
    """Return ||got - expected|| / ||expected||; NaN counts as infinite."""
    got64, expected64 = got.double(), expected.double()
    ratio = ((got64 - expected64).norm() / expected64.norm()).item()
    return ratio if ratio == ratio else float("inf")


def dequantized(x: RowScaled) -> Tensor:
    return x.values_TD.float() * x.scales_T1


def check_residual_norm(ops: LayerOps, draw: Draw, tolerance: float) -> None:
    for update in updates(draw):
        h_TD, scale_D, shift_D = draw.stream(), draw.factor(1.0), draw.factor(0.0)
        expected_h, expected = PLAIN.residual_norm(h_TD.clone(), update, scale_D, shift_D, EPS, draw.case.dtype)
        got_h, got = ops.residual_norm(h_TD.clone(), update, scale_D, shift_D, EPS, draw.case.dtype)
        assert got.dtype == expected.dtype == draw.case.dtype
        assert distance(got_h, expected_h) < tolerance
        assert distance(got, expected) < tolerance


def check_residual_norm_fp8(ops: LayerOps, draw: Draw) -> None:
    for update in updates(draw):
        h_TD, scale_D, shift_D = draw.stream(), draw.factor(1.0), draw.factor(0.0)
        _, expected = PLAIN.residual_norm(h_TD.clone(), update, scale_D, shift_D, EPS, torch.float32)
        _, quantized = PLAIN.residual_norm_fp8(h_TD.clone(), update, scale_D, shift_D, EPS)
        _, got = ops.residual_norm_fp8(h_TD.clone(), update, scale_D, shift_D, EPS)
        assert distance(dequantized(got), dequantized(quantized)) < 0.01
        assert 0.005 < distance(dequantized(got), expected) < 0.04


def check_heads(ops: LayerOps, draw: Draw, tolerance: float) -> None:
    case = draw.case
    qkv = draw.tensor(case.num_tokens, 3 * case.width)
    q_weight, k_weight = draw.factor(1.0, case.dtype), draw.factor(1.0, case.dtype)
    angles = draw.tensor(case.num_tokens, case.head_dim // 2, dtype=torch.float32, spread=2.0)
    rotations = torch.stack([angles.cos(), angles.sin()], dim=-1)
    for dtype, largest in ((case.dtype, tolerance), (FP8, 0.01)):
        rows = draw.rows(dtype)
        copy = replace(rows, k_XHD=rows.k_XHD.clone(), v_XHD=rows.v_XHD.clone())
        expected_q = PLAIN.heads_to_cache(qkv, q_weight, k_weight, rotations, EPS, rows)
        got_q = ops.heads_to_cache(qkv, q_weight, k_weight, rotations, EPS, copy)
        assert got_q.dtype == expected_q.dtype == dtype
        assert distance(got_q, expected_q) < largest
        assert distance(copy.k_XHD, rows.k_XHD) < largest
        assert torch.equal(copy.v_XHD.float(), rows.v_XHD.float())
        assert torch.equal(copy.k_XHD.float() == 7.0, rows.k_XHD.float() == 7.0)


def check_rms_norm(ops: LayerOps, draw: Draw, tolerance: float) -> None:
    x_TD, weight_D = draw.stream(), draw.factor(1.0, draw.case.dtype)
    for dtype, largest in ((draw.case.dtype, tolerance), (FP8, 0.01)):
        expected = PLAIN.rms_norm(x_TD.clone(), weight_D, EPS, dtype)
        got = ops.rms_norm(x_TD.clone(), weight_D, EPS, dtype)
        assert got.dtype == expected.dtype == dtype
        assert distance(got, expected) < largest


def check_quantize(ops: LayerOps, draw: Draw) -> None:
    x_TD = draw.stream()
    x_TD[1] = 0.0
    for quantize, plain in ((ops.quantize, PLAIN.quantize), (ops.gelu_fp8, PLAIN.gelu_fp8)):
        got, expected = quantize(x_TD), plain(x_TD)
        assert distance(dequantized(got), dequantized(expected)) < 0.01
        assert torch.isfinite(dequantized(got)).all()
        assert not dequantized(got)[1].any()
