"""The demo world's video VAE: its sizes, layers that train fast, and passes over whole clips.

Shape suffixes: B clips, C channels, M media frames, F latent frames, H height, W width.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm, WanUpsample
from torch import Tensor

CONFIG = {
    "base_dim": 16,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}


def read_vae(folder: Path) -> AutoencoderKLWan:
    """Read a diffusers folder in float32. Raises FileNotFoundError if it is none; nothing is looked for elsewhere."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: expected the folder of a VAE, has no config.json")
    return AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)


def strip(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Return a copy with the stock layers and the same weights."""
    plain = AutoencoderKLWan(**CONFIG).to(next(vae.parameters()).device)
    plain.load_state_dict(vae.state_dict())
    return plain


def trainable(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Give the layers forwards that train fast: 3-D convolutions as one 2-D convolution over stacked time taps.

    Equal to the stock layers up to rounding; parameters and their names stay.
    """
    for layer in vae.modules():
        if isinstance(layer, WanCausalConv3d):
            layer.forward = functools.partial(_folded_convolution, layer)
        elif isinstance(layer, WanRMS_norm):
            layer.forward = functools.partial(_rms_norm, layer)
        elif isinstance(layer, WanUpsample):
            layer.forward = functools.partial(F.interpolate, scale_factor=(2.0, 2.0), mode="nearest")
    return vae


def _folded_convolution(layer: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    padding, stride = list(layer._padding), layer.stride[0]
    time_taps, rows, columns = layer.kernel_size
    y = x.permute(0, 2, 3, 4, 1)
    if cache_x is not None and padding[4] > 0:
        y = torch.cat([cache_x.permute(0, 2, 3, 4, 1).to(y.dtype), y], dim=1)
        padding[4] -= cache_x.shape[2]
    if padding[4] > 0:
        y = F.pad(y, (0, 0, 0, 0, 0, 0, padding[4], 0))
    batch, frames, height, width, channels = y.shape
    out_frames = (frames - time_taps) // stride + 1
    if time_taps > 1:
        y = torch.cat([y[:, tap : tap + (out_frames - 1) * stride + 1 : stride] for tap in range(time_taps)], dim=-1)
    images = y.reshape(batch * out_frames, height, width, time_taps * channels).permute(0, 3, 1, 2)
    weight = layer.weight.permute(0, 2, 1, 3, 4).reshape(layer.out_channels, time_taps * channels, rows, columns)
    out = F.conv2d(images, weight, layer.bias, layer.stride[1:], (padding[2], padding[0]))
    return out.permute(0, 2, 3, 1).reshape(batch, out_frames, *out.shape[2:], -1).permute(0, 4, 1, 2, 3)


def _rms_norm(layer: WanRMS_norm, x: Tensor) -> Tensor:
    dim = 1 if layer.channel_first else -1
    scale = torch.rsqrt(x.float().square().mean(dim, keepdim=True) + 1e-12)
    return x * scale.to(x.dtype) * layer.gamma.to(x.dtype)


def encode(vae: AutoencoderKLWan, frames_BCMHW: Tensor) -> Tensor:
    """Return mean and log variance [B, 2z, F, H/8, W/8]: the first frame by itself, then all others in one call."""
    vae.clear_cache()
    moments = []
    for part in (frames_BCMHW[:, :, :1], frames_BCMHW[:, :, 1:]):
        if part.shape[2]:
            vae._enc_conv_idx = [0]
            moments.append(vae.encoder(part, feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx))
    vae_moments = vae.quant_conv(torch.cat(moments, dim=2))
    vae.clear_cache()
    return vae_moments


def decode(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """Return frames [B, 3, M, H, W] of unnormalised latents: the first by itself, then all others in one call."""
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents_BCFHW)
    frames = []
    for index, part in enumerate((hidden[:, :, :1], hidden[:, :, 1:])):
        if part.shape[2]:
            vae._conv_idx = [0]
            frames.append(vae.decoder(part, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=index == 0))
    vae.clear_cache()
    return torch.cat(frames, dim=2)
