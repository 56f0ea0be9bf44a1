"""Small parts shared by the Wan family of transformers: norms, projections, patches, timestep features.

Shapes: T tokens, D model width, H heads, K head size, C channels, F latent frames, Y and X latent rows and columns.
Source: LingBot-World v2 official code, wan/modules/model_fast.py.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

PATCH = 2
"""Side of a square patch in latent rows and columns; a patch covers one latent frame."""


class RMSNorm(nn.Module):
    """Divide by the root mean square over the whole width, then scale. Statistics are float32.

    The normalised value is rounded to the input's dtype before the weight is applied, as upstream does.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        inverse_rms = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * inverse_rms).to(x.dtype) * self.weight


class AttentionProjections(nn.Module):
    """The four linears and two norms around an attention; the attention itself belongs to the K/V storage."""

    def __init__(self, width: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm_q = RMSNorm(width, eps)
        self.norm_k = RMSNorm(width, eps)
        self.num_heads = num_heads

    def query(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return normalised queries [T, H, K], before any rotation."""
        return self._split(self.norm_q(self.q(x_TD)))

    def key_value(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised keys and plain values, both [T, H, K], before any rotation."""
        return self._split(self.norm_k(self.k(x_TD))), self._split(self.v(x_TD))

    def output(self, attended_THK: torch.Tensor) -> torch.Tensor:
        """Join the heads and project back to [T, D]."""
        return self.o(attended_THK.flatten(-2))

    def _split(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.unflatten(-1, (self.num_heads, -1))


def layer_norm(
    x_TD: torch.Tensor, scale_D: torch.Tensor, shift_D: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return LN(x) * scale + shift with float32 statistics. `scale_D` is the whole factor, its 1 included."""
    x = x_TD.to(scale_D.dtype)
    return functional.layer_norm(x, (x.shape[-1],), scale_D, shift_D, eps).to(out_dtype)


def sinusoid(timesteps: torch.Tensor, width: int) -> torch.Tensor:
    """Return timestep features, float32 [len(timesteps), width]: cosines, then sines, formed in float64."""
    half = width // 2
    exponents = -torch.arange(half, dtype=torch.float64, device=timesteps.device) / half
    angles = torch.outer(timesteps.to(torch.float64), torch.pow(10000.0, exponents))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.float32)


def patchify(x_CFYX: torch.Tensor) -> torch.Tensor:
    """Fold patches into [T, C*4], feature index channel*4 + dy*2 + dx, tokens in (F, row, column) order."""
    channels, frames, rows, columns = x_CFYX.shape
    split = x_CFYX.reshape(channels, frames, rows // PATCH, PATCH, columns // PATCH, PATCH)
    return split.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * PATCH * PATCH)


def unpatchify(x_TO: torch.Tensor, *, num_frames: int, latent_height: int, latent_width: int) -> torch.Tensor:
    """Unfold head outputs to [C, F, Y, X]. Here the channel is fastest: output index (dy*2 + dx)*C + channel."""
    channels = x_TO.shape[-1] // (PATCH * PATCH)
    split = x_TO.reshape(num_frames, latent_height // PATCH, latent_width // PATCH, PATCH, PATCH, channels)
    return split.permute(5, 0, 1, 3, 2, 4).reshape(channels, num_frames, latent_height, latent_width)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device without making the host wait for what the device has to do before."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
