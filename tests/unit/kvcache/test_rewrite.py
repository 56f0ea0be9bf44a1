"""History written anew: the chunk sees the copy, the session keeps its own until the commit."""

from __future__ import annotations

import subprocess
import sys
from typing import NoReturn

import pytest
import torch

from kvcache.cache import KVCache
from kvcache.errors import ChunkIncomplete, HistoryFixed, TransactionClosed
from kvcache.spec import KVSpec, Storage
from kvcache.transaction import ChunkTransaction
from tests.support.kv_concat_cache import ConcatSession
from tests.support.kv_geometry import (
    TEXT,
    generator,
    local_branches,
    make_cache,
    random_pair,
    random_text,
    tiny_spec,
    visible_by_frame,
    write_all,
)

GEOMETRIES = [(1, 5), (3, 6), (0, 3), (4, 4), (2, 8)]


def rewritable(storage: Storage | None, *, sink: int = 1, window: int | None = 5) -> KVSpec:
    return tiny_spec(sink=sink, window=window, storage=storage, num_branches=2, rewritable_history=True)


def opened(spec: KVSpec, num_chunks: int, *, seed: int = 0) -> tuple[KVCache, ConcatSession]:
    """Return a cache with a session of some chunks, and the twin of that."""
    cache, twin, rng = make_cache(spec), ConcatSession(spec), generator(seed)
    cache.open("a")
    for _ in range(num_chunks):
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk()
            written = write_all(chunk, spec, rng)
            chunk.commit()
        twin.commit(written, 3)
    return cache, twin


def parts_of(frames: tuple[int, ...]) -> list[range]:
    """Cut history into runs of frames of the same chunk."""
    parts: list[range] = []
    for frame in frames:
        if parts and parts[-1].stop == frame and frame % 3:
            parts[-1] = range(parts[-1].start, frame + 1)
        else:
            parts.append(range(frame, frame + 1))
    return parts


def rewrite_all(chunk: ChunkTransaction, twin: ConcatSession, rng: torch.Generator) -> ConcatSession:
    """Write all of history anew, check what each part attends to, and return the twin of that."""
    spec = twin.spec
    rewrite = chunk.rewrite_history()
    for latent_frames in parts_of(rewrite.latent_frames):
        part = rewrite.part(latent_frames)
        for layer in range(spec.num_layers):
            for branch in local_branches(spec):
                k, v = random_pair(spec, len(latent_frames) * spec.tokens_per_latent_frame, rng)
                part.write(layer, k, v, branch=branch)
                twin = twin.rewritten(layer, branch, latent_frames.start, k, v)
                q = torch.randn(3, 2, 4, generator=rng)
                expected = twin.attend_up_to(layer, branch, latent_frames.stop, rewrite.latent_frames, q)
                torch.testing.assert_close(part.attend(layer, q, branch=branch), expected, atol=1e-5, rtol=0)
    return twin


def assert_sees(chunk: ChunkTransaction, twin: ConcatSession, rng: torch.Generator) -> list:
    """Write the chunk's K/V and compare all that it sees with the twin."""
    written = write_all(chunk, twin.spec, rng)
    for layer, branch, k, v in written:
        frames = visible_by_frame(chunk, twin.spec, layer, branch)
        expected = twin.extend(layer, branch, k, v)
        assert sorted(frames) == [frame for frame, _, _ in expected]
        for frame, frame_k, frame_v in expected:
            assert torch.equal(frames[frame][0], frame_k), frame
            assert torch.equal(frames[frame][1], frame_v), frame
    return written


@pytest.mark.parametrize("storage", [*Storage, None])
@pytest.mark.parametrize(("sink", "window"), GEOMETRIES)
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 6])
def test_a_committed_rewrite_is_the_new_history(
    storage: Storage | None, sink: int, window: int, num_chunks: int
) -> None:
    spec = rewritable(storage, sink=sink, window=None if storage is None else window)
    cache, twin = opened(spec, num_chunks)
    rng = generator(5)
    for _ in range(2):  # the second time out of the place that the first one left free
        with cache.lease("a") as lease:
            chunk = lease.begin_chunk()
            twin = rewrite_all(chunk, twin, rng)
            cache.check_integrity()
            written = assert_sees(chunk, twin, rng)
            chunk.commit()
        twin.commit(written, 3)
        cache.check_integrity()
        assert cache.resident_latent_frames("a") == tuple(frame for frame, _, _ in twin.history[0, 0])
    with cache.lease("a") as lease:
        assert_sees(lease.begin_chunk(), twin, rng)
    cache.close("a")
    assert cache.free_pages == cache.total_pages
    cache.check_integrity()


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("num_chunks", [1, 3, 6])
@pytest.mark.parametrize("with_chunk", [False, True])
def test_a_rollback_brings_the_old_history_back(storage: Storage, num_chunks: int, with_chunk: bool) -> None:
    cache, twin = opened(rewritable(storage), num_chunks)
    free, resident = cache.free_pages, cache.resident_latent_frames("a")
    rng = generator(5)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        rewrite_all(chunk, twin, rng)
        if with_chunk:
            write_all(chunk, cache.spec, rng)
    assert (cache.free_pages, cache.resident_latent_frames("a")) == (free, resident)
    cache.check_integrity()
    with cache.lease("a") as lease:
        assert_sees(lease.begin_chunk(), twin, rng)


@pytest.mark.parametrize("storage", Storage)
def test_a_rolled_back_rewrite_loses_no_frame_to_a_shorter_chunk(storage: Storage) -> None:
    """The chunk wrote on a copy, so even the frames that it would have evicted are there."""
    cache, twin = opened(rewritable(storage, sink=0, window=3), 2)
    rng = generator(5)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.rewrite_history()
        write_all(chunk, cache.spec, rng)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk(1)
        assert_sees(chunk, twin, rng)


