"""Layers of the Wan 2.1 VAE with the parameter names of diffusers' `AutoencoderKLWan`.

Shape suffixes: B batch, T frames, H height, W width, C channels, O output channels, N = B*T, S = H*W.

Activations are [B, T, H, W, C], contiguous, so a frame is a channels-last image and a 1x1x1 convolution is a matrix
product. Convolutions have four paths, equal to rounding; `fold` chooses one and rearranges weights for it, once:

    PLAIN    as written, F.conv3d, the twin of the others; what a layer does before `fold`
    FOLDED   the three time taps stacked as channels, one F.conv2d per chunk; any device
    ONEDNN   oneDNN's own three-dimensional convolution in this layout, on a CPU. torch takes another, slower kernel for
             small inputs, so it is called by name. 12 frames 96x160 of 16 channels, 2 threads: 9 ms, FOLDED 21 ms
             (measured 2026-11-29)
    FUSED    cuDNN's three-dimensional convolution without a bias; bias, norm, SiLU and residual sums are fused kernels
             between them (`worldmodel/kernels/vae_ops.py`). At 96 channels cuDNN 9 has only a slow one; there the norm
             writes all three taps, as FOLDED has them. 12 frames 480x832 on an H200: 8.0 ms, so 4.7 ms (2026-11-30)

Facts of the structure: LingBot-World v2 official code, wan/modules/vae2_1.py.
"""

from __future__ import annotations

import platform
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodel.kernels.choice import create_vae_ops, has_triton
from worldmodel.kernels.vae_ops import VaeOps
from worldmodel.wan.vae_cache import CacheCursor

_TIME_TAPS = 3
_HISTORY_FRAMES = _TIME_TAPS - 1


class ConvPath(StrEnum):
    """How convolutions are computed; see the head of this file."""

    PLAIN = "plain"
    FOLDED = "folded"
    ONEDNN = "onednn"
    FUSED = "fused"


def best_path(device: torch.device, dtype: torch.dtype) -> ConvPath:
    """Return the fastest path for a device: FUSED on CUDA with Triton.

    ONEDNN only where it is known to have fast code for three dimensions and never to refuse the type: float32 on x86.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if device.type == "cpu" and dtype == torch.float32 and is_x86 and torch.backends.mkldnn.is_available():
        return ConvPath.ONEDNN
    return ConvPath.FUSED if has_triton(device) else ConvPath.FOLDED


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(nn.Module):
    """Scale each pixel's channel vector to length sqrt(C), times `gamma`; statistics in float32."""

    def __init__(self, channels: int, num_trailing: int = 3) -> None:
        super().__init__()
        self.gamma = _parameter(channels, *([1] * num_trailing))

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        return self.write_to(torch.empty_like(x_BTHWC), x_BTHWC)

    def write_to(self, out_BTHWC: Tensor, x_BTHWC: Tensor) -> Tensor:
        """Write the result to `out_BTHWC` and return it."""
        x32_BTHWC = x_BTHWC.float()
        channels = x_BTHWC.shape[-1]
        length_BTHW1 = torch.linalg.vector_norm(x32_BTHWC, dim=-1, keepdim=True)
        scale_BTHW1 = channels**0.5 / length_BTHW1.clamp_min_(1e-12)
        return torch.mul(x32_BTHWC, scale_BTHW1, out=out_BTHWC).mul_(self.gamma.view(channels))


class PointwiseConv(nn.Module):
    """A convolution with a kernel of one, as a matrix product over channels."""

    def __init__(self, in_channels: int, out_channels: int, num_trailing: int = 3) -> None:
        super().__init__()
        self.weight = _parameter(out_channels, in_channels, *([1] * num_trailing))
        self.bias = _parameter(out_channels)

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        return F.linear(x_BTHWC, self.weight.flatten(1), self.bias)


