"""Cross stores: all layers or nothing, staged until the commit, in storage that never grows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache.cache import KVCache
from kvcache.cross_store import CrossPool
from kvcache.errors import CrossStoreEmpty, TransactionClosed
from kvcache.pages import PageId
from kvcache.spec import KVSpec
from kvcache.transaction import ChunkTransaction
from tests.support.kv_concat_cache import naive_attention
from tests.support.kv_geometry import IMAGE, TEXT, generator, make_cache, random_text, run_chunks, tiny_spec, write_all

Pairs = list[tuple[Tensor, Tensor]]


def open_cache(spec: KVSpec) -> KVCache:
    cache = make_cache(spec)
    cache.open("a")
    return cache


def contents(chunk: ChunkTransaction, name: str, *, branch: int = 0) -> Pairs | None:
    """Return copies of all layers, or None if the store is empty."""
    store = chunk.cross_store(name, branch=branch)
    if not store.is_filled:
        return None
    return [(k.clone(), v.clone()) for k, v, _ in (store.read(0), store.read(1))]


def committed(cache: KVCache, name: str, *, branch: int = 0) -> Pairs | None:
    with cache.lease("a") as lease:
        return contents(lease.begin_chunk(), name, branch=branch)


def publish(cache: KVCache, name: str, pairs: Pairs) -> None:
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store(name).publish(pairs)
        write_all(chunk, cache.spec, generator(9))
        chunk.commit()


def assert_same(got: Pairs | None, expected: Pairs) -> None:
    assert got is not None
    for got_pair, expected_pair in zip(got, expected, strict=True):
        assert torch.equal(got_pair[0], expected_pair[0])
        assert torch.equal(got_pair[1], expected_pair[1])


def test_publication_is_seen_at_once_and_kept_by_commit_only() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    old, new = random_text(TEXT, spec, generator(1), 5), random_text(TEXT, spec, generator(2), 3)
    assert committed(cache, "text") is None
    publish(cache, "text", old)
    assert_same(committed(cache, "text"), old)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("text").publish(new)
        assert_same(contents(chunk, "text"), new)
        cache.check_integrity()
        chunk.rollback()
    assert_same(committed(cache, "text"), old)
    publish(cache, "text", new)
    assert_same(committed(cache, "text"), new)
    cache.check_integrity()


def test_the_store_copies_what_it_is_given() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    pairs = random_text(TEXT, spec, generator(1), 5)
    expected = [(k.clone(), v.clone()) for k, v in pairs]
    publish(cache, "text", pairs)
    for k, v in pairs:
        k.zero_()
        v.zero_()
    assert_same(committed(cache, "text"), expected)


def test_clear_is_staged_and_leaves_history_alone() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    old = random_text(TEXT, spec, generator(1), 4)
    publish(cache, "text", old)
    run_chunks(cache, "a", 3, generator(3))
    resident = cache.resident_latent_frames("a")
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("text").clear()
        assert not chunk.cross_store("text").is_filled
        with pytest.raises(CrossStoreEmpty, match="'text' is empty"):
            chunk.cross_store("text").attend(0, torch.zeros(1, 2, 4))
    assert_same(committed(cache, "text"), old)
    assert cache.resident_latent_frames("a") == resident
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("text").clear()
        write_all(chunk, spec, generator(4))
        chunk.commit()
    assert committed(cache, "text") is None
    cache.check_integrity()


def test_publishing_many_times_in_one_chunk_needs_one_spare_slot() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    cache.open("b")
    publish(cache, "text", random_text(TEXT, spec, generator(0), 5))
    with cache.lease("b") as lease:
        chunk = lease.begin_chunk()
        for seed in range(4):
            last = random_text(TEXT, spec, generator(seed), 2 + seed % 2)
            chunk.cross_store("text").publish(last)
            cache.check_integrity()
        assert_same(contents(chunk, "text"), last)


@pytest.mark.parametrize("defect", ["layers", "length", "heads", "dtype", "too many", "none", "bias", "v only"])
def test_a_faulty_publication_changes_nothing(defect: str) -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    old = random_text(TEXT, spec, generator(1), 5)
    publish(cache, "text", old)
    pairs = random_text(TEXT, spec, generator(2), 4)
    bias = None
    k, v = pairs[1]
    match defect:
        case "layers":
            pairs, message = pairs[:1], "expected K/V pairs of 2 layers, got 1"
        case "length":
            pairs[1], message = (k[:3], v[:3]), r"K of layer 1: expected \(4, 2, 4\)"
        case "heads":
            pairs[1], message = (k[:, :1], v[:, :1]), r"K of layer 1: expected \(4, 2, 4\)"
        case "dtype":
            pairs[1], message = (k.double(), v), r"K of layer 1: .* got \(4, 2, 4\) torch.float64"
        case "too many":
            pairs, message = random_text(TEXT, spec, generator(2), 6), r"num_tokens must be 1\.\.5, got 6"
        case "none":
            pairs, message = random_text(TEXT, spec, generator(2), 0), r"num_tokens must be 1\.\.5, got 0"
        case "bias":
            bias, message = torch.zeros(5), r"logit_bias_L must have shape \(4,\), got \(5,\)"
        case _:
            pairs[1], message = (k, v[:2]), r"V of layer 1: expected \(4, 2, 4\)"
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        with pytest.raises(ValueError, match=message):
            chunk.cross_store("text").publish(pairs, bias)
        assert_same(contents(chunk, "text"), old)
        write_all(chunk, spec, generator(3))
        chunk.commit()
    assert_same(committed(cache, "text"), old)
    cache.check_integrity()


@pytest.mark.parametrize("staged_before", [False, True])
def test_a_copy_that_fails_half_way_leaves_no_half_filled_store(
    monkeypatch: pytest.MonkeyPatch, staged_before: bool
) -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    old = random_text(TEXT, spec, generator(1), 5)
    publish(cache, "text", old)
    good_fill = CrossPool.fill

    def failing_fill(pool: CrossPool, slot: PageId, pairs: Pairs) -> None:
        good_fill(pool, slot, pairs[:1])
        raise RuntimeError("device lost")

    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        if staged_before:
            chunk.cross_store("text").publish(random_text(TEXT, spec, generator(2), 3))
        with monkeypatch.context() as patch:
            patch.setattr(CrossPool, "fill", failing_fill)
            with pytest.raises(RuntimeError, match="device lost"):
                chunk.cross_store("text").publish(random_text(TEXT, spec, generator(3), 4))
        if staged_before:
            assert not chunk.cross_store("text").is_filled
        else:
            assert_same(contents(chunk, "text"), old)
        cache.check_integrity()
    assert_same(committed(cache, "text"), old)


def test_shared_store_serves_all_branches_and_others_are_separate() -> None:
    spec = tiny_spec(num_branches=2)
    cache = open_cache(spec)
    image = random_text(IMAGE, spec, generator(1), 3)
    texts = [random_text(TEXT, spec, generator(2 + branch), 4) for branch in (0, 1)]
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("image", branch=1).publish(image)
        chunk.cross_store("text", branch=1).publish(texts[1])
        assert not chunk.cross_store("text", branch=0).is_filled
        chunk.cross_store("text", branch=0).publish(texts[0])
        write_all(chunk, spec, generator(4))
        chunk.commit()
    for branch in (0, 1):
        assert_same(committed(cache, "image", branch=branch), image)
        assert_same(committed(cache, "text", branch=branch), texts[branch])


def test_attends_over_exactly_the_published_rows_with_their_bias() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    publish(cache, "text", random_text(TEXT, spec, generator(0), 5))
    pairs = random_text(TEXT, spec, generator(1), 3)
    q = torch.randn(6, 2, 4, generator=generator(2))
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        store = chunk.cross_store("text")
        store.publish(pairs)
        for layer, (k, v) in enumerate(pairs):
            torch.testing.assert_close(store.attend(layer, q), naive_attention(q, k, v), atol=1e-6, rtol=0)
        store.publish(pairs, torch.tensor([0.0, 0.0, 2.0]).log1p())
        k, v = (torch.cat((x, x[-1:], x[-1:])) for x in pairs[1])
        torch.testing.assert_close(store.attend(1, q), naive_attention(q, k, v), atol=1e-6, rtol=0)
        with pytest.raises(ValueError, match=r"layer must be 0\.\.1, got 2"):
            store.attend(2, q)


def test_a_view_dies_with_its_chunk() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    with cache.lease("a") as lease:
        store = lease.begin_chunk().cross_store("text")
    with pytest.raises(TransactionClosed, match="publish on the chunk at latent frame 0, which is rolled back"):
        store.publish(random_text(TEXT, spec, generator(0), 5))
    with pytest.raises(TransactionClosed, match="clear on"):
        store.clear()


def test_unknown_store_names_the_known_ones() -> None:
    cache = open_cache(tiny_spec())
    with (
        cache.lease("a") as lease,
        pytest.raises(ValueError, match=r"unknown cross store 'audio': expected one of \['text', 'image'\]"),
    ):
        lease.begin_chunk().cross_store("audio")
