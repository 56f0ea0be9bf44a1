"""Layers of the DreamZero transformer beside those of `wan/layers.py`, under the checkpoint's names.

Shapes: B streams (branches, or one while they are equal), T tokens of a forward, D model width, H heads, K head size,
I image width, A action width, N actions.
Source of the formulas: DreamZero official code, the causal Wan model of its action head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worldmodel.dreamzero.transformer_config import TransformerConfig
from worldmodel.wan.layers import AttentionProjections, RMSNorm, layer_norm
from worldmodel.wan.transformer import TimeConstants, WanLayer

IMAGE_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `rows` of a forward, which share a timestep."""

    rows: slice
    time: TimeConstants


class CrossProjections(AttentionProjections):
    """Cross-attention to text and to image tokens: one query, two pairs of keys and values."""

    def __init__(self, width: int, num_heads: int, eps: float) -> None:
        super().__init__(width, num_heads, eps)
        self.k_img = nn.Linear(width, width)
        self.v_img = nn.Linear(width, width)
        self.norm_k_img = RMSNorm(width, eps)

    def image_key_value(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised keys and plain values of image tokens, both [T, H, K]."""
        return self._split(self.norm_k_img(self.k_img(x_TD))), self._split(self.v_img(x_TD))


class Layer(WanLayer):
    """One transformer layer; video, action and state tokens share its weights."""

    cross_attn: CrossProjections

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            CrossProjections(config.width, config.num_heads, config.eps),
            width=config.width,
            num_heads=config.num_heads,
            ffn_dim=config.ffn_dim,
            eps=config.eps,
        )

    def self_attention_input(self, h_BTD: Tensor, index: int, segments: Sequence[Segment]) -> Tensor:
        """Return the modulated norm that feeds q, k and v."""
        parts = []
        for segment in segments:
            m = segment.time.layers[index]
            rows_BTD = h_BTD[:, segment.rows]
            parts.append(layer_norm(rows_BTD, m.attention_scale, m.attention_shift, self.eps, self.plan.linear))
        return _join(parts)

    def after_self_attention(
        self, h_BTD: Tensor, attended_BTHK: Tensor, index: int, segments: Sequence[Segment]
    ) -> Tensor:
        """Add the gated attention."""
        update_BTD = self.self_attn.output(attended_BTHK)
        gates = [segment.time.layers[index].attention_gate for segment in segments]
        return _add_gated(h_BTD, update_BTD, gates, segments)

    def cross_query(self, h_BTD: Tensor) -> Tensor:
        """Return the cross-attention queries [B, T, H, K]."""
        a_BTD = layer_norm(h_BTD, self.norm3.weight, self.norm3.bias, self.eps, self.plan.linear)
        return self.cross_attn.query(a_BTD)

    def after_cross_attention(
        self, h_BTD: Tensor, attended_BTHK: Tensor, index: int, segments: Sequence[Segment]
    ) -> Tensor:
        """Add the attention to text and image, ungated, and the gated feed-forward."""
        h_BTD = h_BTD + self.cross_attn.output(attended_BTHK).to(h_BTD.dtype)
        parts = []
        for segment in segments:
            m = segment.time.layers[index]
            rows_BTD = h_BTD[:, segment.rows]
            parts.append(layer_norm(rows_BTD, m.feed_forward_scale, m.feed_forward_shift, self.eps, self.plan.linear))
        gates = [segment.time.layers[index].feed_forward_gate for segment in segments]
        return _add_gated(h_BTD, self.ffn(_join(parts)), gates, segments)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _add_gated(h_BTD: Tensor, update_BTD: Tensor, gates: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor:
    update_BTD = update_BTD.to(h_BTD.dtype)
    parts = [
        torch.addcmul(h_BTD[:, segment.rows], update_BTD[:, segment.rows], gate_D)
        for segment, gate_D in zip(segments, gates, strict=True)
    ]
    return _join(parts)


class ImageProjection(nn.Module):
    """Image tokens to the model width: norm, Linear, exact GELU, Linear, norm."""

    def __init__(self, image_dim: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(image_dim, eps=IMAGE_NORM_EPS),
            nn.Linear(image_dim, image_dim),
            nn.GELU(),
            nn.Linear(image_dim, width),
            nn.LayerNorm(width, eps=IMAGE_NORM_EPS),
        )

    def forward(self, tokens_TI: Tensor) -> Tensor:
        return self.proj(tokens_TI)


class CategoryLinear(nn.Module):
    """A linear with one weight per embodiment category, of which a checkpoint has one: x W + b."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(1, in_features, out_features))
        self.b = nn.Parameter(torch.empty(1, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W[0] + self.b[0]


class CategoryPerceptron(nn.Module):
    """Two category linears with a ReLU between them."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(in_features, hidden_features)
        self.layer2 = CategoryLinear(hidden_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(functional.relu(self.layer1(x)))


class ActionEncoder(nn.Module):
    """Noisy actions and their timestep to tokens."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(action_dim, width)
        self.W2 = CategoryLinear(2 * width, width)
        self.W3 = CategoryLinear(width, width)

    def forward(self, action_NA: Tensor, encoded_D: Tensor) -> Tensor:
        """Return tokens [N, D]; `encoded_D` comes from `action_time_encoding`, one timestep for all actions."""
        features_ND = self.W1(action_NA)
        joined = torch.cat([features_ND, encoded_D.to(features_ND.dtype).expand_as(features_ND)], dim=-1)
        return self.W3(functional.silu(self.W2(joined)))


def action_time_encoding(timesteps: Tensor, width: int) -> Tensor:
    """Return features of raw timesteps, float32 [len(timesteps), width]: sines, then cosines."""
    half = width // 2
    exponents = -torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    # The order of float32 roundings is that of the official code: exponent times log(10000), then exp.
    frequencies = torch.exp(exponents * torch.log(torch.tensor(10000.0, device=timesteps.device)))
    angles = timesteps.to(torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
