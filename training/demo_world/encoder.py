"""The trained VAE's encoder over whole clips in one pass, frozen, for the many walks that a training run looks at.

Equal to `vae_model.encode` up to rounding, with less to move: nothing is cached from one part of a clip to the next,
weights are cast and folded once, and everything between two convolutions is one kernel where it is compiled.

Shape suffixes: B clips, M media frames, T frames at some depth, H W rows and columns at that depth, C channels, F Y X
latent frames, rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as functional
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResample, WanResidualBlock
from torch import Tensor, nn

MAX_ELEMENTS = 2**31 - 1
"""Of a tensor that cuDNN takes in one piece."""
_INPUT_CHANNELS = 8
"""Colours and zeros: what tensor cores read in one piece."""

Layer = Callable[[Tensor], Tensor]


class ClipEncoder:
    """Encodes clips to the means of their latents, not normalised, with layers in `dtype`."""

    def __init__(self, vae: AutoencoderKLWan, dtype: torch.dtype) -> None:
        encoder = vae.encoder
        self._dtype, self._width = dtype, encoder.conv_in.out_channels
        self._layers: list[Layer] = [
            _causal(encoder.conv_in, dtype, _INPUT_CHANNELS),
            *(_layer(module, dtype) for module in encoder.down_blocks),
            _residual(encoder.mid_block.resnets[0], dtype),
            _attention(encoder.mid_block.attentions[0], dtype),
            _residual(encoder.mid_block.resnets[1], dtype),
            _activated(encoder.norm_out.gamma),
            _causal(encoder.conv_out, dtype),
        ]
        num_channels = vae.config.z_dim
        self._out_weight = vae.quant_conv.weight[:num_channels].flatten(1).to(dtype)
        self._out_bias = vae.quant_conv.bias[:num_channels].to(dtype)
        self._compiled: Layer = self._all_layers
        self._compiled_sizes: frozenset[tuple[int, int]] = frozenset()

    def compile(self, sizes: Collection[tuple[int, int]]) -> None:
        """Compile for batches of so many clips of so many media frames, on a GPU; others are not worth the seconds."""
        self._compiled = torch.compile(self._all_layers, dynamic=False)
        self._compiled_sizes = frozenset(sizes)

    @torch.no_grad()
    def __call__(self, frames_BMHW3: Tensor) -> Tensor:
        """Encode frames, uint8 or float on the scale of 0 to 255, to float32 [B, C, F, Y, X]."""
        num_clips, num_media_frames = frames_BMHW3.shape[:2]
        most = max(1, MAX_ELEMENTS // (frames_BMHW3[0, ..., 0].numel() * 3 * self._width))
        group = math.ceil(num_clips / math.ceil(num_clips / most))
        is_compiled = (num_clips, num_media_frames) in self._compiled_sizes
        encode = self._compiled if is_compiled else self._all_layers
        # The layers have their own number format; whether a caller has autocast on would compile them once more.
        with torch.autocast(frames_BMHW3.device.type, enabled=False):
            means = torch.cat([encode(part) for part in frames_BMHW3.split(group)])
        return means.permute(0, 4, 1, 2, 3)

    def _all_layers(self, frames_BMHW3: Tensor) -> Tensor:
        x = functional.pad(frames_BMHW3.float() / 127.5 - 1, (0, _INPUT_CHANNELS - 3)).to(self._dtype)
        for layer in self._layers:
            x = layer(x)
        return functional.linear(x, self._out_weight, self._out_bias).float()


# Layers take and return [B, T, H, W, C], contiguous: as images, what cuDNN calls channels last.


def _layer(module: nn.Module, dtype: torch.dtype) -> Layer:
    if isinstance(module, WanResidualBlock):
        return _residual(module, dtype)
    if isinstance(module, WanResample) and module.mode in ("downsample2d", "downsample3d"):
        return _downsample(module, dtype)
    raise TypeError(f"an encoder of this VAE has residual and downsampling layers; got {type(module).__name__}")


def _images(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve each frame."""
    images = x.flatten(0, 1).permute(0, 3, 1, 2)
    out = functional.conv2d(images, weight, bias, stride, padding)
    return out.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def _folded(weight_OITHW: Tensor, num_channels: int) -> Tensor:
    """Return the weight of a convolution over frames whose channels are those of all time taps, [O, T * I, H, W]."""
    padded = functional.pad(weight_OITHW, (0, 0, 0, 0, 0, 0, 0, num_channels - weight_OITHW.shape[1]))
    return padded.transpose(1, 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _causal(module: nn.Conv3d, dtype: torch.dtype, num_channels: int | None = None) -> Layer:
    """A frame sees itself and the two before it, or just itself if the kernel is one frame long."""
    taps = module.kernel_size[0]
    channels = module.in_channels if num_channels is None else num_channels
    assert module.bias is not None
    weight, bias = _folded(module.weight.detach().to(dtype), channels), module.bias.detach().to(dtype)
    padding = module.kernel_size[1] // 2

    def convolve(x: Tensor) -> Tensor:
        if taps > 1:
            before = functional.pad(x, (0, 0, 0, 0, 0, 0, taps - 1, 0))
            x = torch.cat([before[:, tap : tap + x.shape[1]] for tap in range(taps)], dim=-1)
        return _images(x, weight, bias, 1, padding)

    return convolve


def _activated(gamma_C111: Tensor) -> Layer:
    """The norm of `WanRMS_norm`, and a SiLU."""
    norm = _norm(gamma_C111)
    return lambda x: functional.silu(norm(x))


def _norm(gamma: Tensor) -> Layer:
    gamma = gamma.detach().flatten().float()

    def normalise(x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-12)
        return (x.float() * scale * gamma).to(x.dtype)

    return normalise


def _residual(module: WanResidualBlock, dtype: torch.dtype) -> Layer:
    steps = (
        _activated(module.norm1.gamma),
        _causal(module.conv1, dtype),
        _activated(module.norm2.gamma),
        _causal(module.conv2, dtype),
    )
    shortcut = None if isinstance(module.conv_shortcut, nn.Identity) else _causal(module.conv_shortcut, dtype)

    def run(x: Tensor) -> Tensor:
        h = x
        for step in steps:
            h = step(h)
        return h + (x if shortcut is None else shortcut(x))

    return run


def _downsample(module: WanResample, dtype: torch.dtype) -> Layer:
    """Halve rows and columns, and in `downsample3d` the frames after the first, which see themselves and two before."""
    convolution = module.resample[1]
    weight = convolution.weight.detach().to(dtype).contiguous(memory_format=torch.channels_last)
    bias = convolution.bias.detach().to(dtype)
    time_weight = time_bias = None
    if module.mode == "downsample3d":
        time_weight = _folded(module.time_conv.weight.detach().to(dtype), module.time_conv.in_channels)
        time_bias = module.time_conv.bias.detach().to(dtype)

    def run(x: Tensor) -> Tensor:
        x = _images(functional.pad(x, (0, 0, 0, 1, 0, 1)), weight, bias, 2, 0)
        if time_weight is None or time_bias is None or x.shape[1] == 1:
            return x
        pairs = (x.shape[1] - 1) // 2
        taps = torch.cat([x[:, tap : tap + 2 * pairs - 1 : 2] for tap in range(3)], dim=-1)
        return torch.cat([x[:, :1], _images(taps, time_weight, time_bias, 1, 0)], dim=1)

    return run


def _attention(module: WanAttentionBlock, dtype: torch.dtype) -> Layer:
    """Attention of one head within each frame."""
    norm = _norm(module.norm.gamma)
    weights = [layer.weight.detach().flatten(1).to(dtype) for layer in (module.to_qkv, module.proj)]
    biases = [layer.bias.detach().to(dtype) for layer in (module.to_qkv, module.proj)]

    def run(x: Tensor) -> Tensor:
        tokens = norm(x).flatten(0, 1).flatten(1, 2)
        q, k, v = functional.linear(tokens, weights[0], biases[0]).unsqueeze(1).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + functional.linear(attended, weights[1], biases[1]).view_as(x)

    return run
