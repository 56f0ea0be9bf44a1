"""Build the tiny LingBot transformer of the golden vectors, and a K/V cache that fits it."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.cache import KVCache
from tests.support.lingbot_golden import manifest, tensors
from worldmodel.lingbot.transformer import LingBotTransformer, kv_geometry
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.precision import precision_plan

SESSION = "golden"


def main_geometry() -> dict[str, Any]:
    """Return chunk, sink and visible frames, latent size and number of chunks of the main rollout."""
    geometry = manifest()["transformer_runtime"]["rollout_main"]
    assert isinstance(geometry, dict)
    return geometry


def transformer_config(
    *, sink_latent_frames: int = 0, visible_latent_frames: int | None = None, latent_frames_per_chunk: int | None = None
) -> TransformerConfig:
    """Return the sizes of the tiny transformer; `visible_latent_frames` is sink + window, None for unlimited."""
    sizes = manifest()["transformer_config"]
    return TransformerConfig(
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        head_dim=sizes["dim"] // sizes["num_heads"],
        ffn_dim=sizes["ffn_dim"],
        in_channels=sizes["in_dim"],
        out_channels=sizes["out_dim"],
        text_dim=sizes["text_dim"],
        freq_dim=sizes["freq_dim"],
        eps=sizes["eps"],
        latent_frames_per_chunk=latent_frames_per_chunk or main_geometry()["frames_per_block"],
        sink_latent_frames=sink_latent_frames,
        window_latent_frames=None if visible_latent_frames is None else visible_latent_frames - sink_latent_frames,
        text_rows=sizes["text_len"],
    )


def transformer(config: TransformerConfig, precision: str = "fp32") -> LingBotTransformer:
    """Load the tiny transformer strictly, in a precision plan."""
    model = LingBotTransformer(config)
    model.load_state_dict(tensors("transformer_weights"), strict=True)
    model.apply_precision(precision_plan(precision))
    return model


def open_cache(model: LingBotTransformer, latent_height: int, latent_width: int, *, capacity: int = 1) -> KVCache:
    """Return a cache with the model's own geometry and the session `SESSION` opened."""
    spec = kv_geometry(model.config, model.plan, latent_height=latent_height, latent_width=latent_width)
    cache = KVCache(spec, capacity=capacity, device="cpu", dtype=model.plan.linear)
    cache.open(SESSION)
    return cache


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the root mean square of the difference over that of the expected values."""
    difference = got.double() - want.double()
    return float((difference.square().mean() / want.double().square().mean()).sqrt())
