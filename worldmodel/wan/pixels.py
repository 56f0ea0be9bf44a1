"""Pixels as the worker sends them: RGB24 and planar YUV 4:2:0, made on the device in integer arithmetic.

Shape suffixes: 3 colours (R, G, B), T media frames, H height, W width, h = H/2, w = W/2.

The rule, equal bit for bit on every device and in the NumPy twin of the tests:

    R, G, B   round(255 * clamp(v / 2 + 0.5, 0, 1)) in float32, ties to even
    Y         (  16 * 2^16 + 2^15 + 11966 R + 40254 G +  4064 B) >> 16    per pixel
    U         ( 128 * 2^18 + 2^17 -  6596 r - 22188 g + 28784 b) >> 18    r, g, b: sums over the 2x2 pixels of a sample
    V         ( 128 * 2^18 + 2^17 + 28784 r - 26145 g -  2639 b) >> 18

BT.709 in limited range (ITU-R BT.709-6, sections 3 and 4): Y is in 16..235, U and V in 16..240. The factors are
round(2^16 * exact) except one that differs by one, so that the chroma factors add up to 0 and grey stays exactly grey.
"""

from __future__ import annotations

import torch
from torch import Tensor

LUMA_FACTORS = (11966, 40254, 4064)
U_FACTORS = (-6596, -22188, 28784)
V_FACTORS = (28784, -26145, -2639)
FACTOR_BITS = 16


def to_rgb24(frames_3THW: Tensor) -> Tensor:
    """Turn frames in [-1, 1] into contiguous uint8 [T, H, W, 3] on the same device; values outside are clamped."""
    return _levels(frames_3THW).permute(1, 2, 3, 0).contiguous()


def to_yuv420(frames_3THW: Tensor) -> Tensor:
    """Turn frames in [-1, 1] into contiguous uint8 [T, H*3/2, W] on the same device, in memory as FFmpeg's `yuv420p`.

    Each frame is H*W bytes of Y, then H*W/4 bytes of U and H*W/4 bytes of V, every plane row by row.

    Raises:
        ValueError: if height or width is odd.
    """
    levels_3THW = _levels(frames_3THW).to(torch.int32)
    _, num_frames, height, width = levels_3THW.shape
    if height % 2 or width % 2:
        raise ValueError(f"frames: YUV 4:2:0 needs even height and width, got {height} x {width}")
    y_THW = _weighted(levels_3THW, LUMA_FACTORS, offset=16, shift=FACTOR_BITS)
    rows_3ThW = levels_3THW[:, :, 0::2] + levels_3THW[:, :, 1::2]
    sums_3Thw = rows_3ThW[..., 0::2] + rows_3ThW[..., 1::2]
    u_Thw = _weighted(sums_3Thw, U_FACTORS, offset=128, shift=FACTOR_BITS + 2)
    v_Thw = _weighted(sums_3Thw, V_FACTORS, offset=128, shift=FACTOR_BITS + 2)
    planes = torch.cat([plane.flatten(1) for plane in (y_THW, u_Thw, v_Thw)], dim=1)
    return planes.view(num_frames, height * 3 // 2, width)


def _levels(frames_3THW: Tensor) -> Tensor:
    """Quantise to uint8 [3, T, H, W]."""
    if frames_3THW.dim() != 4 or frames_3THW.shape[0] != 3:
        raise ValueError(f"frames: expected [3, frames, height, width], got {list(frames_3THW.shape)}")
    unit_3THW = (frames_3THW.float() / 2 + 0.5).clamp_(0, 1)
    return unit_3THW.mul_(255).round_().to(torch.uint8)


def _weighted(levels_3THW: Tensor, factors: tuple[int, int, int], *, offset: int, shift: int) -> Tensor:
    """Return (offset + weighted sum of the colours / 2^shift), rounded half up, as uint8. Sums stay below 2^31."""
    total_THW = levels_3THW[0] * factors[0]
    total_THW.add_(levels_3THW[1], alpha=factors[1]).add_(levels_3THW[2], alpha=factors[2])
    total_THW.add_((offset << shift) + (1 << (shift - 1)))
    return total_THW.bitwise_right_shift_(shift).to(torch.uint8)
