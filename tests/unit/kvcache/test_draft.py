"""Drafts, restarts and shared layers against plain concatenation: what is seen, what is kept, what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.cache import KVCache
from kvcache.draft import ChunkDraft
from kvcache.errors import ChunkIncomplete, HistoryFixed, TransactionClosed, WindowFull
from kvcache.spec import AtWindow, KVSpec, Storage
from kvcache.transaction import ChunkTransaction
from tests.support.kv_concat_cache import naive_attention
from tests.support.kv_geometry import generator, make_cache, tiny_spec

NUM_QUERIES = 3
Pair = tuple[Tensor, Tensor]


def restarting(storage: Storage | None, *, shared: int = 1, window: int = 9, registers: int = 3) -> KVSpec:
    """A geometry of two branches with chunks of up to 2 frames and drafts of 2."""
    spec = tiny_spec(
        sink=0,
        window=None if storage is None else window,
        chunk=2,
        storage=storage,
        num_branches=2,
        num_layers=3,
        registers=registers,
        at_window=AtWindow.SLIDE if storage is None else AtWindow.RESTART,
        max_latent_frames=window,
        rewritable_history=True,
    )
    return replace(spec, draft_latent_frames=2, shared_layers=shared)


def random_rows(spec: KVSpec, layer: int, num_rows: int, rng: torch.Generator) -> Pair:
    shape = (spec.layer_slots(layer), num_rows, spec.num_kv_heads, spec.head_dim)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def assert_attends(
    kv: ChunkTransaction | ChunkDraft, spec: KVSpec, layer: int, rows: list[Pair], rng: torch.Generator
) -> None:
    """Compare attention in every stream of a layer with attention over these rows, one after the other."""
    q = torch.randn(spec.layer_slots(layer), NUM_QUERIES, 2, 4, generator=rng)
    got = kv.attend_all(layer, q)
    for stream in range(spec.layer_slots(layer)):
        k = torch.cat([pair[0][stream] for pair in rows])
        v = torch.cat([pair[1][stream] for pair in rows])
        torch.testing.assert_close(got[stream], naive_attention(q[stream], k, v), atol=1e-5, rtol=0)


@dataclass(frozen=True)
class Step:
    restart: bool
    num_latent_frames: int
    draft: int
    registers: int
    forwards: int
    commit: bool


steps = st.lists(
    st.builds(
        Step,
        restart=st.booleans(),
        num_latent_frames=st.integers(1, 2),
        draft=st.integers(0, 2),
        registers=st.integers(0, 3),
        forwards=st.integers(1, 2),
        commit=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(storage=st.sampled_from([*Storage, None]), shared=st.integers(0, 3), steps=steps)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_random_runs_agree_with_concatenation(storage: Storage | None, shared: int, steps: list[Step]) -> None:
    spec = restarting(storage, shared=shared)
    cache = make_cache(spec)
    cache.open("a")
    cache.open("b")
    histories: dict[str, list[list[Pair]]] = {name: [[] for _ in range(spec.num_layers)] for name in "ab"}
    lengths = {"a": 0, "b": 0}
    for seed, step in enumerate(steps):
        name = "ab"[seed % 2]
        restart = step.restart or lengths[name] + step.num_latent_frames + 2 > 9
        history = [[] for _ in range(spec.num_layers)] if restart else [list(rows) for rows in histories[name]]
        first = 0 if restart else lengths[name]
        run_step(cache, name, step, restart=restart, first=first, history=history, rng=generator(seed))
        if step.commit:
            histories[name], lengths[name] = history, first + step.num_latent_frames
        cache.check_integrity()
        assert cache.num_latent_frames(name) == lengths[name]
        assert cache.resident_latent_frames(name) == tuple(range(lengths[name]))
        assert cache.total_pages - cache.free_pages == 2 * sum(lengths.values())
    cache.close("a")
    cache.close("b")
    assert cache.free_pages == cache.total_pages
    cache.check_integrity()


def run_step(
    cache: KVCache,
    name: str,
    step: Step,
    *,
    restart: bool,
    first: int,
    history: list[list[Pair]],
    rng: torch.Generator,
) -> None:
    """Run one tick and append the chunk's rows to `history`."""
    spec = cache.spec
    with cache.lease(name) as lease:
        chunk = lease.begin_chunk(1 if restart else step.num_latent_frames)
        if restart:
            chunk.restart(step.num_latent_frames)
        assert (chunk.first_latent_frame, chunk.num_latent_frames) == (first, step.num_latent_frames)
        assert chunk.visible_latent_frames == tuple(range(first + step.num_latent_frames))
        for layer in range(spec.num_layers):
            rows = random_rows(spec, layer, step.num_latent_frames * spec.tokens_per_latent_frame, rng)
            chunk.write_all(layer, *rows)
            history[layer].append(rows)
            assert_attends(chunk, spec, layer, history[layer], rng)
        if step.draft:
            draft = chunk.draft(step.draft)
            for _ in range(step.forwards):
                run_draft(draft, spec, step, history, rng)
        cache.check_integrity()
        if step.commit:
            chunk.commit()


