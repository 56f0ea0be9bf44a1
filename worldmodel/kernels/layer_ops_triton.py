"""The operations of `layer_ops.py` as fused Triton kernels, one program per token. Imported only where Triton is.

A row of the model width stays in registers between its reading and its writing, so that each operation costs one pass
over its tensors. Shapes: those of `layer_ops.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.pool import WritableRows
from worldmodel.kernels.layer_ops import FP8, RowScaled, Update

FP8_MAX = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-30)


@triton.jit
def _store_quantized(out_ptr, scales_ptr, row, columns, x, mask, width):
    largest = tl.maximum(tl.max(tl.where(mask, tl.abs(x), 0.0), 0), SMALLEST)
    factor = FP8_MAX / largest
    values = tl.minimum(tl.maximum(x * factor, -FP8_MAX), FP8_MAX)
    tl.store(out_ptr + row * width + columns, values.to(tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + row, largest / FP8_MAX)


@triton.jit
def _residual_norm_kernel(
    h_ptr,
    branch_ptr,
    gate_ptr,
    camera_scale_ptr,
    camera_shift_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    out_scales_ptr,
    width,
    eps,
    PADDED_WIDTH: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_CAMERA: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = columns < width
    offsets = row * width + columns
    h = tl.load(h_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            branch *= tl.load(gate_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        h += branch
        if HAS_CAMERA:
            camera_scale = tl.load(camera_scale_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            camera_shift = tl.load(camera_shift_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            h += camera_scale * h + camera_shift
        rounded = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + offsets, rounded, mask=mask)
        h = rounded.to(tl.float32)
    mean = tl.sum(h, 0) / width
    centred = tl.where(mask, h - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    scale = tl.load(scale_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = centred * inverse * scale + shift
    if IS_QUANTIZED:
        _store_quantized(out_ptr, out_scales_ptr, row, columns, out, mask, width)
    else:
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _heads_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rotations_ptr,
    first_rows_ptr,
    q_out_ptr,
    k_ptr,
    v_ptr,
    width,
    tokens_per_frame,
    head_dim,
    eps,
    PADDED_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = columns < width
    stored = tl.load(qkv_ptr + token * 3 * width + part * width + columns, mask=mask, other=0.0)
    cache_row = tl.load(first_rows_ptr + token // tokens_per_frame) + token % tokens_per_frame
    if part == 2:
        tl.store(v_ptr + cache_row * width + columns, _narrow(stored, v_ptr), mask=mask)
    else:
        x = stored.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        weight_ptr = q_weight_ptr if part == 0 else k_weight_ptr
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (x * inverse).to(stored.dtype).to(tl.float32)
        normed = (rounded * weight).to(stored.dtype).to(tl.float32)
        # Element 2i is rotated with element 2i + 1; the table has cosine and sine in the same places.
        turn = tl.load(rotations_ptr + token * head_dim + columns % head_dim)
        even, odd = tl.split(tl.reshape(normed, (PADDED_WIDTH // 2, 2)))
        cos, sin = tl.split(tl.reshape(turn, (PADDED_WIDTH // 2, 2)))
        pairs = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        # Rounded as an unfused layer stores it, whatever the cache holds.
        rotated = tl.reshape(pairs, (PADDED_WIDTH,)).to(stored.dtype)
        if part == 0:
            tl.store(q_out_ptr + token * width + columns, _narrow(rotated, q_out_ptr), mask=mask)
        else:
            tl.store(k_ptr + cache_row * width + columns, _narrow(rotated, k_ptr), mask=mask)


@triton.jit
def _narrow(x, out_ptr):
    """Convert to what a pointer points to; float8 is clamped to its range first."""
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -FP8_MAX), FP8_MAX)
    return x.to(out_ptr.dtype.element_ty)


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, width, eps, PADDED_WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = columns < width
    stored = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0)
    x = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = (x * inverse).to(stored.dtype).to(tl.float32)
    out = (rounded * weight).to(stored.dtype)
    tl.store(out_ptr + row * width + columns, _narrow(out, out_ptr), mask=mask)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scales_ptr, width, PADDED_WIDTH: tl.constexpr, HAS_GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_GELU:
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u.
        x = x * tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    _store_quantized(out_ptr, scales_ptr, row, columns, x, mask, width)


class TritonOps:
    """Fused kernels for CUDA devices. Tensors must be contiguous."""

    name = "triton"

    def residual_norm(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out_TD = torch.empty(h_TD.shape, dtype=out_dtype, device=h_TD.device)
        self._residual_norm(h_TD, update, scale_D, shift_D, eps, out_TD, None)
        return h_TD, out_TD

    def residual_norm_fp8(
        self, h_TD: Tensor, update: Update | None, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, RowScaled]:
        out = _empty_quantized(h_TD)
        self._residual_norm(h_TD, update, scale_D, shift_D, eps, out.values_TD, out.scales_T1)
        return h_TD, out

    @staticmethod
    def _residual_norm(
        h_TD: Tensor,
        update: Update | None,
        scale_D: Tensor,
        shift_D: Tensor,
        eps: float,
        out_TD: Tensor,
        out_scales_T1: Tensor | None,
    ) -> None:
        num_tokens, width = h_TD.shape
        gate_D = camera_scale_TD = camera_shift_TD = branch_TD = None
        if update is not None:
            branch_TD, gate_D = update.branch_TD, update.gate_D
            camera_scale_TD, camera_shift_TD = update.camera_scale_TD, update.camera_shift_TD
        _require_contiguous(h_TD=h_TD, branch_TD=branch_TD, camera_scale_TD=camera_scale_TD)
        _require_contiguous(camera_shift_TD=camera_shift_TD, gate_D=gate_D, scale_D=scale_D, shift_D=shift_D)
        _residual_norm_kernel[(num_tokens,)](
            h_TD,
            branch_TD,
            gate_D,
            camera_scale_TD,
            camera_shift_TD,
            scale_D,
            shift_D,
            out_TD,
            out_scales_T1,
            width,
            eps,
            PADDED_WIDTH=triton.next_power_of_2(width),
            HAS_BRANCH=branch_TD is not None,
            HAS_GATE=gate_D is not None,
            HAS_CAMERA=camera_scale_TD is not None,
            IS_QUANTIZED=out_scales_T1 is not None,
            num_warps=_num_warps(width),
        )

    def heads_to_cache(
        self,
        qkv_T3D: Tensor,
        q_weight_D: Tensor,
        k_weight_D: Tensor,
        rotations_TR2: Tensor,
        eps: float,
        rows: WritableRows,
    ) -> Tensor:
        num_tokens, width = qkv_T3D.shape[0], qkv_T3D.shape[1] // 3
        _, num_heads, head_dim = rows.k_XHD.shape
        _require_contiguous(qkv_T3D=qkv_T3D, q_weight_D=q_weight_D, k_weight_D=k_weight_D, k_XHD=rows.k_XHD)
        _require_contiguous(rotations_TR2=rotations_TR2, first_rows_F=rows.first_rows_F, v_XHD=rows.v_XHD)
        # float8 keys are met by float8 queries.
        q_dtype = FP8 if rows.k_XHD.dtype == FP8 else qkv_T3D.dtype
        q_THK = torch.empty((num_tokens, num_heads, head_dim), dtype=q_dtype, device=qkv_T3D.device)
        _heads_kernel[(num_tokens, 3)](
            qkv_T3D,
            q_weight_D,
            k_weight_D,
            rotations_TR2,
            rows.first_rows_F,
            q_THK,
            rows.k_XHD,
            rows.v_XHD,
            width,
            rows.tokens_per_frame,
            head_dim,
            eps,
            PADDED_WIDTH=triton.next_power_of_2(width),
            num_warps=_num_warps(width),
        )
        return q_THK

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        num_tokens, width = x_TD.shape
        _require_contiguous(x_TD=x_TD, weight_D=weight_D)
        out_TD = torch.empty_like(x_TD, dtype=FP8) if out_dtype == FP8 else x_TD
        _rms_norm_kernel[(num_tokens,)](
            x_TD,
            weight_D,
            out_TD,
            width,
            eps,
            PADDED_WIDTH=triton.next_power_of_2(width),
            num_warps=_num_warps(width),
        )
        return out_TD

    def quantize(self, x_TD: Tensor) -> RowScaled:
        return self._quantize(x_TD, has_gelu=False)

    def gelu_fp8(self, x_TD: Tensor) -> RowScaled:
        return self._quantize(x_TD, has_gelu=True)

    @staticmethod
    def _quantize(x_TD: Tensor, *, has_gelu: bool) -> RowScaled:
        num_tokens, width = x_TD.shape
        _require_contiguous(x_TD=x_TD)
        out = _empty_quantized(x_TD)
        _quantize_kernel[(num_tokens,)](
            x_TD,
            out.values_TD,
            out.scales_T1,
            width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            HAS_GELU=has_gelu,
            num_warps=_num_warps(width),
        )
        return out


def _empty_quantized(like_TD: Tensor) -> RowScaled:
    values_TD = torch.empty(like_TD.shape, dtype=FP8, device=like_TD.device)
    scales_T1 = torch.empty((like_TD.shape[0], 1), dtype=torch.float32, device=like_TD.device)
    return RowScaled(values_TD=values_TD, scales_T1=scales_T1)


def _require_contiguous(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, its strides are {tensor.stride()}")


def _num_warps(width: int) -> int:
    """Return warps such that a thread holds 16 to 32 elements of a row."""
    return max(1, min(16, int(triton.next_power_of_2(width)) // 1024))
