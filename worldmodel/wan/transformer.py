"""What the transformers of the Wan family share: a layer's weights, the time path, the head, and number formats.

A model adds what is its own and owns the order of work.

Shapes: T tokens, D model width, C channels; leading dimensions of residual streams are free.
Source of the formulas: Wan 2.1, wan/modules/model.py, as in the official code of both models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from worldmodel.wan.layers import PATCH, AttentionProjections, layer_norm, sinusoid
from worldmodel.wan.precision import PrecisionPlan, precision_plan
from worldmodel.wan.rope import RopeTable

TIME_ROWS = 6
"""Rows that a layer takes from a timestep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModulation:
    """Six vectors [D] of one layer at one timestep; the scales include their 1.

    Shifts and scales are float32, gates have the dtype of the residual stream.
    """

    attention_shift: Tensor
    attention_scale: Tensor
    attention_gate: Tensor
    feed_forward_shift: Tensor
    feed_forward_scale: Tensor
    feed_forward_gate: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeConstants:
    """Everything the network derives from one timestep; constants of the model."""

    timestep: float
    layers: tuple[LayerModulation, ...]
    head_shift: Tensor
    head_scale: Tensor


class WanLayer(nn.Module):
    """The weights that every layer has, under the checkpoint's names and left uninitialised."""

    def __init__(
        self, cross_attention: AttentionProjections, *, width: int, num_heads: int, ffn_dim: int, eps: float
    ) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, TIME_ROWS, width))
        self.self_attn = AttentionProjections(width, num_heads, eps)
        self.cross_attn = cross_attention
        self.norm3 = nn.LayerNorm(width, eps=eps)
        self.ffn = nn.Sequential(nn.Linear(width, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, width))
        self.eps = eps
        self.plan = precision_plan("fp32")

    def apply_precision(self, plan: PrecisionPlan) -> None:
        """Bring the parts that the linears' format does not hold into theirs."""
        self.plan = plan
        self.norm3.float()
        self.modulation.data = self.modulation.data.float()

    def time_modulation(self, projection_6D: Tensor, residual: torch.dtype) -> LayerModulation:
        """Add the layer's own modulation to the projected timestep; `residual` is the dtype of the residual stream."""
        rows = (self.modulation[0] + projection_6D).unbind(0)
        return LayerModulation(
            attention_shift=rows[0],
            attention_scale=1.0 + rows[1],
            attention_gate=rows[2].to(residual),
            feed_forward_shift=rows[3],
            feed_forward_scale=1.0 + rows[4],
            feed_forward_gate=rows[5].to(residual),
        )


class Head(nn.Module):
    """Norm, modulation by the timestep embedding, and the projection to patches; float32 in every plan."""

    def __init__(self, *, width: int, out_channels: int, eps: float) -> None:
        super().__init__()
        self.head = nn.Linear(width, out_channels * PATCH * PATCH)
        self.modulation = nn.Parameter(torch.empty(1, 2, width))
        self.eps = eps

    def forward(self, h_TD: Tensor, constants: TimeConstants) -> Tensor:
        """Return float32 patches [..., T, C*4]."""
        return self.head(layer_norm(h_TD, constants.head_scale, constants.head_shift, self.eps, torch.float32))


class WanSizes(Protocol):
    """Sizes that a transformer's configuration tells its base."""

    @property
    def head_dim(self) -> int: ...

    @property
    def freq_dim(self) -> int: ...


class WanTransformer(nn.Module):
    """Base of a transformer, which sets what is named here, the modules in the order of its checkpoint.

    Call `apply_precision` once after the weights are loaded.
    """

    config: WanSizes
    patch_embedding: nn.Conv3d
    text_embedding: nn.Sequential
    time_embedding: nn.Sequential
    time_projection: nn.Sequential
    layers: Sequence[WanLayer]
    head: Head

    def __init__(self) -> None:
        super().__init__()
        self.plan = precision_plan("fp32")
        self._rope_tables: dict[tuple[int, int], RopeTable] = {}

    @property
    def device(self) -> torch.device:
        return self.patch_embedding.weight.device

    def apply_precision(self, plan: PrecisionPlan) -> None:
        """Bring loaded weights into the number formats of a plan; call once."""
        self.plan = plan
        self.requires_grad_(False).to(plan.linear)
        self.time_embedding.float()
        self.time_projection.float()
        self.head.float()
        for layer in self.layers:
            layer.apply_precision(plan)

    def time_constants(self, timestep: float) -> TimeConstants:
        """Derive all modulation of one timestep. It is the same for every token, session and chunk."""
        features = sinusoid(torch.tensor([timestep], dtype=torch.float64, device=self.device), self.config.freq_dim)
        embedding_1D = self.time_embedding(features)
        projection_6D = self.time_projection(embedding_1D).reshape(TIME_ROWS, -1)
        shift, scale = (self.head.modulation[0] + embedding_1D).unbind(0)
        return TimeConstants(
            timestep=timestep,
            layers=tuple(layer.time_modulation(projection_6D, self.plan.residual) for layer in self.layers),
            head_shift=shift,
            head_scale=1.0 + scale,
        )

    def project_patches(self, features_TC: Tensor) -> Tensor:
        """Return the residual stream [T, D] before the first layer from patches in the format of the linears."""
        weight = self.patch_embedding.weight.flatten(1)
        return nn.functional.linear(features_TC, weight, self.patch_embedding.bias).to(self.plan.residual)

    def rope_table(self, latent_height: int, latent_width: int) -> RopeTable:
        """Return the rotary table of a latent size, made once."""
        grid = (latent_height // PATCH, latent_width // PATCH)
        if grid not in self._rope_tables:
            self._rope_tables[grid] = RopeTable(head_dim=self.config.head_dim, grid_height=grid[0], grid_width=grid[1])
        return self._rope_tables[grid]


def text_projection(text_dim: int, width: int) -> nn.Sequential:
    """Make the network from text rows to the model width."""
    return nn.Sequential(nn.Linear(text_dim, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))


def time_networks(freq_dim: int, width: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Make the networks from timestep features to the embedding [D], and from that to the six rows of the layers."""
    embedding = nn.Sequential(nn.Linear(freq_dim, width), nn.SiLU(), nn.Linear(width, width))
    return embedding, nn.Sequential(nn.SiLU(), nn.Linear(width, TIME_ROWS * width))
