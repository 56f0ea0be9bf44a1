"""The small operations between the matrix products of a transformer layer, as one Protocol with a plain torch twin.

Each operation reads and writes the residual stream once. Statistics and sums are float32; a value is rounded where it
is stored, and q and k also between norm and weight, as the unfused layer does.

Shapes: T tokens of a chunk in (frame, row, column) order, D model width, H heads, K head size, R rotated pairs = K / 2,
F latent frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvcache.pool import WritableRows

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SMALLEST_LARGEST = 1e-30
"""A row whose largest value is below this counts as zeros; keeps scales and their inverses normal numbers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowScaled:
    """A matrix in float8 e4m3 [T, D] with one float32 factor per row [T, 1]: row t stands for values[t] * scales[t]."""

    values_TD: Tensor
    scales_T1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """What a layer adds to the residual stream: `branch` times `gate`, then the camera's scale and shift.

    h becomes g = h + gate * branch, then g + camera_scale * g + camera_shift. None leaves a part out.
    """

    branch_TD: Tensor
    gate_D: Tensor | None = None
    camera_scale_TD: Tensor | None = None
    camera_shift_TD: Tensor | None = None


class LayerOps(Protocol):
    """One implementation of the operations. `name` is shown to operators."""

    @property
    def name(self) -> str: ...

    def residual_norm(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the updated residual stream in its own dtype, and LN of it times `scale_D` plus `shift_D`.

        The stream may be updated in place: use the returned one only.
        """
        ...

    def residual_norm_fp8(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, RowScaled]:
        """Like `residual_norm`, with the norm's result quantised by row."""
        ...

    def heads_to_cache(
        self,
        qkv_T3D: Tensor,
        q_weight_D: Tensor,
        k_weight_D: Tensor,
        rotations_TR2: Tensor,
        eps: float,
        rows: WritableRows,
    ) -> Tensor:
        """Return normalised, rotated queries [T, H, K]; write normalised, rotated keys and plain values to `rows`.

        `rotations_TR2` has cosine and sine, float32. The norm is RMS over the whole width. Where `rows` is float8, so
        are the queries.
        """
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        """Return x / rms(x), rounded, times the weight, in the dtype of `x_TD` or then as float8 without a scale.

        May work in place: use the result only.
        """
        ...

    def quantize(self, x_TD: Tensor) -> RowScaled:
        """Quantise by row: the largest value of a row becomes the largest of the format."""
        ...

    def gelu_fp8(self, x_TD: Tensor) -> RowScaled:
        """Return gelu(x) in its tanh form, quantised by row."""
        ...


class PlainOps:
    """Every operation in plain torch, on any device: the twin of the fused kernels."""

    name = "plain"

    def residual_norm(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        h_TD, norm_TD = self._residual_norm(h_TD, update, scale_D, shift_D, eps)
        return h_TD, norm_TD.to(out_dtype)

    def residual_norm_fp8(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, RowScaled]:
        h_TD, norm_TD = self._residual_norm(h_TD, update, scale_D, shift_D, eps)
        return h_TD, quantize_rows(norm_TD)

    @staticmethod
    def _residual_norm(
        h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if update is not None:
            branch_TD = update.branch_TD.float()
            sum_TD = h_TD.float() + (branch_TD if update.gate_D is None else branch_TD * update.gate_D.float())
            if update.camera_scale_TD is not None and update.camera_shift_TD is not None:
                sum_TD = sum_TD + update.camera_scale_TD.float() * sum_TD + update.camera_shift_TD.float()
            h_TD = sum_TD.to(h_TD.dtype)
        norm_TD = functional.layer_norm(h_TD.float(), h_TD.shape[-1:], scale_D.float(), shift_D.float(), eps)
        return h_TD, norm_TD

    def heads_to_cache(
        self,
        qkv_T3D: Tensor,
        q_weight_D: Tensor,
        k_weight_D: Tensor,
        rotations_TR2: Tensor,
        eps: float,
        rows: WritableRows,
    ) -> Tensor:
        q_TD, k_TD, v_TD = qkv_T3D.chunk(3, dim=-1)
        shape_THK = (qkv_T3D.shape[0], *rows.k_XHD.shape[1:])
        q_THK = _rotate(rms_norm(q_TD, q_weight_D, eps).view(shape_THK), rotations_TR2)
        k_THK = _rotate(rms_norm(k_TD, k_weight_D, eps).view(shape_THK), rotations_TR2)
        tokens_P = torch.arange(rows.tokens_per_frame, device=qkv_T3D.device)
        index_T = (rows.first_rows_F[:, None] + tokens_P).flatten()
        v_THK = v_TD.reshape(shape_THK)
        if rows.k_XHD.dtype != FP8:
            rows.k_XHD.index_copy_(0, index_T, k_THK)
            rows.v_XHD.index_copy_(0, index_T, v_THK)
            return q_THK
        for cache_XHD, new_THK in ((rows.k_XHD, k_THK), (rows.v_XHD, v_THK)):
            # As bytes: torch has few operations on float8.
            cache_XHD.view(torch.uint8).index_copy_(0, index_T, to_fp8(new_THK).view(torch.uint8))
        return to_fp8(q_THK)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        norm_TD = rms_norm(x_TD, weight_D, eps)
        return to_fp8(norm_TD) if out_dtype == FP8 else norm_TD

    def quantize(self, x_TD: Tensor) -> RowScaled:
        return quantize_rows(x_TD)

    def gelu_fp8(self, x_TD: Tensor) -> RowScaled:
        return quantize_rows(functional.gelu(x_TD.float(), approximate="tanh"))


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of a row, round, multiply by the weight."""
    x32_TD = x_TD.float()
    inverse_T1 = torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + eps)
    return (x32_TD * inverse_T1).to(x_TD.dtype) * weight_D


def quantize_rows(x_TD: Tensor) -> RowScaled:
    """Quantise by row. The scale of a row of zeros is not 0."""
    x32_TD = x_TD.float()
    largest_T1 = x32_TD.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_LARGEST)
    values_TD = to_fp8(x32_TD * (FP8_MAX / largest_T1))
    return RowScaled(values_TD=values_TD, scales_T1=largest_T1 / FP8_MAX)


def to_fp8(x: Tensor) -> Tensor:
    """Round to float8 e4m3 without a scale; values beyond its range become its ends."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _rotate(x_THK: Tensor, rotations_TR2: Tensor) -> Tensor:
    even_THR, odd_THR = x_THK.float().view(*x_THK.shape[:-1], -1, 2).unbind(-1)
    cos_T1R, sin_T1R = rotations_TR2[:, None, :, 0], rotations_TR2[:, None, :, 1]
    pairs = (even_THR * cos_T1R - odd_THR * sin_T1R, even_THR * sin_T1R + odd_THR * cos_T1R)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x_THK.dtype)