class SpatialConv(nn.Module):
    """A 3x3 convolution of each frame by itself. `padding` counts pixels on every side."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, padding: int = 1) -> None:
        super().__init__()
        self.weight = _parameter(out_channels, in_channels, 3, 3)
        self.bias = _parameter(out_channels)
        self.stride = stride
        self.padding = padding

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        return _conv2d(x_BTHWC, self.weight, self.bias, self.stride, self.padding)


class DoublingConv(SpatialConv):
    """Repeat each pixel 2x2, then convolve 3x3.

    Folded, the repetition never happens: an output pixel sees only 2x2 input pixels, so that a 2x2 convolution whose
    taps are sums of the 3x3 taps gives all four output pixels as channels, with 4/9 of the multiplications. Along one
    axis, with taps a b c and input x: y[2i] = a x[i-1] + (b + c) x[i], y[2i+1] = (a + b) x[i] + c x[i+1].
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.folded_weight: Tensor | None
        self.folded_bias: Tensor
        self.register_buffer("folded_weight", None, persistent=False)
        self.register_buffer("folded_bias", None, persistent=False)
        self.fused: VaeOps | None = None

    def fold(self, path: ConvPath) -> None:
        """Sum the taps for every path but PLAIN. `weight` stays for reading; later changes to it have no effect."""
        self.fused = create_vae_ops(self.weight.device) if path is ConvPath.FUSED else None
        if path is ConvPath.PLAIN:
            self.folded_weight = None
            return
        sums_even = [[1, 0, 0], [0, 1, 1]]
        sums_odd = [[1, 1, 0], [0, 0, 1]]
        # Axes: output parity, folded tap, original tap.
        sums = torch.tensor([sums_even, sums_odd], dtype=torch.float32, device=self.weight.device)
        taps = torch.einsum("ocyx,ajy,bkx->abocjk", self.weight.detach().float(), sums, sums)
        folded = taps.flatten(0, 2).to(self.weight.dtype)
        self.folded_weight = folded.contiguous(memory_format=torch.channels_last)
        self.folded_bias = self.bias.detach().repeat(4)

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        batch, time, height, width, channels = x_BTHWC.shape
        if self.folded_weight is None:
            spread = x_BTHWC[:, :, :, None, :, None].expand(batch, time, height, 2, width, 2, channels)
            return super().forward(spread.reshape(batch, time, 2 * height, 2 * width, channels))
        if self.fused is not None:
            return self.fused.join_doubled(_conv2d(x_BTHWC, self.folded_weight, None, 1, 1), self.bias)
        # One row and column more than the input: parity 0 starts at the first of them, parity 1 at the second.
        y_BTHWO = _conv2d(x_BTHWC, self.folded_weight, self.folded_bias, 1, 1)
        out_channels = y_BTHWO.shape[-1] // 4
        doubled = y_BTHWO.new_empty(batch, time, height, 2, width, 2, out_channels)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            start = (2 * row + column) * out_channels
            doubled[:, :, :, row, :, column] = y_BTHWO[
                :, :, row : row + height, column : column + width, start : start + out_channels
            ]
        return doubled.view(batch, time, 2 * height, 2 * width, out_channels)


