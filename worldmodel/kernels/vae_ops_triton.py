"""The operations of `vae_ops.py` as fused Triton kernels. Imported only where Triton is.

Shapes: those of `vae_ops.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_PROGRAM = 4096


@triton.jit
def _norm_silu_kernel(
    x_ptr,
    bias_ptr,
    gamma_ptr,
    out_ptr,
    num_pixels,
    frame_pixels,
    num_channels,
    root_channels,
    PADDED_CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STACKS_TAPS: tl.constexpr,
):
    pixels = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channels = tl.arange(0, PADDED_CHANNELS)
    is_channel = channels < num_channels
    mask = (pixels[:, None] < num_pixels) & is_channel[None, :]
    offsets = pixels[:, None] * num_channels + channels[None, :]
    y = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    length = tl.maximum(tl.sqrt(tl.sum(y * y, 1)), 1e-12)
    gamma = tl.load(gamma_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    normed = y * (root_channels / length)[:, None] * gamma[None, :]
    out = (normed * tl.sigmoid(normed)).to(out_ptr.dtype.element_ty)
    if STACKS_TAPS:
        for delay in tl.static_range(3):
            later = pixels + delay * frame_pixels
            target = later[:, None] * 3 * num_channels + (2 - delay) * num_channels + channels[None, :]
            tl.store(out_ptr + target, out, mask=(later[:, None] < num_pixels) & is_channel[None, :])
    else:
        tl.store(out_ptr + offsets, out, mask=mask)


@triton.jit
def _add_kernel(y_ptr, bias_ptr, skip_ptr, num_elements, num_channels, ELEMENTS: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < num_elements
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    skip = tl.load(skip_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offsets % num_channels, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (y + bias + skip).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join_kernel(y_ptr, bias_ptr, out_ptr, height, width, num_channels, ELEMENTS: tl.constexpr):
    out_row = tl.program_id(0).to(tl.int64)
    image, image_row = out_row // (2 * height), out_row % (2 * height)
    row_parity = image_row % 2
    in_row = image * (height + 1) + image_row // 2 + row_parity
    elements = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = elements < 2 * width * num_channels
    column, channel = elements // num_channels, elements % num_channels
    column_parity = column % 2
    place = in_row * (width + 1) + column // 2 + column_parity
    source = place * 4 * num_channels + (2 * row_parity + column_parity) * num_channels + channel
    value = tl.load(y_ptr + source, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    target = out_row * 2 * width * num_channels + elements
    tl.store(out_ptr + target, value.to(out_ptr.dtype.element_ty), mask=mask)


class TritonVaeOps:
    """Fused kernels for CUDA devices."""

    def norm_silu(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWC: Tensor) -> None:
        _norm_silu(x_BTHWC, bias_C, gamma_C, out_BTHWC, stacks_taps=False)

    def norm_silu_taps(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWK: Tensor) -> None:
        _norm_silu(x_BTHWC, bias_C, gamma_C, out_BTHWK, stacks_taps=True)

    def add_bias_and_skip(self, y_BTHWC: Tensor, bias_C: Tensor, skip_BTHWC: Tensor) -> Tensor:
        _require_contiguous(y=y_BTHWC, bias=bias_C, skip=skip_BTHWC)
        num_elements = y_BTHWC.numel()
        grid = (triton.cdiv(num_elements, ELEMENTS_PER_PROGRAM),)
        _add_kernel[grid](
            y_BTHWC, bias_C, skip_BTHWC, num_elements, y_BTHWC.shape[-1], ELEMENTS=ELEMENTS_PER_PROGRAM, num_warps=4
        )
        return y_BTHWC

    def join_doubled(self, y_BTHWO: Tensor, bias_C: Tensor) -> Tensor:
        batch, time, height, width, channels = y_BTHWO.shape
        height, width, channels = height - 1, width - 1, channels // 4
        _require_contiguous(y=y_BTHWO, bias=bias_C)
        out = torch.empty(batch, time, 2 * height, 2 * width, channels, dtype=y_BTHWO.dtype, device=y_BTHWO.device)
        grid = (batch * time * 2 * height, triton.cdiv(2 * width * channels, ELEMENTS_PER_PROGRAM))
        _join_kernel[grid](y_BTHWO, bias_C, out, height, width, channels, ELEMENTS=ELEMENTS_PER_PROGRAM, num_warps=4)
        return out


def _norm_silu(x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out: Tensor, *, stacks_taps: bool) -> None:
    channels = x_BTHWC.shape[-1]
    padded = triton.next_power_of_2(channels)
    pixels = max(1, ELEMENTS_PER_PROGRAM // padded)
    # Frames behind a history are one run of memory per clip of the batch.
    for x_THWC, out_clip in zip(x_BTHWC, out, strict=True):
        _require_contiguous(x=x_THWC, out=out_clip, gamma=gamma_C)
        num_pixels = x_THWC.numel() // channels
        _norm_silu_kernel[(triton.cdiv(num_pixels, pixels),)](
            x_THWC,
            bias_C,
            gamma_C,
            out_clip,
            num_pixels,
            num_pixels // x_THWC.shape[0],
            channels,
            channels**0.5,
            PADDED_CHANNELS=padded,
            PIXELS=pixels,
            HAS_BIAS=bias_C is not None,
            STACKS_TAPS=stacks_taps,
            num_warps=4,
        )


def _require_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, its strides are {tensor.stride()}")
