"""Sessions of a cache: capacity, reset, close, and random histories against the naive twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.cache import KVCache
from kvcache.errors import CapacityExceeded, IntegrityError, SessionExists, SessionUnknown
from kvcache.pages import PageId
from kvcache.spec import KVSpec, Storage
from kvcache.transaction import ChunkTransaction
from tests.support.kv_concat_cache import ConcatSession
from tests.support.kv_geometry import (
    TEXT,
    generator,
    make_cache,
    random_pair,
    random_text,
    run_chunks,
    tiny_spec,
    visible_by_frame,
    write_all,
)


@pytest.mark.parametrize("storage", Storage)
def test_allocates_all_storage_up_front(storage: Storage) -> None:
    spec = tiny_spec(storage=storage, num_branches=2, registers=2)
    cache = make_cache(spec, capacity=3)
    without_models = replace(spec, model_owned_bytes=0, worker_owned_bytes=0)
    assert cache.storage_bytes == without_models.required_bytes(3)
    for name in "abc":
        cache.open(name)
        run_chunks(cache, name, 6, generator(0))
    assert cache.storage_bytes == without_models.required_bytes(3)


@pytest.mark.parametrize("storage", Storage)
def test_all_sessions_fill_their_windows_and_still_tick(storage: Storage) -> None:
    cache = make_cache(tiny_spec(storage=storage, num_branches=2), capacity=3)
    for name in "abc":
        cache.open(name)
    for _ in range(8):
        for name in "abc":
            run_chunks(cache, name, 1, generator(0))
            cache.check_integrity()
    assert cache.total_pages - cache.free_pages == 3 * 2 * 9


def test_a_full_cache_refuses_one_more() -> None:
    cache = make_cache(tiny_spec(), capacity=2)
    cache.open("a")
    cache.open("b")
    with pytest.raises(CapacityExceeded, match="session 'c' does not fit: all 2 session slots are taken"):
        cache.open("c")
    with pytest.raises(SessionExists, match="session 'a' is open already"):
        cache.open("a")
    cache.close("a")
    cache.open("c")
    assert cache.session_ids == ("b", "c")


def test_reset_frees_pages_now_and_counts_from_zero() -> None:
    spec = tiny_spec()
    cache = make_cache(spec)
    cache.open("a")
    cache.open("b")
    run_chunks(cache, "b", 1, generator(0))
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("text").publish(random_text(TEXT, spec, generator(1), 5))
        write_all(chunk, spec, generator(1))
        chunk.commit()
    assert cache.free_pages == cache.total_pages - 6
    cache.reset("a")
    assert cache.free_pages == cache.total_pages - 3
    assert cache.num_latent_frames("a") == 0
    assert cache.resident_latent_frames("a") == ()
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        assert chunk.first_latent_frame == 0
        assert not chunk.cross_store("text").is_filled
    with pytest.raises(SessionUnknown):
        cache.reset("nobody")


def test_close_frees_everything_and_repeats() -> None:
    cache = make_cache(tiny_spec())
    cache.open("a")
    run_chunks(cache, "a", 4, generator(0))
    cache.close("a")
    cache.close("a")
    assert cache.free_pages == cache.total_pages
    with pytest.raises(SessionUnknown):
        cache.num_latent_frames("a")
    cache.check_integrity()


def test_unlimited_session_keeps_every_frame() -> None:
    cache = make_cache(tiny_spec(window=None, max_latent_frames=30), capacity=2)
    cache.open("a")
    cache.open("b")
    for _ in range(10):
        run_chunks(cache, "a", 1, generator(0))
        run_chunks(cache, "b", 1, generator(0))
    assert cache.resident_latent_frames("a") == tuple(range(30))
    assert cache.free_pages == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0, "dtype": torch.float32}, "capacity must be at least 1, got 0"),
        ({"capacity": 1, "dtype": torch.bfloat16}, "dtype torch.bfloat16 has 2 bytes, the spec says element_bytes 4"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(tiny_spec(), device="cpu", **arguments)


def test_integrity_check_finds_a_leaked_page_and_a_leaked_slot() -> None:
    cache = make_cache(tiny_spec())
    cache.open("a")
    run_chunks(cache, "a", 1, generator(0))
    cache.check_integrity()
    leaked = PageId(cache.total_pages - 1)
    cache._ledger.take_exact(leaked, "a")
    with pytest.raises(IntegrityError, match=rf"owned 4 pages, held 3: nobody holds \[{leaked}\]"):
        cache.check_integrity()
    cache._ledger.give_back(leaked, "a")
    cache._cross_pools["text"].ledger.take("a")
    with pytest.raises(IntegrityError, match="owned 1 pages, held 0"):
        cache.check_integrity()


# ---------------------------------------------------------------- random histories


@dataclass(frozen=True, slots=True)
class Step:
    """One act on one session, `repeats` ticks if it is one. A failing tick fails after `limit` layers."""

    act: str
    session: str
    num_latent_frames: int
    limit: int
    publish: bool
    repeats: int
    rewrite: bool


@dataclass(slots=True)
class Twin:
    """What the naive cache knows of a session. `text_seed` is that of the committed publication."""

    history: ConcatSession
    text_seed: int | None = None
    needs_at_least: int = 1


specs = st.builds(
    lambda sink, chunk, extra, tokens, branches, storage, rewritable: tiny_spec(
        sink=sink,
        window=None if storage is None else chunk + extra,
        chunk=chunk,
        tokens=tokens,
        num_branches=branches,
        num_layers=2,
        storage=storage,
        max_latent_frames=200,
        rewritable_history=rewritable,
    ),
    sink=st.integers(0, 8),
    chunk=st.integers(1, 4),
    extra=st.integers(0, 4),
    tokens=st.integers(1, 3),
    branches=st.integers(1, 2),
    storage=st.sampled_from([Storage.EXTENTS, Storage.EXTENTS, Storage.PAGES, None]),
    rewritable=st.booleans(),
)
steps = st.lists(
    st.builds(
        Step,
        act=st.sampled_from(["tick"] * 8 + ["fail"] * 4 + ["open", "reset", "close"]),
        session=st.sampled_from("abc"),
        num_latent_frames=st.integers(1, 4),
        limit=st.integers(0, 4),
        publish=st.booleans(),
        rewrite=st.booleans(),
        repeats=st.integers(1, 5),
    ),
    min_size=10,
    max_size=40,
)


@given(spec=specs, steps=steps)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_random_histories_agree_with_the_naive_cache(spec: KVSpec, steps: list[Step]) -> None:
    check_history(spec, steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(spec=specs, steps=steps)
@settings(max_examples=2000, deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
def test_many_random_histories_agree_with_the_naive_cache(spec: KVSpec, steps: list[Step]) -> None:
    check_history(spec, steps)


def check_history(spec: KVSpec, steps: list[Step]) -> None:
    cache = make_cache(spec, capacity=2)
    twins: dict[str, Twin] = {}
    open_session(cache, twins, "a")
    open_session(cache, twins, "b")
    for seed, step in enumerate(steps):
        match step.act:
            case "open":
                open_session(cache, twins, step.session)
            case "reset" if step.session in twins:
                cache.reset(step.session)
                twins[step.session] = Twin(ConcatSession(spec))
            case "close":
                cache.close(step.session)
                twins.pop(step.session, None)
            case "tick" | "fail" if step.session in twins:
                for repeat in range(step.repeats):
                    tick(cache, twins[step.session], step, 100 * seed + repeat)
            case _:
                pass  # an act on a session that isn't open
        check_accounting(cache, twins)
    for name in tuple(twins):
        cache.close(name)
    assert cache.free_pages == cache.total_pages
    cache.check_integrity()


def open_session(cache: KVCache, twins: dict[str, Twin], name: str) -> None:
    if name in twins:
        with pytest.raises(SessionExists):
            cache.open(name)
    elif len(twins) == cache.capacity:
        with pytest.raises(CapacityExceeded):
            cache.open(name)
    else:
        cache.open(name)
        twins[name] = Twin(ConcatSession(cache.spec))


def tick(cache: KVCache, twin: Twin, step: Step, seed: int) -> None:
    spec, rng = cache.spec, generator(seed)
    # A chunk shorter than one that was rolled back may be refused; `test_transaction.py` has that case.
    count = max(min(step.num_latent_frames, spec.latent_frames_per_chunk), twin.needs_at_least)
    with cache.lease(step.session) as lease:
        chunk = lease.begin_chunk(count)
        assert chunk.first_latent_frame == twin.history.num_latent_frames
        text = chunk.cross_store("text")
        if step.publish:
            text.publish(random_text(TEXT, spec, generator(seed), 1 + seed % 5))
        expected_text = seed if step.publish else twin.text_seed
        assert text.is_filled == (expected_text is not None)
        if expected_text is not None:
            expected = random_text(TEXT, spec, generator(expected_text), 1 + expected_text % 5)
            assert all(torch.equal(text.read(layer)[0], k) for layer, (k, _) in enumerate(expected))
        history = twin.history
        if step.rewrite and spec.rewritable_history and history.num_latent_frames:
            history = rewrite(chunk, history, rng)
        written = write_all(chunk, spec, rng, limit=step.limit if step.act == "fail" else None)
        for layer, branch, k, v in written:
            frames = visible_by_frame(chunk, spec, layer, branch)
            visible = history.extend(layer, branch, k, v)
            assert sorted(frames) == [frame for frame, _, _ in visible]
            for frame, frame_k, frame_v in visible:
                assert torch.equal(frames[frame][0], frame_k)
                assert torch.equal(frames[frame][1], frame_v)
            q = torch.randn(3, 2, 4, generator=rng)
            attended = chunk.attend(layer, q, branch=branch)
            torch.testing.assert_close(attended, history.attend(layer, branch, k, v, q), atol=1e-5, rtol=0)
        cache.check_integrity()
        if step.act == "tick":
            chunk.commit()
            twin.history = history
            twin.history.commit(written, count)
            twin.text_seed = expected_text
            twin.needs_at_least = 1
        else:
            # A chunk that wrote on a copy wrote over nothing.
            twin.needs_at_least = max(twin.needs_at_least, 1 if history is not twin.history else count)


def rewrite(chunk: ChunkTransaction, twin: ConcatSession, rng: torch.Generator) -> ConcatSession:
    """Write the newest visible frame of history anew and return the twin of that."""
    copy = chunk.rewrite_history()
    if not copy.latent_frames:
        return twin.rewritten(0, 0, 0, *random_pair(twin.spec, 0, rng))
    first = copy.latent_frames[-1]
    part = copy.part(range(first, first + 1))
    for layer in range(twin.spec.num_layers):
        for branch in range(twin.spec.num_local_branches):
            k, v = random_pair(twin.spec, twin.spec.tokens_per_latent_frame, rng)
            part.write(layer, k, v, branch=branch)
            twin = twin.rewritten(layer, branch, first, k, v)
    return twin


def check_accounting(cache: KVCache, twins: dict[str, Twin]) -> None:
    cache.check_integrity()
    assert set(cache.session_ids) == twins.keys()
    owned = 0
    for name, twin in twins.items():
        resident = [frame for frame, _, _ in twin.history.history.get((0, 0), [])]
        assert list(cache.resident_latent_frames(name)) == resident
        owned += len(resident) * cache.spec.num_local_branches
    assert cache.free_pages + owned == cache.total_pages
