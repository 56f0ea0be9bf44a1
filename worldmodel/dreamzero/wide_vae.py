"""The encoder half of the Wan 2.2 VAE: 48 channels, 16 times smaller; pixels come in as 2x2 patches.

It differs from that of Wan 2.1 in its stages: each adds to its result the average of its own input over what one place
of the result covers, time included.

Shapes: B batch, C channels, T frames, H and W, h = H/2, w = W/2.
Facts: Wan 2.2 official code, wan/modules/vae2_2.py; parameter names of diffusers' `AutoencoderKLWan`.
"""

from __future__ import annotations

import itertools
import re

import torch
from torch import Tensor, nn

from worldmodel.dreamzero.observation_vae import ObservationVAE
from worldmodel.wan.original_names import vae_name
from worldmodel.wan.vae_cache import CacheCursor, VAECache
from worldmodel.wan.vae_config import VAEConfig
from worldmodel.wan.vae_layers import CausalConv, Downsample, MiddleStage, ResidualUnit, RMSNorm, norm_silu_conv

PATCH_PIXELS = 2

WIDE_LATENTS_MEAN = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
    *(0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723),
    *(-0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
WIDE_LATENTS_STD = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
    *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
    *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)
"""Statistics of the published Wan 2.2 latents, by channel."""


class AveragePath(nn.Module):
    """Average the input over what a place of the result covers; channels are put together in groups."""

    def __init__(self, in_channels: int, out_channels: int, *, halve_space: bool, halve_time: bool) -> None:
        super().__init__()
        self._space, self._time = (2 if halve_space else 1), (2 if halve_time else 1)
        self._out_channels = out_channels

    def forward(self, x_BTHWC: Tensor, *, is_stream_start: bool) -> Tensor:
        if self._time == 2 and is_stream_start:
            # The opening frame stands alone: what would lie before it is zero, and counts.
            opening = torch.cat([torch.zeros_like(x_BTHWC[:, :1]), x_BTHWC[:, :1]], dim=1)
            if x_BTHWC.shape[1] == 1:
                return self._average(opening)
            return torch.cat([self._average(opening), self._average(x_BTHWC[:, 1:])], dim=1)
        return self._average(x_BTHWC)

    def _average(self, x_BTHWC: Tensor) -> Tensor:
        batch, time, height, width, channels = x_BTHWC.shape
        t, s = self._time, self._space
        split = x_BTHWC.reshape(batch, time // t, t, height // s, s, width // s, s, channels)
        # Channel first, then time, row and column of a place: the order in which they fall into groups.
        joined = split.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)
        return joined.unflatten(-1, (self._out_channels, -1)).mean(dim=-1)


class WideStage(nn.Module):
    """Residual units, then a downsampling step except in the last stage, beside the average of the input."""

    def __init__(
        self, in_channels: int, out_channels: int, num_units: int, *, halve_space: bool, halve_time: bool
    ) -> None:
        super().__init__()
        self._average = AveragePath(in_channels, out_channels, halve_space=halve_space, halve_time=halve_time)
        widths = [in_channels] + [out_channels] * num_units
        self.resnets = nn.ModuleList(ResidualUnit(before, after) for before, after in itertools.pairwise(widths))
        self.downsampler = Downsample(out_channels, halve_time=halve_time) if halve_space else None

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        average_BTHWC = self._average(x_BTHWC, is_stream_start=cursor.is_stream_start)
        for unit in self.resnets:
            x_BTHWC = unit(x_BTHWC, cursor)
        if self.downsampler is not None:
            x_BTHWC = self.downsampler(x_BTHWC, cursor)
        return x_BTHWC + average_BTHWC


class WideEncoder(nn.Module):
    """Patches [B, T, h, w, 12] to mean and log variance [B, F, h/8, w/8, 2*z]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.base_dim, *(config.base_dim * factor for factor in config.dim_mult)]
        self.conv_in = CausalConv(3 * PATCH_PIXELS**2, widths[0])
        self.down_blocks = nn.ModuleList()
        for stage, (in_channels, out_channels) in enumerate(itertools.pairwise(widths)):
            halves = stage < len(config.temperal_downsample)
            self.down_blocks.append(
                WideStage(
                    in_channels,
                    out_channels,
                    config.num_res_blocks,
                    halve_space=halves,
                    halve_time=halves and config.temperal_downsample[stage],
                )
            )
        self.mid_block = MiddleStage(widths[-1])
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = CausalConv(widths[-1], 2 * config.z_dim)

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        x_BTHWC = self.conv_in(x_BTHWC, cursor)
        for stage in self.down_blocks:
            x_BTHWC = stage(x_BTHWC, cursor)
        x_BTHWC = self.mid_block(x_BTHWC, cursor)
        return norm_silu_conv(self.norm_out, self.conv_out, x_BTHWC, cursor)


class WideObservationVAE(ObservationVAE):
    """The Wan 2.2 counterpart of `ObservationVAE`."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__(config)
        # Under the name of the encoder that it replaces.
        self.add_module("encoder", WideEncoder(config))

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along height and width."""
        return PATCH_PIXELS * self.config.spatial_factor

    @torch.no_grad()
    def encode(self, frames_BCTHW: Tensor, cache: VAECache | None = None) -> tuple[Tensor, VAECache]:
        """Encode as `WanVAE.encode` does; height and width must be divisible by 16."""
        return super().encode(_patches(frames_BCTHW), cache)

    def _check_frames(self, frames_BCTHW: Tensor, *, is_stream_start: bool) -> None:
        # The base class counts colours; here they are patches of colours.
        super()._check_frames(frames_BCTHW[:, :3], is_stream_start=is_stream_start)


def _patches(frames_BCTHW: Tensor) -> Tensor:
    """Fold 2x2 pixels into channels, in the order colour, column, row."""
    batch, channels, time, height, width = frames_BCTHW.shape
    if height % PATCH_PIXELS or width % PATCH_PIXELS:
        raise ValueError(f"frames: height and width must be even, got {height} x {width}")
    split = frames_BCTHW.reshape(
        batch, channels, time, height // PATCH_PIXELS, PATCH_PIXELS, width // PATCH_PIXELS, PATCH_PIXELS
    )
    return split.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def wide_vae_name(original: str, num_units: int) -> str:
    """Return our name of an encoder tensor in the original layout; `num_units` residual units come first in a stage."""
    match = re.fullmatch(r"encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.(.+)", original)
    if match is None:
        return vae_name(original)
    stage, place, rest = match.groups()
    if int(place) >= num_units:
        return f"encoder.down_blocks.{stage}.downsampler.{rest}"
    unit = vae_name(f"encoder.downsamples.0.{rest}").removeprefix("encoder.down_blocks.0.")
    return f"encoder.down_blocks.{stage}.resnets.{place}.{unit}"
