"""Build the tiny DreamZero transformers of the golden files, and run their forwards over a K/V cache."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.cache import KVCache
from tests.support.dreamzero_golden import manifest, tensors
from worldmodel.dreamzero.transformer import BRANCHES, DreamZeroTransformer, kv_geometry
from worldmodel.dreamzero.transformer_config import TransformerConfig, read_transformer_config

MODEL_PREFIX = "action_head.model."


def transformer_config(table: dict[str, Any], image_dim: int) -> TransformerConfig:
    """Read one of the networks of the manifest's `tiny_config`."""
    problems: list[str] = []
    config = read_transformer_config(
        {"diffusion_model_cfg": table}, image_dim=image_dim, image_tokens=_image_tokens(), problems=problems
    )
    assert config is not None, problems
    return config


def _image_tokens() -> int:
    tower = manifest()["tiny_config"]["clip"]
    return 1 + (tower["image_size"] // tower["patch_size"]) ** 2


def transformer(case: str = "dit", weights: str = "weights") -> DreamZeroTransformer:
    """Return the network of a case (`dit` or `dit_ti2v`) with its golden weights, in float32."""
    tiny = manifest()["tiny_config"]
    network = DreamZeroTransformer(transformer_config(tiny[case], tiny["clip_dim"]))
    stored = {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors(weights).items()
        if name.startswith(MODEL_PREFIX)
    }
    network.load_state_dict(stored, strict=True)
    return network.eval().requires_grad_(False)


def cache_for(network: DreamZeroTransformer, latent_height: int, latent_width: int, *, capacity: int = 1) -> KVCache:
    spec = kv_geometry(network.config, network.plan, latent_height=latent_height, latent_width=latent_width)
    return KVCache(spec, capacity=capacity, device="cpu", dtype=torch.float32)


def publish(network: DreamZeroTransformer, kv: Any, text_LC: torch.Tensor, image_TI: torch.Tensor) -> None:
    """Give both branches the same text."""
    for branch in range(len(BRANCHES)):
        network.publish_text(text_LC, kv, branch=branch)
    network.publish_image(image_TI, kv)
