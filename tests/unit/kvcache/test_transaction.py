"""Chunks in flight: what they see, what they refuse, and what a rollback leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kvcache.cache import KVCache
from kvcache.errors import ChunkIncomplete, FramesLost, TransactionClosed
from kvcache.spec import KVSpec, Storage
from tests.support.kv_concat_cache import ConcatSession, naive_attention
from tests.support.kv_geometry import (
    GOLDEN_GEOMETRIES,
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


def open_cache(spec: KVSpec) -> KVCache:
    cache = make_cache(spec)
    cache.open("a")
    return cache


def golden_specs() -> list[KVSpec]:
    specs = []
    for sink, window, _ in GOLDEN_GEOMETRIES.values():
        storages = (Storage.PAGES,) if window is None else tuple(Storage)
        specs += [tiny_spec(sink=sink, window=window, storage=storage, num_branches=2) for storage in storages]
    return specs


@pytest.mark.parametrize(
    "spec", golden_specs(), ids=lambda spec: f"{spec.effective_storage}-{spec.window_latent_frames}"
)
def test_attends_like_concatenating_frames(spec: KVSpec) -> None:
    cache, twin, rng = open_cache(spec), ConcatSession(spec), generator(1)
    for _ in range(9):
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk()
            for _ in range(2):  # a noisy step, then the clean one over it
                written = write_all(chunk, spec, rng)
                for layer, branch, k, v in written:
                    q = torch.randn(5, 2, 4, generator=rng)
                    torch.testing.assert_close(
                        chunk.attend(layer, q, branch=branch),
                        twin.attend(layer, branch, k, v, q),
                        atol=1e-5,
                        rtol=0,
                    )
                    frames = visible_by_frame(chunk, spec, layer, branch)
                    expected = twin.extend(layer, branch, k, v)
                    assert sorted(frames) == [frame for frame, _, _ in expected]
                    for frame, frame_k, frame_v in expected:
                        assert torch.equal(frames[frame][0], frame_k)
                        assert torch.equal(frames[frame][1], frame_v)
            chunk.commit()
            twin.commit(written, 3)


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("chunk_length", [1, 3])
@pytest.mark.parametrize("sink", range(9))
def test_every_small_geometry_attends_like_concatenating_frames(storage: Storage, chunk_length: int, sink: int) -> None:
    for window in range(chunk_length, 9):
        spec = tiny_spec(
            sink=sink, window=window, chunk=chunk_length, storage=storage, num_layers=1, tokens=1, cross_stores=()
        )
        cache, twin, rng = open_cache(spec), ConcatSession(spec), generator(window)
        for _ in range(20):
            with cache.lease("a") as lease:
                chunk = lease.begin_chunk()
                written = write_all(chunk, spec, rng)
                ((_, _, k, v),) = written
                q = torch.randn(2, 2, 4, generator=rng)
                torch.testing.assert_close(chunk.attend(0, q), twin.attend(0, 0, k, v, q), atol=1e-5, rtol=0)
                chunk.commit()
                twin.commit(written, chunk_length)
                assert cache.resident_latent_frames("a") == tuple(frame for frame, _, _ in twin.history[0, 0])


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_writes", [0, 1, 3, 4])
def test_rollback_leaves_what_the_same_chunk_sees(storage: Storage, num_chunks: int, num_writes: int) -> None:
    spec = tiny_spec(sink=1, window=5, storage=storage, num_branches=2)
    cache = open_cache(spec)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        text = random_text(TEXT, spec, generator(4), 3)
        chunk.cross_store("text").publish(text)
        write_all(chunk, spec, generator(5))
        chunk.commit()
    run_chunks(cache, "a", num_chunks, generator(6))
    free, resident = cache.free_pages, cache.resident_latent_frames("a")

    def attempt(seed: int, limit: int | None) -> dict[tuple[int, int, int], tuple[Tensor, Tensor]]:
        """Write part of the next chunk, return the history it sees, and leave without a commit."""
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk()
            assert chunk.first_latent_frame == 3 * (num_chunks + 1)
            k, v, _ = chunk.cross_store("text").read(1)
            assert torch.equal(k, text[1][0])
            assert torch.equal(v, text[1][1])
            seen = {
                (layer, branch, frame): (k.clone(), v.clone())
                for layer, branch, _, _ in write_all(chunk, spec, generator(seed), limit=limit)
                for frame, (k, v) in visible_by_frame(chunk, spec, layer, branch).items()
                if frame < chunk.first_latent_frame
            }
            chunk.cross_store("text").publish(random_text(TEXT, spec, generator(seed), 5))
        return seen

    before = attempt(10, None)
    attempt(11, num_writes)
    assert (cache.free_pages, cache.resident_latent_frames("a")) == (free, resident)
    cache.check_integrity()
    after = attempt(12, None)
    assert before.keys() == after.keys()
    for place, (k, v) in before.items():
        assert torch.equal(after[place][0], k), place
        assert torch.equal(after[place][1], v), place


def test_frames_overwritten_by_a_longer_chunk_are_not_served() -> None:
    cache = open_cache(tiny_spec(sink=0, window=3))
    run_chunks(cache, "a", 1, generator(0))
    with cache.lease("a") as lease:
        write_all(lease.begin_chunk(), cache.spec, generator(1), limit=1)
    with cache.lease("a") as lease:
        with pytest.raises(FramesLost):
            lease.begin_chunk(1)
        assert lease.begin_chunk(3).visible_latent_frames == (3, 4, 5)
    cache.reset("a")
    with cache.lease("a") as lease:
        assert lease.begin_chunk(1).visible_latent_frames == (0,)


@pytest.mark.parametrize("storage", Storage)
def test_chunks_may_be_shorter_than_the_specs(storage: Storage) -> None:
    spec = tiny_spec(sink=1, window=4, storage=storage)
    cache, twin, rng = open_cache(spec), ConcatSession(spec), generator(2)
    for count in (1, 3, 2, 1, 1, 3, 2, 3, 1):
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk(count)
            written = write_all(chunk, spec, rng)
            for layer, branch, k, v in written:
                frames = visible_by_frame(chunk, spec, layer, branch)
                expected = twin.extend(layer, branch, k, v)
                assert sorted(frames) == [frame for frame, _, _ in expected]
                assert all(torch.equal(frames[frame][0], frame_k) for frame, frame_k, _ in expected)
            chunk.commit()
            twin.commit(written, count)


@pytest.mark.parametrize("storage", Storage)
def test_registers_are_attended_until_the_chunk_ends(storage: Storage) -> None:
    spec = tiny_spec(registers=3, storage=storage)
    cache, rng = open_cache(spec), generator(3)
    q = torch.randn(4, 2, 4, generator=rng)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        (_, _, k, v), *_ = write_all(chunk, spec, rng)
        for count in (2, 3, 0):
            extra_k, extra_v = random_pair(spec, count, rng)
            chunk.write_registers(0, extra_k, extra_v)
            expected = naive_attention(q, torch.cat((extra_k, k)), torch.cat((extra_v, v)))
            torch.testing.assert_close(chunk.attend(0, q), expected, atol=1e-6, rtol=0)
        chunk.write_registers(0, *random_pair(spec, 3, rng))
        assert torch.equal(chunk.visible(0)[0], k)
        with pytest.raises(ValueError, match="registers: at most 3 tokens, got 4"):
            chunk.write_registers(0, *random_pair(spec, 4, rng))
        chunk.commit()
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        (_, _, k2, v2), *_ = write_all(chunk, spec, rng)
        expected = naive_attention(q, torch.cat((k, k2)), torch.cat((v, v2)))
        torch.testing.assert_close(chunk.attend(0, q), expected, atol=1e-6, rtol=0)


def test_reading_before_writing_is_refused() -> None:
    spec = tiny_spec(num_branches=2)
    with open_cache(spec).lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.write(0, *random_pair(spec, 6, generator(0)), branch=0)
        with pytest.raises(ChunkIncomplete, match="attend: the chunk has not written layer 0 of branch 1"):
            chunk.attend(0, torch.zeros(1, 2, 4), branch=1)
        with pytest.raises(ChunkIncomplete, match="visible: the chunk has not written layer 1 of branch 0"):
            chunk.visible(1)


def test_commit_needs_every_layer_and_may_be_tried_again() -> None:
    spec = tiny_spec(num_branches=2)
    cache = open_cache(spec)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        write_all(chunk, spec, generator(0), limit=3)
        with pytest.raises(
            ChunkIncomplete, match="1 of 4 layers were not written, the first is layer 1 of local branch 1"
        ):
            chunk.commit()
        chunk.write(1, *random_pair(spec, 6, generator(1)), branch=1)
        chunk.commit()
    assert cache.num_latent_frames("a") == 3


@pytest.mark.parametrize(
    ("k_shape", "dtype", "message"),
    [
        ((5, 2, 4), torch.float32, r"K of layer 0: expected \(6, 2, 4\) torch.float32 on cpu, got \(5, 2, 4\)"),
        ((6, 1, 4), torch.float32, "K of layer 0"),
        ((6, 2, 4), torch.float16, "got .* torch.float16"),
        ((1, 6, 2, 4), torch.float32, "K of layer 0"),
    ],
)
def test_kv_of_another_shape_or_dtype_is_refused(k_shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    with open_cache(tiny_spec()).lease("a") as lease:
        chunk = lease.begin_chunk()
        with pytest.raises(ValueError, match=message):
            chunk.write(0, torch.zeros(k_shape, dtype=dtype), torch.zeros(6, 2, 4))
        with pytest.raises(ValueError, match="V of layer 1"):
            chunk.write(1, torch.zeros(6, 2, 4), torch.zeros(k_shape, dtype=dtype))


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layer_is_refused(layer: int) -> None:
    spec = tiny_spec()
    with open_cache(spec).lease("a") as lease:
        chunk = lease.begin_chunk()
        with pytest.raises(ValueError, match=rf"layer must be 0\.\.1, got {layer}"):
            chunk.write(layer, *random_pair(spec, 6, generator(0)))


@pytest.mark.parametrize(("end", "state"), [("commit", "committed"), ("rollback", "rolled back")])
def test_a_closed_chunk_refuses_everything(end: str, state: str) -> None:
    spec = tiny_spec()
    with open_cache(spec).lease("a") as lease:
        chunk = lease.begin_chunk()
        write_all(chunk, spec, generator(0))
        pair = random_pair(spec, 6, generator(1))
        getattr(chunk, end)()
        attempts = [
            lambda: chunk.write(0, *pair),
            lambda: chunk.write_registers(0, *pair),
            lambda: chunk.attend(0, pair[0]),
            lambda: chunk.visible(0),
            lambda: chunk.cross_store("text"),
            chunk.commit,
        ]
        for attempt in attempts:
            with pytest.raises(TransactionClosed, match=f"at latent frame 0, which is {state}"):
                attempt()


def test_rollback_twice_is_harmless_and_after_commit_an_error() -> None:
    spec = tiny_spec()
    cache = open_cache(spec)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.rollback()
        chunk.rollback()
        chunk = lease.begin_chunk()
        write_all(chunk, spec, generator(0))
        chunk.commit()
        with pytest.raises(TransactionClosed, match="rollback on the chunk"):
            chunk.rollback()
    assert cache.num_latent_frames("a") == 3


def test_importing_the_transaction_does_not_import_torch() -> None:
    code = (
        "import sys, kvcache.spec, kvcache.transaction, kvcache.errors, kvcache.lease; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
