"""The transformer for many segments at once, with gradients: what clips (`clips.py`) and closed loops share.

The parameters are those of the served `LingBotTransformer`; what is here is the same arithmetic for batches. That both
agree is tested against a served rollout. A segment is the tokens of one chunk at one noise level.

Shape suffixes: G segments, S tokens of a chunk, P tokens of a latent frame, D width, H heads, K head size, R rotated
pairs, L text rows, Q prompts, C channels, F latent frames, Y X latent rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from worldmodel.lingbot.camera import pixel_directions
from worldmodel.lingbot.transformer import Layer, LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.layers import PATCH
from worldmodel.wan.rope import axis_angles, inverse_frequencies, split_head

MAX_PROMPT_ROWS = 64
TEXT_ROWS = MAX_PROMPT_ROWS + 8
"""Rows of a prompt, one row that stands for all padding, and seven masked ones for alignment."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of the segments [G, S, H, K] over whatever history the caller keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Latent size of the demo world and its intrinsics in pixels (fx, fy, cx, cy)."""

    latent_height: int
    latent_width: int
    intrinsics: tuple[float, float, float, float]

    @property
    def tokens_per_frame(self) -> int:
        return (self.latent_height // PATCH) * (self.latent_width // PATCH)


class LayerInputs(NamedTuple):
    """What one layer needs beside the residual stream.

    `time_G6D` comes from the timestep, `scale_GSD` and `shift_GSD` from the camera, `text_GLHK` are keys and values of
    the prompt, `text_bias_G11L` their logits' bias: 0, the logarithm of the number of padding rows, or -inf. A tuple,
    because torch compiles the layers.
    """

    time_G6D: Tensor
    scale_GSD: Tensor
    shift_GSD: Tensor
    rotations_GS1R2: Tensor
    text_GLHK: tuple[Tensor, Tensor]
    text_bias_G11L: Tensor


def history_of(chunk: int, config: TransformerConfig) -> tuple[int, ...]:
    """Return the earlier chunks that a session attends to at a chunk: those of the sink, then those of the window."""
    if config.window_latent_frames is None:
        return tuple(range(chunk))
    per_chunk = config.latent_frames_per_chunk
    sink = config.sink_latent_frames // per_chunk
    window = config.window_latent_frames // per_chunk - 1
    return tuple(earlier for earlier in range(chunk) if earlier < sink or earlier >= chunk - window)


class TrainingNetwork:
    """Functions of one transformer's parameters for one latent size. Nothing here waits for the device."""

    def __init__(self, model: LingBotTransformer, geometry: Geometry) -> None:
        self.model = model
        self.config = model.config
        self.geometry = geometry
        self.device = model.device
        self.rows, self.columns = geometry.latent_height // PATCH, geometry.latent_width // PATCH
        intrinsics = torch.tensor([geometry.intrinsics], dtype=torch.float64)
        rays_13HW = pixel_directions(intrinsics, 8 * geometry.latent_height, 8 * geometry.latent_width)
        folded = functional.pixel_unshuffle(functional.pixel_unshuffle(rays_13HW, 8), PATCH)[0]
        self._directions_P3F = folded.permute(1, 2, 0).reshape(-1, 3, 256).float().to(self.device)
        split = split_head(self.config.head_dim)
        row = axis_angles(torch.arange(self.rows), split.row_pairs)
        column = axis_angles(torch.arange(self.columns), split.column_pairs)
        self._row_angles, self._column_angles = row.to(self.device), column.to(self.device)
        self._time_frequencies = inverse_frequencies(split.time_pairs).to(self.device)
        half = self.config.freq_dim // 2
        exponents = -torch.arange(half, dtype=torch.float64) / half
        self._timestep_frequencies = torch.pow(10000.0, exponents).to(self.device)

    # ------------------------------------------------------------ inputs

    def time(self, timesteps_G: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedding [G, D] and the six modulations [G, 6, D] of timesteps 0 to 1000, in float32."""
        angles = timesteps_G.double()[:, None] * self._timestep_frequencies
        features = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        with torch.autocast(self.device.type, enabled=False):
            embedding_GD = self.model.time_embedding(features)
            return embedding_GD, self.model.time_projection(embedding_GD).unflatten(-1, (6, -1))

    def camera(self, rotations_GF33: Tensor, translations_GF3: Tensor) -> Tensor:
        """Return camera tokens float32 [G, S, D], through the basis that the rays are linear in.

        Rotations are relative to the latent frame before, translations scaled as the network expects them.
        """
        linear = self.model.patch_embedding_wancamctrl
        weight_D6F = linear.weight.unflatten(1, (6, 256))
        with torch.autocast(self.device.type, enabled=False):
            basis_PijD = torch.einsum("pjf,dif->pijd", self._directions_P3F, weight_D6F[:, 3:])
            moved = translations_GF3 @ weight_D6F[:, :3].sum(-1).t() + linear.bias
            turned = torch.einsum("gfij,pijd->gfpd", rotations_GF33, basis_PijD)
            return self.model.camera_tokens(turned + moved[..., None, :]).flatten(1, 2)

    def rope(self, positions_GF: Tensor) -> Tensor:
        """Return cosines and sines float32 [G, S, 1, R, 2] at absolute latent frames."""
        num_segments, num_frames = positions_GF.shape
        time = positions_GF.double()[..., None] * self._time_frequencies
        shape = (num_segments, num_frames, self.rows, self.columns, -1)
        parts = (time[:, :, None, None], self._row_angles[None, None, :, None], self._column_angles[None, None, None])
        by_axis = [torch.stack([a.cos(), a.sin()], dim=-1).float().expand(*shape, -1) for a in parts]
        return torch.cat(by_axis, dim=-2).flatten(1, 3)[:, :, None]

    def text_rows(self, rows_QLC: Tensor, mask_QL: Tensor) -> tuple[Tensor, Tensor]:
        """Embed prompts of at most `MAX_PROMPT_ROWS` rows: [Q, TEXT_ROWS, D] and the logits' bias [Q, 1, 1, TEXT_ROWS].

        `rows_QLC` must be 0 where `mask_QL` is False.
        """
        padded = functional.pad(rows_QLC, (0, 0, 0, TEXT_ROWS - rows_QLC.shape[1]))
        bias_QL = torch.full((len(rows_QLC), TEXT_ROWS), -math.inf, device=rows_QLC.device)
        bias_QL[:, : mask_QL.shape[1]].masked_fill_(mask_QL, 0.0)
        num_padding = self.config.text_rows - mask_QL.sum(1)
        bias_QL[:, MAX_PROMPT_ROWS] = num_padding.float().log()
        return self.model.text_embedding(padded), bias_QL[:, None, None]

    # ------------------------------------------------------------ tokens

    def tokens(self, x_GCFYX: Tensor) -> Tensor:
        """Project latents with their condition, 36 channels, to the residual stream float32 [G, S, D]."""
        segments, channels, frames, height, width = x_GCFYX.shape
        split = x_GCFYX.reshape(segments, channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
        features = split.permute(0, 2, 3, 5, 1, 4, 6).reshape(segments, -1, channels * PATCH * PATCH)
        embedding = self.model.patch_embedding
        return functional.linear(features, embedding.weight.flatten(1), embedding.bias).float()

    def flow_of(self, h_GSD: Tensor, embedding_GD: Tensor) -> Tensor:
        """Project the residual stream to the predicted flow, float32 [G, C, F, Y, X]."""
        head = self.model.head
        shift_GD, scale_GD = (head.modulation[0] + embedding_GD[:, None]).unbind(1)
        normed = functional.layer_norm(h_GSD, h_GSD.shape[-1:], eps=head.eps)
        patches = head.head(normed * (1 + scale_GD[:, None]) + shift_GD[:, None]).float()
        split = patches.unflatten(-1, (PATCH, PATCH, -1)).unflatten(1, (-1, self.rows, self.columns))
        return split.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def layer_forward(layer: Layer, h_GSD: Tensor, inputs: LayerInputs, attend: Attend) -> Tensor:
    """Run one layer on segments; the residual stream is float32."""
    m = (layer.modulation[0] + inputs.time_G6D)[:, :, None].unbind(1)
    attention = layer.self_attn
    a_GSD = functional.layer_norm(h_GSD, h_GSD.shape[-1:], eps=layer.eps) * (1 + m[1]) + m[0]
    q_GSHK = _rotate(attention.query(a_GSD), inputs.rotations_GS1R2)
    k_GSHK, v_GSHK = attention.key_value(a_GSD)
    attended = attend(q_GSHK, _rotate(k_GSHK, inputs.rotations_GS1R2), v_GSHK)
    h_GSD = h_GSD + attention.output(attended).float() * m[2]
    h_GSD = (1 + inputs.scale_GSD.float()) * h_GSD + inputs.shift_GSD.float()
    cross = layer.cross_attn
    text_GSHK = attention_of(cross.query(layer.norm3(h_GSD)), *inputs.text_GLHK, inputs.text_bias_G11L)
    h_GSD = h_GSD + cross.output(text_GSHK).float()
    a_GSD = functional.layer_norm(h_GSD, h_GSD.shape[-1:], eps=layer.eps) * (1 + m[4]) + m[3]
    return h_GSD + layer.ffn(a_GSD).float() * m[5]


def attention_of(q_GSHK: Tensor, k_GLHK: Tensor, v_GLHK: Tensor, bias_G11L: Tensor | None = None) -> Tensor:
    """Return softmax attention of each segment over its own rows."""
    q, k, v = (x.transpose(1, 2).to(v_GLHK.dtype) for x in (q_GSHK, k_GLHK, v_GLHK))
    bias = None if bias_G11L is None else bias_G11L.to(q.dtype)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _rotate(x_GSHK: Tensor, rotations_GS1R2: Tensor) -> Tensor:
    even, odd = x_GSHK.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotations_GS1R2.unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x_GSHK.dtype)