@pytest.mark.parametrize("storage", Storage)
def test_every_session_can_rewrite_in_turn_while_all_are_full(storage: Storage) -> None:
    spec = rewritable(storage)
    cache, rng = make_cache(spec, capacity=3), generator(1)
    twins = {name: ConcatSession(spec) for name in "abc"}
    for name in twins:
        cache.open(name)
    for index in range(9):
        for name, twin in twins.items():
            with cache.lease(name) as lease:
                chunk = lease.begin_chunk()
                history = rewrite_all(chunk, twin, rng) if index % 2 else twin
                written = assert_sees(chunk, history, rng)
                chunk.commit()
            history.commit(written, 3)
            twins[name] = history
            cache.check_integrity()


@pytest.mark.parametrize("storage", Storage)
def test_frames_of_no_part_are_copied(storage: Storage) -> None:
    cache, twin = opened(rewritable(storage), 6)
    rng = generator(5)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        rewrite = chunk.rewrite_history()
        assert rewrite.latent_frames == (0, 16, 17)
        written = assert_sees(chunk, twin, rng)
        chunk.commit()
    twin.commit(written, 3)
    with cache.lease("a") as lease:
        assert_sees(lease.begin_chunk(), twin, rng)


def test_a_part_reads_the_cross_store_that_the_chunk_staged() -> None:
    spec = rewritable(Storage.EXTENTS)
    cache, _ = opened(spec, 1)
    text = random_text(TEXT, spec, generator(3), 4)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("text").publish(text)
        part = chunk.rewrite_history().part(range(0, 3))
        assert torch.equal(part.cross_store("text").read(1)[0], text[1][0])


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("where", ["bind", "copy_history"])
def test_a_failure_while_the_copy_is_made_rolls_back(
    storage: Storage, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, twin = opened(rewritable(storage), 4)
    free = cache.free_pages

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("injected")

    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        with monkeypatch.context() as patch:
            patch.setattr(type(cache._pool), where, fail)
            with pytest.raises(RuntimeError, match="injected"):
                chunk.rewrite_history()
    assert cache.free_pages == free
    cache.check_integrity()
    with cache.lease("a") as lease:
        assert_sees(lease.begin_chunk(), twin, generator(5))


def test_a_part_that_was_begun_must_be_written_to_the_end() -> None:
    spec = rewritable(Storage.EXTENTS)
    cache, _ = opened(spec, 1)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        part = chunk.rewrite_history().part(range(0, 3))
        with pytest.raises(ChunkIncomplete, match="no new K/V of layer 0 of branch 1"):
            part.attend(0, torch.zeros(1, 2, 4), branch=1)
        part.write(0, *random_pair(spec, 6, generator(0)))
        write_all(chunk, spec, generator(1))
        with pytest.raises(ChunkIncomplete, match=r"range\(0, 3\) were begun anew, but only 1 of 4 layers"):
            chunk.commit()


@pytest.mark.parametrize("frames", [range(2, 4), range(6, 9), range(0, 0), range(14, 20), range(15, 18, 2)])
def test_only_runs_of_history_can_be_written_anew(frames: range) -> None:
    cache, _ = opened(rewritable(Storage.EXTENTS), 6)
    with cache.lease("a") as lease:
        rewrite = lease.begin_chunk().rewrite_history()
        with pytest.raises(ValueError, match="expected a run of the history"):
            rewrite.part(frames)
        rewrite.part(range(16, 18))
        with pytest.raises(ValueError, match="outside the parts before"):
            rewrite.part(range(17, 18))


def test_rewriting_is_refused_without_a_plan_and_after_a_write() -> None:
    cache = make_cache(tiny_spec())
    cache.open("a")
    with cache.lease("a") as lease, pytest.raises(HistoryFixed, match="rewritable_history=False"):
        lease.begin_chunk().rewrite_history()
    spec = rewritable(Storage.EXTENTS)
    cache, _ = opened(spec, 1)
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        write_all(chunk, spec, generator(0), limit=1)
        with pytest.raises(HistoryFixed, match="before the chunk's first write"):
            chunk.rewrite_history()
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        part = chunk.rewrite_history().part(range(0, 3))
        with pytest.raises(HistoryFixed, match="expected once"):
            chunk.rewrite_history()
        chunk.rollback()
        with pytest.raises(TransactionClosed):
            part.write(0, *random_pair(spec, 6, generator(0)))


@pytest.mark.parametrize("shape", [(4, 2, 4), (6, 1, 4)])
def test_kv_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    cache, _ = opened(rewritable(Storage.EXTENTS), 1)
    with cache.lease("a") as lease:
        part = lease.begin_chunk().rewrite_history().part(range(0, 3))
        with pytest.raises(ValueError, match="K of layer 0"):
            part.write(0, torch.zeros(shape), torch.zeros(6, 2, 4))
        with pytest.raises(ValueError, match="V of layer 0"):
            part.write(0, torch.zeros(6, 2, 4), torch.zeros(shape))


@pytest.mark.parametrize("storage", Storage)
def test_room_for_a_copy_is_counted_once(storage: Storage) -> None:
    spec = rewritable(storage)
    cache = make_cache(spec, capacity=3)
    assert cache.total_pages == 4 * 2 * 6
    assert cache.storage_bytes == spec.required_bytes(3)
    plain = tiny_spec(sink=1, window=5, storage=storage, num_branches=2)
    assert spec.storage_bytes(2) - spec.storage_bytes(1) == plain.storage_bytes(2) - plain.storage_bytes(1)


def test_importing_the_rewrite_does_not_import_torch() -> None:
    code = "import sys, kvcache.rewrite; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