class CausalConv(nn.Module):
    """A convolution with three time taps that ends at the current frame, 3x3 or 1x1 in space, keeping the size."""

    def __init__(self, in_channels: int, out_channels: int, spatial_kernel: int = 3) -> None:
        super().__init__()
        self.weight = _parameter(out_channels, in_channels, _TIME_TAPS, spatial_kernel, spatial_kernel)
        self.bias = _parameter(out_channels)
        self.path = ConvPath.PLAIN
        self.stacks_taps = False
        self.fused: VaeOps | None = None

    def fold(self, path: ConvPath) -> None:
        """Take a path and put the weight's memory in its order, channels innermost; shape and values stay."""
        out_channels, in_channels = self.weight.shape[:2]
        self.path = path
        self.stacks_taps = path is ConvPath.FUSED and 64 < in_channels < 128 and out_channels > 64
        self.fused = create_vae_ops(self.weight.device) if path is ConvPath.FUSED else None
        memory_order = {
            ConvPath.PLAIN: (0, 1, 2, 3, 4),
            ConvPath.FOLDED: (0, 3, 4, 2, 1),
            ConvPath.ONEDNN: (0, 2, 3, 4, 1),
            ConvPath.FUSED: (0, 3, 4, 2, 1) if self.stacks_taps else (0, 2, 3, 4, 1),
        }[path]
        inverse = sorted(range(5), key=memory_order.__getitem__)
        rearranged = self.weight.detach().permute(memory_order).contiguous().permute(inverse)
        self.weight = nn.Parameter(rearranged, requires_grad=False)

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        """Convolve the frames with the history of the stream before them."""
        padded_BTHWC = torch.cat([cursor.take(x_BTHWC, _HISTORY_FRAMES), x_BTHWC], dim=1)
        cursor.keep(padded_BTHWC[:, -_HISTORY_FRAMES:])
        return self.convolve(padded_BTHWC)

    def convolve(self, x_BTHWC: Tensor, time_stride: int = 1, *, adds_bias: bool = True) -> Tensor:
        """Convolve without padding in time: T frames give (T - 3) // time_stride + 1.

        `adds_bias` of False leaves the bias to the caller; PLAIN and FUSED only.
        """
        is_pointwise = self.weight.shape[-1] == 1
        if self.path is ConvPath.FOLDED or (self.path is ConvPath.FUSED and is_pointwise):
            return self._convolve_folded(x_BTHWC, time_stride)
        x_BCTHW = x_BTHWC.permute(0, 4, 1, 2, 3)
        edge = self.weight.shape[-1] // 2
        stride, padding = (time_stride, 1, 1), (0, edge, edge)
        if self.path is ConvPath.ONEDNN:
            y_BOTHW = torch.mkldnn_convolution(x_BCTHW, self.weight, self.bias, padding, stride, (1, 1, 1), 1)
        else:
            y_BOTHW = F.conv3d(x_BCTHW, self.weight, self.bias if adds_bias else None, stride, padding)
        return y_BOTHW.permute(0, 2, 3, 4, 1).contiguous()

    def convolve_active(self, active_BTHWC: Tensor, *, adds_bias: bool = True) -> Tensor:
        """Convolve what `norm_silu` made for this layer; `adds_bias` as for `convolve`."""
        if self.stacks_taps:
            return self.convolve_stacked(active_BTHWC, self.bias if adds_bias else None)
        return self.convolve(active_BTHWC, adds_bias=adds_bias)

    def _convolve_folded(self, x_BTHWC: Tensor, time_stride: int) -> Tensor:
        last = x_BTHWC.shape[1] - _HISTORY_FRAMES
        taps = [x_BTHWC[:, tap : tap + last : time_stride] for tap in range(_TIME_TAPS)]
        return self.convolve_stacked(torch.cat(taps, dim=-1), self.bias)

    def convolve_stacked(self, stacked_BTHWC: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve frames that have the three taps side by side as channels, the oldest first."""
        # In the order that `fold` chose these are views.
        folded_OHWC = self.weight.permute(0, 3, 4, 2, 1).flatten(3)
        if self.weight.shape[-1] == 1:
            return F.linear(stacked_BTHWC, folded_OHWC.flatten(1), bias)
        return _conv2d(stacked_BTHWC, folded_OHWC.permute(0, 3, 1, 2), bias, 1, 1)


def norm_silu(
    norm: RMSNorm, conv: CausalConv, x_BTHWC: Tensor, cursor: CacheCursor, *, input_bias_C: Tensor | None = None
) -> Tensor:
    """Return silu(norm(x)) as `conv.convolve_active` takes it: behind the stream's history, or with taps as channels.

    `input_bias_C` is added to x first; FUSED only.
    """
    if conv.stacks_taps:
        return _norm_silu_taps(norm, conv, x_BTHWC, cursor, input_bias_C)
    batch, time, height, width, channels = x_BTHWC.shape
    padded_BTHWC = x_BTHWC.new_empty(batch, _HISTORY_FRAMES + time, height, width, channels)
    padded_BTHWC[:, :_HISTORY_FRAMES] = cursor.take(x_BTHWC, _HISTORY_FRAMES)
    active_BTHWC = padded_BTHWC[:, _HISTORY_FRAMES:]
    if conv.fused is not None:
        conv.fused.norm_silu(x_BTHWC, input_bias_C, norm.gamma.view(channels), active_BTHWC)
    else:
        F.silu(norm.write_to(active_BTHWC, x_BTHWC), inplace=True)
    cursor.keep(padded_BTHWC[:, -_HISTORY_FRAMES:])
    return padded_BTHWC


def _norm_silu_taps(
    norm: RMSNorm, conv: CausalConv, x_BTHWC: Tensor, cursor: CacheCursor, input_bias_C: Tensor | None
) -> Tensor:
    assert conv.fused is not None, "only the FUSED path stacks taps"
    batch, time, height, width, channels = x_BTHWC.shape
    history_BTHWC = cursor.take(x_BTHWC, _HISTORY_FRAMES)
    stacked_BTHWC = x_BTHWC.new_empty(batch, time, height, width, _TIME_TAPS * channels)
    conv.fused.norm_silu_taps(x_BTHWC, input_bias_C, norm.gamma.view(channels), stacked_BTHWC)
    stacked_BTHWC[:, 0, ..., :channels] = history_BTHWC[:, 0]
    stacked_BTHWC[:, 0, ..., channels : 2 * channels] = history_BTHWC[:, 1]
    if time > 1:
        stacked_BTHWC[:, 1, ..., :channels] = history_BTHWC[:, 1]
    # The two newest taps of the last frame are the last two frames.
    newest = stacked_BTHWC[:, -1, ..., channels:].unflatten(-1, (_HISTORY_FRAMES, channels))
    cursor.keep(newest.movedim(-2, 1))
    return stacked_BTHWC


def norm_silu_conv(norm: RMSNorm, conv: CausalConv, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
    """Return conv(silu(norm(x)))."""
    return conv.convolve_active(norm_silu(norm, conv, x_BTHWC, cursor))


class ResidualUnit(nn.Module):
    """Twice norm, SiLU and causal convolution, added to the input."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(in_channels)
        self.conv1 = CausalConv(in_channels, out_channels)
        self.norm2 = RMSNorm(out_channels)
        self.conv2 = CausalConv(out_channels, out_channels)
        self.conv_shortcut = PointwiseConv(in_channels, out_channels) if in_channels != out_channels else None

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        skip_BTHWC = x_BTHWC if self.conv_shortcut is None else self.conv_shortcut(x_BTHWC)
        fused = self.conv1.fused
        # One name for what comes one after the other, so that nothing is kept longer than it is read: these
        # activations decide how much memory a decoder needs (`lingbot/memory.py`).
        y_BTHWC = norm_silu(self.norm1, self.conv1, x_BTHWC, cursor)
        y_BTHWC = self.conv1.convolve_active(y_BTHWC, adds_bias=fused is None)
        input_bias_C = None if fused is None else self.conv1.bias
        y_BTHWC = norm_silu(self.norm2, self.conv2, y_BTHWC, cursor, input_bias_C=input_bias_C)
        y_BTHWC = self.conv2.convolve_active(y_BTHWC, adds_bias=fused is None)
        if fused is not None:
            return fused.add_bias_and_skip(y_BTHWC, self.conv2.bias, skip_BTHWC)
        return y_BTHWC.add_(skip_BTHWC)


class SpatialAttention(nn.Module):
    """Single-head attention among the pixels of each frame, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, num_trailing=2)
        self.to_qkv = PointwiseConv(channels, 3 * channels, num_trailing=2)
        self.proj = PointwiseConv(channels, channels, num_trailing=2)

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        qkv_N1SC = self.to_qkv(self.norm(x_BTHWC)).flatten(2, 3).flatten(0, 1).unsqueeze(1)
        q_N1SC, k_N1SC, v_N1SC = qkv_N1SC.chunk(3, dim=-1)
        mixed_N1SC = F.scaled_dot_product_attention(q_N1SC, k_N1SC, v_N1SC)
        return x_BTHWC + self.proj(mixed_N1SC.reshape(x_BTHWC.shape))


class MiddleStage(nn.Module):
    """Residual unit, spatial attention, residual unit at the latent size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResidualUnit(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([SpatialAttention(channels)])

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        x_BTHWC = self.resnets[0](x_BTHWC, cursor)
        x_BTHWC = self.attentions[0](x_BTHWC)
        return self.resnets[1](x_BTHWC, cursor)


class Downsample(nn.Module):
    """Halve height and width, and with `halve_time` also the frames after the first of the stream."""

    def __init__(self, channels: int, *, halve_time: bool) -> None:
        super().__init__()
        # Index 1 is the checkpoint's; index 0 is its parameterless padding, which `forward` does.
        self.resample = nn.ModuleList([nn.Identity(), SpatialConv(channels, channels, stride=2, padding=0)])
        self.time_conv = CausalConv(channels, channels, spatial_kernel=1) if halve_time else None

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        x_BTHWC = self.resample[1](F.pad(x_BTHWC, (0, 0, 0, 1, 0, 1)))
        if self.time_conv is None:
            return x_BTHWC
        history_BTHWC = cursor.take(x_BTHWC, 1)
        cursor.keep(x_BTHWC[:, -1:])
        if not cursor.is_stream_start:
            return self.time_conv.convolve(torch.cat([history_BTHWC, x_BTHWC], dim=1), time_stride=2)
        # The opening frame has no partner: it passes, and is the history of the frames after it.
        if x_BTHWC.shape[1] == 1:
            return x_BTHWC
        return torch.cat([x_BTHWC[:, :1], self.time_conv.convolve(x_BTHWC, time_stride=2)], dim=1)


class Upsample(nn.Module):
    """Double height and width, halve the channels, and with `double_time` double all frames but the stream's first."""

    def __init__(self, channels: int, *, double_time: bool) -> None:
        super().__init__()
        # Index 1 is the checkpoint's; index 0 is its parameterless interpolation, which is part of ours.
        self.resample = nn.ModuleList([nn.Identity(), DoublingConv(channels, channels // 2)])
        self.time_conv = CausalConv(channels, 2 * channels, spatial_kernel=1) if double_time else None

    def forward(self, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        if self.time_conv is not None:
            x_BTHWC = self._double_time(self.time_conv, x_BTHWC, cursor)
        return self.resample[1](x_BTHWC)

    def _double_time(self, time_conv: CausalConv, x_BTHWC: Tensor, cursor: CacheCursor) -> Tensor:
        if not cursor.is_stream_start:
            return _interleave_halves(time_conv(x_BTHWC, cursor))
        # The opening latent frame stays one frame and never enters the history: the next one sees zeros before it.
        opening_BTHWC, rest_BTHWC = x_BTHWC[:, :1], x_BTHWC[:, 1:]
        if rest_BTHWC.shape[1] == 0:
            cursor.keep(cursor.take(x_BTHWC, _HISTORY_FRAMES))
            return opening_BTHWC
        return torch.cat([opening_BTHWC, _interleave_halves(time_conv(rest_BTHWC, cursor))], dim=1)


def _interleave_halves(x_BTHWC: Tensor) -> Tensor:
    """Turn the two halves of the channels into an even and an odd frame."""
    batch, time, height, width, channels = x_BTHWC.shape
    halves = x_BTHWC.view(batch, time, height, width, 2, channels // 2)
    return halves.permute(0, 1, 4, 2, 3, 5).reshape(batch, 2 * time, height, width, channels // 2)


def _conv2d(x_BTHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Convolve each frame; the permutes are views of channels-last images."""
    batch, time = x_BTHWC.shape[:2]
    images_NCHW = x_BTHWC.flatten(0, 1).permute(0, 3, 1, 2)
    y_NOHW = F.conv2d(images_NCHW, weight, bias, stride, padding)
    return y_NOHW.permute(0, 2, 3, 1).contiguous().unflatten(0, (batch, time))
