"""The UMT5 encoder: parameter names of transformers' `UMT5EncoderModel`, one prompt at a time, layers one by one.

Our own, so that layers can be streamed and so that the one embedding table is found under either of its two names,
whatever `tie_word_embeddings` says; transformers' class is the twin in the tests.

Shape suffixes: L tokens, D width, H heads, K head size.
Facts: LingBot-World v2 official code, wan/modules/t5.py: no attention scaling, no biases, a relative position table in
every layer, softmax in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worldmodel.checkpoint.config_values import fixed, integer, number
from worldmodel.wan.layers import RMSNorm

_FIXED: tuple[tuple[str, object], ...] = (
    ("model_type", "umt5"),
    ("feed_forward_proj", "gated-gelu"),
    ("dense_act_fn", "gelu_new"),
    ("is_gated_act", True),
    ("is_decoder", False),
)
_SIZES = {
    "d_model": 1 << 16,
    "d_ff": 1 << 20,
    "d_kv": 1024,
    "num_heads": 512,
    "num_layers": 512,
    "vocab_size": 1 << 24,
}
_DISTANCES = {"relative_attention_num_buckets": 1 << 16, "relative_attention_max_distance": 1 << 16}
"""Sizes of a config with the largest value that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UMT5Config:
    """Sizes of the encoder. Field names are the checkpoint's."""

    d_model: int
    d_ff: int
    d_kv: int
    num_heads: int
    num_layers: int
    vocab_size: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    @property
    def exact_buckets(self) -> int:
        """Distances of one direction that have a row of the bias table each."""
        return self.relative_attention_num_buckets // 4

    def __post_init__(self) -> None:
        if self.relative_attention_num_buckets < 4:
            raise ValueError(
                "text encoder config: relative_attention_num_buckets must be at least 4, "
                f"got {self.relative_attention_num_buckets}"
            )
        if self.relative_attention_max_distance <= self.exact_buckets:
            raise ValueError(
                f"text encoder config: relative_attention_max_distance must be above {self.exact_buckets}, "
                f"a quarter of the buckets, got {self.relative_attention_max_distance}"
            )


def parse_umt5_config(content: Mapping[str, object]) -> UMT5Config:
    """Read a transformers config. Raises ValueError for a missing size and for a structure this module has not."""
    for key, expected in _FIXED:
        fixed(content.get(key, expected), f"text encoder config: {key}", expected)
    missing = [key for key in _SIZES if key not in content]
    if missing:
        raise ValueError(f"text encoder config: missing {', '.join(missing)}")
    sizes = {
        key: integer(content[key], f"text encoder config: {key}", maximum=maximum)
        for key, maximum in (_SIZES | _DISTANCES).items()
        if key in content
    }
    epsilon = number(
        content.get("layer_norm_epsilon", 1e-6),
        "text encoder config: layer_norm_epsilon",
        minimum=1e-30,
        maximum=1.0,
    )
    return UMT5Config(**sizes, layer_norm_epsilon=epsilon)


class SelfAttention(nn.Module):
    """Attention of all heads with a learned bias by distance."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.num_heads = config.num_heads

    def forward(self, x_LD: Tensor, buckets_LL: Tensor) -> Tensor:
        q_HLK, k_HLK, v_HLK = (
            linear(x_LD).unflatten(-1, (self.num_heads, -1)).transpose(0, 1) for linear in (self.q, self.k, self.v)
        )
        bias_HLL = self.relative_attention_bias(buckets_LL).permute(2, 0, 1)
        scores_HLL = q_HLK @ k_HLK.transpose(1, 2) + bias_HLL
        weights_HLL = torch.softmax(scores_HLL, dim=-1, dtype=torch.float32).to(x_LD.dtype)
        return self.o((weights_HLL @ v_HLK).transpose(0, 1).flatten(1))


class GatedFeedForward(nn.Module):
    """`wo(gelu(wi_0 x) * wi_1 x)`."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_LD: Tensor) -> Tensor:
        return self.wo(functional.gelu(self.wi_0(x_LD), approximate="tanh") * self.wi_1(x_LD))


class _AttentionStep(nn.Module):
    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.SelfAttention = SelfAttention(config)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)


class _FeedForwardStep(nn.Module):
    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.DenseReluDense = GatedFeedForward(config)
        self.layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)


class UMT5Layer(nn.Module):
    """One encoder layer: attention and feed-forward, both behind a norm and added to their input."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.steps = (_AttentionStep(config), _FeedForwardStep(config))
        self.layer = nn.ModuleList(self.steps)

    def forward(self, h_LD: Tensor, buckets_LL: Tensor) -> Tensor:
        attention, feed_forward = self.steps
        h_LD = h_LD + attention.SelfAttention(attention.layer_norm(h_LD), buckets_LL)
        return h_LD + feed_forward.DenseReluDense(feed_forward.layer_norm(h_LD))


class _Stack(nn.Module):
    def __init__(self, config: UMT5Config, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.block = nn.ModuleList(UMT5Layer(config) for _ in range(config.num_layers))
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)


class UMT5Encoder(nn.Module):
    """Token ids to rows. Parameters are left uninitialised."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = _Stack(config, self.shared)

    @property
    def layers(self) -> tuple[UMT5Layer, ...]:
        return tuple(layer for layer in self.encoder.block if isinstance(layer, UMT5Layer))

    def forward(self, ids_L: Tensor) -> Tensor:
        """Return rows [L, D] of the tokens of one prompt, end token included, no padding."""
        return self.finish(self.run(self.embed(ids_L), self.layers))

    def embed(self, ids_L: Tensor) -> Tensor:
        """Look the tokens up."""
        return self.shared(ids_L)

    def run(self, h_LD: Tensor, layers: Iterable[UMT5Layer]) -> Tensor:
        """Run layers, which need not be those of this module: streamed ones come one by one."""
        buckets_LL = distance_buckets(h_LD.shape[0], self.config).to(h_LD.device)
        for layer in layers:
            h_LD = layer(h_LD, buckets_LL)
        return h_LD

    def finish(self, h_LD: Tensor) -> Tensor:
        """Apply the last norm."""
        return self.encoder.final_layer_norm(h_LD)


def distance_buckets(num_tokens: int, config: UMT5Config) -> Tensor:
    """Return the row of the bias table for every query and key, int64 [L, L].

    Half of the rows are for keys ahead. Of each half, the first half counts distances one by one, the rest grows with
    their logarithm up to `relative_attention_max_distance` (Raffel et al. 2020, section 2.1, as in T5).
    """
    half = config.relative_attention_num_buckets // 2
    exact = config.exact_buckets
    positions_L = torch.arange(num_tokens)
    ahead_LL = positions_L[None, :] - positions_L[:, None]
    distance_LL = ahead_LL.abs()
    growth = math.log(config.relative_attention_max_distance / exact)
    far_LL = torch.log(distance_LL.clamp_min(1).float() / exact) / growth * (half - exact)
    far_LL = (exact + far_LL.to(torch.int64)).clamp_max(half - 1)
    bucket_LL = torch.where(distance_LL < exact, distance_LL, far_LL)
    return bucket_LL + (ahead_LL > 0) * half