def run_draft(draft: ChunkDraft, spec: KVSpec, step: Step, history: list[list[Pair]], rng: torch.Generator) -> None:
    for layer in range(spec.num_layers):
        rows = random_rows(spec, layer, step.draft * spec.tokens_per_latent_frame, rng)
        registers = random_rows(spec, layer, step.registers, rng)
        draft.write_all(layer, *rows)
        draft.write_registers_all(layer, *registers)
        assert_attends(draft, spec, layer, [*history[layer], rows, registers], rng)


@pytest.fixture(params=[*Storage, None])
def cache(request: pytest.FixtureRequest) -> KVCache:
    cache = make_cache(restarting(request.param))
    cache.open("a")
    return cache


def write_chunk(chunk: ChunkTransaction, spec: KVSpec) -> None:
    for layer in range(spec.num_layers):
        chunk.write_all(layer, *random_rows(spec, layer, chunk.num_latent_frames * 2, generator(layer)))


def test_a_shared_layer_has_one_stream_whatever_branch_writes(cache: KVCache) -> None:
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk(1)
        write_chunk(chunk, cache.spec)
        k, v = (rows[0] for rows in random_rows(cache.spec, 0, 2, generator(9)))
        chunk.write(0, k, v, branch=1)
        assert torch.equal(chunk.visible(0, branch=0)[0], k)
        own, _ = (rows[0] for rows in random_rows(cache.spec, 1, 2, generator(10)))
        chunk.write(1, own, v, branch=1)
        assert not torch.equal(chunk.visible(1, branch=0)[0], own)


def test_shared_layers_save_storage_in_extents() -> None:
    plain, shared = restarting(Storage.EXTENTS, shared=0), restarting(Storage.EXTENTS, shared=2)
    # 2 of 3 layers have one stream instead of two.
    assert shared.storage_bytes(3) * 6 == plain.storage_bytes(3) * 4
    for spec in (plain, shared):
        assert make_cache(replace(spec, cross_stores=()), capacity=3).storage_bytes == spec.storage_bytes(3)


def test_a_restart_keeps_cross_stores_and_is_refused_too_late(cache: KVCache) -> None:
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        write_chunk(chunk, cache.spec)
        with pytest.raises(HistoryFixed, match="before the chunk's first write"):
            chunk.restart(1)
        pairs = [(torch.ones(1, 2, 4), torch.ones(1, 2, 4))] * 3
        chunk.cross_store("text").publish(pairs)
        chunk.commit()
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.restart(1)
        assert chunk.cross_store("text").is_filled
        with pytest.raises(ValueError, match=r"must be 1\.\.2, got 3"):
            chunk.restart(3)


def test_a_restart_needs_room_for_a_second_run() -> None:
    cache = make_cache(replace(restarting(Storage.EXTENTS), rewritable_history=False))
    cache.open("a")
    with cache.lease("a") as lease, pytest.raises(HistoryFixed, match="rewritable_history=False"):
        lease.begin_chunk().restart(1)


def test_a_draft_is_checked(cache: KVCache) -> None:
    spec = cache.spec
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        with pytest.raises(ValueError, match=r"a draft must have 1\.\.2 latent frames, got 3"):
            chunk.draft(3)
        draft = chunk.draft(1)
        with pytest.raises(HistoryFixed, match="once per chunk"):
            chunk.draft(1)
        with pytest.raises(ChunkIncomplete, match="has not written layer 1"):
            draft.attend_all(1, torch.zeros(2, 1, 2, 4))
        with pytest.raises(ValueError, match="K of layer 0: expected"):
            draft.write_all(0, *random_rows(spec, 1, 2, generator(0)))
        with pytest.raises(ValueError, match="at most 3 tokens, got 4"):
            draft.write_registers_all(0, *random_rows(spec, 0, 4, generator(0)))
        draft.write_all(0, *random_rows(spec, 0, 2, generator(0)))
        with pytest.raises(ValueError, match="expected 1 streams, got 2"):
            draft.attend_all(0, torch.zeros(2, 1, 2, 4))
        with pytest.raises(ChunkIncomplete, match="5 of 5 layers were not written"):
            chunk.commit()
    with pytest.raises(TransactionClosed):
        draft.write_all(0, *random_rows(spec, 0, 2, generator(0)))


def test_a_draft_beyond_the_window_is_refused(cache: KVCache) -> None:
    for _ in range(4):
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk()
            write_chunk(chunk, cache.spec)
            chunk.commit()
    with cache.lease("a") as lease:
        with pytest.raises(WindowFull):
            lease.begin_chunk(1).draft(1)
        cache.check_integrity()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shared_layers": 4}, "at most num_layers 3, got 4"),
        ({"at_window": AtWindow.SLIDE}, "a draft evicts nothing"),
        ({"window_latent_frames": 3}, "a chunk and its draft, 4 latent frames, got 3"),
        ({"draft_latent_frames": -1}, "draft_latent_frames must be at least 0"),
    ],
)
def test_geometries_that_can_not_work_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(restarting(Storage.EXTENTS), **changes)
