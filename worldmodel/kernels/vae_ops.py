"""The small operations between the convolutions of a video VAE, as one Protocol with a plain torch twin.

A convolution without its bias leaves the bias to the operation behind it, so that each reads and writes its tensors
once. Sums are float32; a value is rounded where it is stored.

Shapes: B batch, T frames, H height, W width, C channels, O output channels, K three times C. All tensors but views of
frames are contiguous.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

NORM_FLOOR = 1e-12
"""Smallest length a pixel's channel vector is divided by."""


class VaeOps(Protocol):
    """One implementation of the operations."""

    def norm_silu(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWC: Tensor) -> None:
        """Write silu(gamma * sqrt(C) * y / |y|) to `out_BTHWC`, y being x + bias. Both are whole frames in memory."""
        ...

    def norm_silu_taps(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWK: Tensor) -> None:
        """Like `norm_silu`, with the result where the three time taps of a convolution look for it, K = 3C.

        Frame t goes to channels 2C.. of frame t, C..2C of frame t + 1 and 0..C of frame t + 2, as far as they exist;
        the rest of `out_BTHWK` is left as it is, for the history.
        """
        ...

    def add_bias_and_skip(self, y_BTHWC: Tensor, bias_C: Tensor, skip_BTHWC: Tensor) -> Tensor:
        """Return y + bias + skip, in the memory of y."""
        ...

    def join_doubled(self, y_BTHWO: Tensor, bias_C: Tensor) -> Tensor:
        """Put the four output pixels of each place side by side: [B, T, H+1, W+1, 4C] gives [B, T, 2H, 2W, C].

        Parity (r, c) of pixel (2i + r, 2j + c) is channel group 2r + c of place (i + r, j + c).
        """
        ...


class PlainVaeOps:
    """Every operation in plain torch, on any device: the twin of the fused kernels."""

    def norm_silu(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWC: Tensor) -> None:
        y_BTHWC = x_BTHWC.float() if bias_C is None else x_BTHWC.float() + bias_C.float()
        length_BTHW1 = torch.linalg.vector_norm(y_BTHWC, dim=-1, keepdim=True).clamp_min(NORM_FLOOR)
        normed_BTHWC = y_BTHWC * (x_BTHWC.shape[-1] ** 0.5 / length_BTHW1) * gamma_C.float()
        out_BTHWC.copy_(functional.silu(normed_BTHWC))

    def norm_silu_taps(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWK: Tensor) -> None:
        num_frames, channels = x_BTHWC.shape[1], x_BTHWC.shape[-1]
        active_BTHWC = torch.empty_like(x_BTHWC)
        self.norm_silu(x_BTHWC, bias_C, gamma_C, active_BTHWC)
        for delay in range(min(3, num_frames)):
            tap = slice((2 - delay) * channels, (3 - delay) * channels)
            out_BTHWK[:, delay:, :, :, tap] = active_BTHWC[:, : num_frames - delay]

    def add_bias_and_skip(self, y_BTHWC: Tensor, bias_C: Tensor, skip_BTHWC: Tensor) -> Tensor:
        return y_BTHWC.copy_(y_BTHWC.float() + bias_C.float() + skip_BTHWC.float())

    def join_doubled(self, y_BTHWO: Tensor, bias_C: Tensor) -> Tensor:
        batch, time, height, width, channels = y_BTHWO.shape
        height, width, channels = height - 1, width - 1, channels // 4
        doubled = y_BTHWO.new_empty(batch, time, height, 2, width, 2, channels)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            group = slice((2 * row + column) * channels, (2 * row + column + 1) * channels)
            doubled[:, :, :, row, :, column] = y_BTHWO[:, :, row : row + height, column : column + width, group]
        return doubled.view(batch, time, 2 * height, 2 * width, channels) + bias_C
