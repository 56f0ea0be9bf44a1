"""The Wan 2.1 video VAE as a pair of streams: pixels to normalised latents, and back.

Shape suffixes: B batch, C channels, T media frames, F latent frames, H height, W width.

Owns the two networks and their order of layers; `vae_layers.py` owns the arithmetic, `vae_cache.py` the memory. The
model keeps no state between calls: who streams passes the cache in and stores the one that comes back.
Facts: LingBot-World v2 official code, wan/modules/vae2_1.py; parameter names of diffusers' `AutoencoderKLWan`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from worldmodel.wan.vae_cache import CacheCursor, VAECache
from worldmodel.wan.vae_config import VAEConfig, parse_vae_config
from worldmodel.wan.vae_layers import (
    CausalConv,
    ConvPath,
    DoublingConv,
    Downsample,
    MiddleStage,
    PointwiseConv,
    ResidualUnit,
    RMSNorm,
    Upsample,
    best_path,
    norm_silu_conv,
)

__all__ = ["ConvPath", "VAECache", "VAEConfig", "WanVAE"]


class Encoder(nn.Module):
    """Pixels [B, T, H, W, 3] to mean and log variance [B, F, H/8, W/8, 2*z]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.base_dim, *(config.base_dim * factor for factor in config.dim_mult)]
        self.conv_in = CausalConv(3, widths[0])
        self.down_blocks = nn.ModuleList()
        for stage, (in_channels, out_channels) in enumerate(itertools.pairwise(widths)):
            for _ in range(config.num_res_blocks):
                self.down_blocks.append(ResidualUnit(in_channels, out_channels))
                in_channels = out_channels
            if stage < len(config.temperal_downsample):
                self.down_blocks.append(Downsample(out_channels, halve_time=config.temperal_downsample[stage]))
        self.mid_block = MiddleStage(widths[-1])
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = CausalConv(widths[-1], 2 * config.z_dim)

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        x_BTHWC = self.conv_in(x_BTHWC, cursor)
        for layer in self.down_blocks:
            x_BTHWC = layer(x_BTHWC, cursor)
        x_BTHWC = self.mid_block(x_BTHWC, cursor)
        return norm_silu_conv(self.norm_out, self.conv_out, x_BTHWC, cursor)


class UpStage(nn.Module):
    """Residual units at one size, then an upsampling step except in the last stage."""

    def __init__(self, in_channels: int, out_channels: int, num_units: int, upsampler: Upsample | None) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * num_units
        self.resnets = nn.ModuleList(ResidualUnit(before, after) for before, after in itertools.pairwise(widths))
        self.upsamplers = None if upsampler is None else nn.ModuleList([upsampler])

    def steps(self) -> Iterator[nn.Module]:
        """Return what is to be run in order, each on the result of the one before it."""
        yield from self.resnets
        yield from self.upsamplers or ()


