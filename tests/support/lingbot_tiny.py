"""A whole LingBot adapter out of the golden weights, fast enough for hundreds of chunks, and views of all its state."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvcache.cache import KVCache
from tests.support.lingbot_golden import load_json, tensors
from tests.support.lingbot_network import transformer, transformer_config
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.noise import PerChunkNoise
from worldmodel.lingbot.transformer import TEXT_STORE
from worldmodel.lingbot.weights import LoadedModel
from worldmodel.messages import MediaFormat, SessionId, StartWorker
from worldmodel.runtime import Runtime
from worldmodel.wan.flow_scheduler import nominal_table
from worldmodel.wan.text_encoder import TextEncoder
from worldmodel.wan.text_names import TextCleaning
from worldmodel.wan.vae import WanVAE

WIDTH, HEIGHT = 48, 32
SINK, VISIBLE = 3, 9
OUTPUTS = (MediaFormat.LATENT, MediaFormat.YUV420)


class SeededText(TextEncoder):
    """A text encoder whose rows are noise that only the text decides."""

    def __init__(self, width: int) -> None:
        model = SimpleNamespace(config=SimpleNamespace(d_model=width))
        super().__init__(model, None, text_len=16, cleaning=TextCleaning.WHITESPACE)

    def encode(self, prompt: str) -> torch.Tensor:
        rng = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
        return torch.randn(3 + len(prompt) % 5, self.width, generator=rng)


def tiny_adapter(
    *,
    sink: int = SINK,
    visible: int | None = VISIBLE,
    sessions: int = 2,
    width: int = WIDTH,
    height: int = HEIGHT,
    precision: str = "fp32",
    **options: Any,
) -> LingBotAdapter:
    """Return an adapter of the golden transformer and VAE, by default at 48 x 32 pixels: 6 tokens a frame, 3 layers."""
    config = transformer_config(sink_latent_frames=sink, visible_latent_frames=visible)
    vae = WanVAE.from_config(load_json("vae_names.json")["diffusers_config"])
    vae.load_state_dict(tensors("vae_weights_diffusers"), strict=True)
    vae.fold_weights()
    model = LoadedModel(
        transformer=transformer(config, precision),
        vae=vae,
        text_encoder=SeededText(config.text_dim),
        flow_shift=5.0,
        digest="golden",
        num_parameters=1,
    )
    table = nominal_table(5.0)
    start = StartWorker(
        model="lingbot_world_v2", checkpoint="", width=width, height=height, fps=12, requested_sessions=sessions
    )
    noise = PerChunkNoise(device=torch.device("cpu"), num_draws=len(table))
    return LingBotAdapter(model, table, noise, LingBotOptions(**options), start)


def cache_of(adapter: LingBotAdapter, *, sessions: int = 2) -> KVCache:
    return KVCache(adapter.kv_spec(), capacity=sessions, device="cpu", dtype=adapter._transformer.plan.kv)


def history_kv(cache: KVCache, session_id: str) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of K and V that the session's next chunk would see, by (layer, latent frame)."""
    with cache.lease(session_id) as lease:
        chunk = lease.begin_chunk()
        return {
            (layer, frame): tuple(x.clone() for x in chunk._bound.read_frames(layer, 0, (frame,)))  # type: ignore[misc]
            for layer in range(cache.spec.num_layers)
            for frame in chunk.staged.history
        }


def text_kv(cache: KVCache, session_id: str) -> list[torch.Tensor]:
    """Return copies of all that the session's text store holds; nothing while it is empty."""
    with cache.lease(session_id) as lease:
        store = lease.begin_chunk().cross_store(TEXT_STORE)
        if not store.is_filled:
            return []
        return [x.clone() for layer in range(cache.spec.num_layers) for x in store.read(layer) if x is not None]


def snapshot(runtime: Runtime, cache: KVCache, session_id: str) -> list[object]:
    """Return everything that a rolled-back tick must leave: accounting, K/V bytes, text, and the model's state."""
    resident = runtime._sessions[SessionId(session_id)]
    return [
        cache.free_pages,
        cache.num_latent_frames(session_id),
        cache.resident_latent_frames(session_id),
        dict(cache._sessions[session_id].table._pages),
        cache._sessions[session_id].table.extent,
        frozen_copy(list(history_kv(cache, session_id).items())),
        frozen_copy(text_kv(cache, session_id)),
        resident.next_chunk_index,
        id(resident.state),
        frozen_copy(resident.state),
    ]


def frozen_copy(value: Any) -> object:
    """Turn a tree of dataclasses, sequences, tensors and arrays into nested tuples of plain values."""
    if isinstance(value, torch.Tensor):
        return frozen_copy(value.detach().contiguous().view(torch.uint8).numpy() if value.numel() else np.zeros(0))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *((item.name, frozen_copy(getattr(value, item.name))) for item in fields(value)))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(frozen_copy(item) for item in value)
    return value
