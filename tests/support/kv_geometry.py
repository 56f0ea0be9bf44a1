"""Small K/V geometries, random K/V, and one way to run a tick, shared by the tests of `kvcache`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.cache import KVCache
from kvcache.spec import AtWindow, Branch, CrossStoreSpec, KVSpec, Storage
from kvcache.transaction import ChunkTransaction

TEXT = CrossStoreSpec(name="text", num_tokens=5, num_heads=2)
IMAGE = CrossStoreSpec(name="image", num_tokens=3, num_heads=1, head_dim=8, shared_between_branches=True)

GOLDEN_GEOMETRIES: dict[str, tuple[int, int | None, tuple[int, ...]]] = {
    # name: sink, window without the sink, resident frames after chunk 6 of 3 frames (golden data, case 2)
    "nominal": (3, 6, (0, 1, 2, 15, 16, 17, 18, 19, 20)),
    "w8_s2": (2, 6, (0, 1, 15, 16, 17, 18, 19, 20)),
    "w6_s3": (3, 3, (0, 1, 2, 18, 19, 20)),
    "w18_s9": (9, 9, (*range(9), *range(12, 21))),
    "w9_s0": (0, 9, tuple(range(12, 21))),
    "global_": (0, None, tuple(range(21))),
}


def tiny_spec(
    *,
    sink: int = 3,
    window: int | None = 6,
    chunk: int = 3,
    storage: Storage | None = None,
    num_branches: int = 1,
    num_layers: int = 2,
    tokens: int = 2,
    registers: int = 0,
    cross_stores: tuple[CrossStoreSpec, ...] = (TEXT, IMAGE),
    at_window: AtWindow = AtWindow.SLIDE,
    max_latent_frames: int = 64,
    rewritable_history: bool = False,
) -> KVSpec:
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=4,
        tokens_per_latent_frame=tokens,
        latent_frames_per_chunk=chunk,
        sink_latent_frames=sink,
        window_latent_frames=window,
        element_bytes=4,
        at_window=at_window,
        branches=tuple(Branch(name=f"branch{i}", local_slot=i) for i in range(num_branches)),
        register_tokens=registers,
        cross_stores=cross_stores,
        storage=storage,
        max_latent_frames=max_latent_frames,
        rewritable_history=rewritable_history,
    )


def make_cache(spec: KVSpec, *, capacity: int = 2) -> KVCache:
    return KVCache(spec, capacity=capacity, device="cpu", dtype=torch.float32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_pair(spec: KVSpec, num_tokens: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (num_tokens, spec.num_kv_heads, spec.head_dim)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def random_text(
    store: CrossStoreSpec, spec: KVSpec, rng: torch.Generator, num_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    shape = (num_tokens, store.num_heads, store.head_dim or spec.head_dim)
    return [(torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)) for _ in range(spec.num_layers)]


def local_branches(spec: KVSpec) -> range:
    return range(spec.num_local_branches)


def write_all(
    chunk: ChunkTransaction, spec: KVSpec, rng: torch.Generator, *, limit: int | None = None
) -> list[tuple[int, int, Tensor, Tensor]]:
    """Write random K/V to every layer of every branch, or to the first `limit` of them; return what was written."""
    written = []
    places = [(layer, branch) for layer in range(spec.num_layers) for branch in local_branches(spec)]
    for layer, branch in places[:limit]:
        k_NHD, v_NHD = random_pair(spec, chunk.num_latent_frames * spec.tokens_per_latent_frame, rng)
        chunk.write(layer, k_NHD, v_NHD, branch=branch)
        written.append((layer, branch, k_NHD, v_NHD))
    return written


def run_chunks(cache: KVCache, session_id: str, num_chunks: int, rng: torch.Generator) -> None:
    for _ in range(num_chunks):
        with cache.lease(session_id) as lease:
            chunk = lease.begin_chunk()
            write_all(chunk, cache.spec, rng)
            chunk.commit()


def visible_by_frame(
    chunk: ChunkTransaction, spec: KVSpec, layer: int, branch: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Split the visible K/V of a layer by absolute frame index."""
    k_SHD, v_SHD = chunk.visible(layer, branch=branch)
    tokens = spec.tokens_per_latent_frame
    pieces: Sequence[tuple[Tensor, Tensor]] = list(zip(k_SHD.split(tokens), v_SHD.split(tokens), strict=True))
    return dict(zip(chunk.visible_latent_frames, pieces, strict=True))