class Decoder(nn.Module):
    """Latents [B, F, H/8, W/8, z] to pixels [B, T, H, W, 3]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.decoder_base_dim * factor for factor in reversed(config.dim_mult)]
        double_time = list(reversed(config.temperal_downsample))
        self.conv_in = CausalConv(config.z_dim, widths[0])
        self.mid_block = MiddleStage(widths[0])
        self.up_blocks = nn.ModuleList()
        in_channels = widths[0]
        for stage, out_channels in enumerate(widths):
            upsampler = None
            if stage < len(double_time):
                upsampler = Upsample(out_channels, double_time=double_time[stage])
            self.up_blocks.append(UpStage(in_channels, out_channels, config.num_res_blocks + 1, upsampler))
            in_channels = out_channels // 2
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = CausalConv(widths[-1], 3)

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        x_BTHWC = self.mid_block(self.conv_in(x_BTHWC, cursor), cursor)
        # Step by step rather than by stages: a stage's caller would keep its input until it ends.
        for stage in self.up_blocks:
            assert isinstance(stage, UpStage)
            for step in stage.steps():
                x_BTHWC = step(x_BTHWC, cursor)
        return norm_silu_conv(self.norm_out, self.conv_out, x_BTHWC, cursor)


class WanVAE(nn.Module):
    """A causal video VAE whose caches belong to the caller.

    Parameters are allocated but not initialised: load a checkpoint, then call `fold_weights` for the fast path. Whoever
    keeps the weights elsewhere between calls sets `residence`, which every call enters. With `takes_single_frames` a
    call computes one latent frame after the other: a third of the activations of a chunk of three, equal up to
    rounding.
    """

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.residence: Callable[[], AbstractContextManager[None]] = nullcontext
        self.takes_single_frames = False
        self.encoder = Encoder(config)
        self.quant_conv = PointwiseConv(2 * config.z_dim, 2 * config.z_dim)
        self.post_quant_conv = PointwiseConv(config.z_dim, config.z_dim)
        self.decoder = Decoder(config)
        self.latents_mean: Tensor
        self.latents_std: Tensor
        self.register_buffer("latents_mean", torch.tensor(config.latents_mean), persistent=False)
        self.register_buffer("latents_std", torch.tensor(config.latents_std), persistent=False)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> WanVAE:
        """Build the model for a diffusers config. Raises `ValueError` naming the setting it can't honour."""
        return cls(parse_vae_config(config))

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.dtype

    def fold_weights(self, path: ConvPath | None = None) -> None:
        """Rearrange the weights for a convolution path, once, after loading and on the final device and dtype.

        `path` of None takes the fastest one for the device. Results differ between paths by rounding only.
        """
        chosen = best_path(self.quant_conv.weight.device, self.dtype) if path is None else path
        for layer in self.modules():
            if isinstance(layer, CausalConv | DoublingConv):
                layer.fold(chosen)

    @torch.no_grad()
    def encode(self, frames_BCTHW: Tensor, cache: VAECache | None = None) -> tuple[Tensor, VAECache]:
        """Encode the next media frames of a stream to normalised latent means (float32).

        Args:
            frames_BCTHW: RGB in [-1, 1], height and width divisible by 8. The first call of a stream (`cache` None)
                takes 1 + 4n frames and gives 1 + n latent frames, later calls 4n and n.
            cache: What the previous call returned; stays as it is.

        Raises:
            ValueError: for a wrong number of frames, a size that doesn't divide, or a cache of another geometry.
        """
        self._check_frames(frames_BCTHW, is_stream_start=cache is None)
        x_BTHWC = frames_BCTHW.to(self.dtype).permute(0, 2, 3, 4, 1).contiguous()
        with self.residence():
            moments_BFHWC, next_cache = self._run(self._encode_part, self._encoder_parts(x_BTHWC, cache), cache)
            mean_BFHWC = moments_BFHWC[..., : self.config.z_dim].float()
            latent_BFHWC = (mean_BFHWC - self.latents_mean) / self.latents_std
        return latent_BFHWC.permute(0, 4, 1, 2, 3).contiguous(), next_cache

    def _encode_part(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        return self.quant_conv(self.encoder(x_BTHWC, cursor))

    def _encoder_parts(self, x_BTHWC: Tensor, cache: VAECache | None) -> Sequence[Tensor]:
        if not self.takes_single_frames:
            return (x_BTHWC,)
        step = self.config.temporal_factor
        opening = 1 if cache is None else 0
        first = (x_BTHWC[:, :opening],) if opening else ()
        rest_BTHWC = x_BTHWC[:, opening:]
        return first + (rest_BTHWC.split(step, dim=1) if rest_BTHWC.shape[1] else ())

    @staticmethod
    def _run(
        network: Callable[[Tensor, CacheCursor], Tensor], parts: Sequence[Tensor], cache: VAECache | None
    ) -> tuple[Tensor, VAECache]:
        """Run a network over parts of a stream in order; return their results as one, and the next cache."""
        results = []
        for part_BTHWC in parts:
            cursor = CacheCursor(cache)
            # What is between two parts is let go of as it is read; only the caller's own cache stays.
            cache = None
            results.append(network(part_BTHWC, cursor))
            cache = cursor.finish()
        assert cache is not None, "a call has at least one part"
        return (results[0] if len(results) == 1 else torch.cat(results, dim=1)), cache

    @torch.no_grad()
    def decode(self, latent_BCFHW: Tensor, cache: VAECache | None = None) -> tuple[Tensor, VAECache]:
        """Decode the next latent frames of a stream.

        Args:
            latent_BCFHW: Normalised latents. The stream's first latent frame gives 1 media frame, every other one 4.
            cache: What the previous call returned; stays as it is.

        Returns:
            Frames [B, 3, T, 8*H, 8*W] in the model's dtype, not clamped to [-1, 1], and the next cache.

        Raises:
            ValueError: for no frame, a wrong channel count, or a cache of another geometry.
        """
        if latent_BCFHW.dim() != 5 or latent_BCFHW.shape[1] != self.config.z_dim or latent_BCFHW.shape[2] == 0:
            raise ValueError(
                f"latent: expected [batch, {self.config.z_dim}, latent frames >= 1, height, width], "
                f"got {list(latent_BCFHW.shape)}"
            )
        with self.residence():
            x_BFHWC = latent_BCFHW.float().permute(0, 2, 3, 4, 1) * self.latents_std + self.latents_mean
            x_BFHWC = x_BFHWC.to(self.dtype).contiguous()
            parts = x_BFHWC.split(1, dim=1) if self.takes_single_frames else (x_BFHWC,)
            frames_BTHWC, next_cache = self._run(self._decode_part, parts, cache)
        return frames_BTHWC.permute(0, 4, 1, 2, 3), next_cache

    def _decode_part(self, x_BFHWC: Tensor, cursor: CacheCursor) -> Tensor:
        return self.decoder(self.post_quant_conv(x_BFHWC.contiguous()), cursor)

    def encoder_cache_bytes(self, height: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one encoder cache for a picture of `height` x `width` pixels."""
        return _cache_bytes(self.config, height, width, dtype, is_encoder=True)

    def decoder_cache_bytes(self, height: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one decoder cache for a picture of `height` x `width` pixels."""
        return _cache_bytes(self.config, height, width, dtype, is_encoder=False)

    def cache_bytes(self, height: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one encoder and one decoder cache: what a session holds, not counting those of a chunk in flight."""
        return self.encoder_cache_bytes(height, width, dtype) + self.decoder_cache_bytes(height, width, dtype)

    def _check_frames(self, frames_BCTHW: Tensor, *, is_stream_start: bool) -> None:
        factor = self.config.spatial_factor
        if frames_BCTHW.dim() != 5 or frames_BCTHW.shape[1] != 3:
            raise ValueError(f"frames: expected [batch, 3, frames, height, width], got {list(frames_BCTHW.shape)}")
        num_frames, height, width = frames_BCTHW.shape[2:]
        if height % factor or width % factor:
            raise ValueError(f"frames: height and width must be divisible by {factor}, got {height} x {width}")
        step = self.config.temporal_factor
        opening = 1 if is_stream_start else 0
        if num_frames < max(opening, 1) or (num_frames - opening) % step:
            rule = f"the first call of a stream takes 1 + {step}n" if is_stream_start else f"later calls take {step}n"
            raise ValueError(f"frames: {rule} frames, got {num_frames}")


@functools.lru_cache(maxsize=64)
def _cache_bytes(config: VAEConfig, height: int, width: int, dtype: torch.dtype, *, is_encoder: bool) -> int:
    """Count by a pass over shapes alone, so that the number can't drift from what layers keep; it takes a second."""
    with torch.device("meta"):
        twin = WanVAE(config).to(dtype)
        factor = config.spatial_factor
        if is_encoder:
            _, cache = twin.encode(torch.empty(1, 3, 1, height, width))
        else:
            _, cache = twin.decode(torch.empty(1, config.z_dim, 1, height // factor, width // factor))
    return cache.num_bytes
