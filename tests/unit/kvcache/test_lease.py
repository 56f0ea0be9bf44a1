"""What a lease pins, and what it cleans up."""

from __future__ import annotations

import pytest

from kvcache.cache import KVCache
from kvcache.errors import ChunkInFlight, KVCacheError, SessionLeased, SessionUnknown
from kvcache.spec import AtWindow
from kvcache.transaction import ChunkState
from tests.support.kv_geometry import TEXT, generator, make_cache, random_text, run_chunks, tiny_spec, write_all


@pytest.fixture
def cache() -> KVCache:
    cache = make_cache(tiny_spec())
    cache.open("a")
    cache.open("b")
    return cache


def test_a_leased_session_is_pinned(cache: KVCache) -> None:
    with cache.lease("a"):
        for refused in (cache.lease, cache.reset, cache.close):
            with pytest.raises(SessionLeased, match="session 'a' is leased by a running tick"):
                refused("a")
        cache.reset("b")
    cache.close("a")


def test_an_unknown_session_has_no_lease(cache: KVCache) -> None:
    with pytest.raises(SessionUnknown, match="session 'c' is not open"):
        cache.lease("c")


def test_leaving_with_an_open_chunk_rolls_it_back(cache: KVCache) -> None:
    free = cache.free_pages
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        write_all(chunk, cache.spec, generator(0))
        assert cache.free_pages == free - 3
    assert chunk.state is ChunkState.ROLLED_BACK
    assert cache.free_pages == free
    assert cache.num_latent_frames("a") == 0


def test_an_error_passes_through_after_the_rollback(cache: KVCache) -> None:
    free = cache.free_pages

    def tick() -> None:
        with cache.lease("a") as lease:
            write_all(lease.begin_chunk(), cache.spec, generator(0), limit=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tick()
    assert cache.free_pages == free
    cache.close("a")


def test_one_chunk_is_in_flight_per_cache(cache: KVCache) -> None:
    with cache.lease("a") as first, cache.lease("b") as second:
        chunk = first.begin_chunk()
        for lease in (first, second):
            with pytest.raises(ChunkInFlight, match="a chunk of session 'a' is in flight"):
                lease.begin_chunk()
        chunk.rollback()
        second.begin_chunk()


def test_a_lease_runs_chunks_one_after_the_other(cache: KVCache) -> None:
    with cache.lease("a") as lease:
        for first in (0, 3, 6):
            chunk = lease.begin_chunk()
            assert chunk.first_latent_frame == first
            write_all(chunk, cache.spec, generator(first))
            chunk.commit()
        assert lease.begin_chunk(1).num_latent_frames == 1


def test_a_released_lease_is_worth_nothing(cache: KVCache) -> None:
    lease = cache.lease("a")
    lease.release()
    lease.release()
    with pytest.raises(KVCacheError, match="begin_chunk on a released lease of session 'a'"):
        lease.begin_chunk()
    with pytest.raises(KVCacheError, match="restart on a released lease"):
        lease.restart()
    with pytest.raises(KVCacheError, match="enter on a released lease"), lease:
        pass
    with cache.lease("a"):
        lease.release()  # must not unpin the new lease
        with pytest.raises(SessionLeased):
            cache.lease("a")


def test_a_refused_chunk_stages_nothing(cache: KVCache) -> None:
    with cache.lease("a") as lease:
        with pytest.raises(ValueError, match=r"num_latent_frames must be 1\.\.3, got 4"):
            lease.begin_chunk(4)
        assert lease.begin_chunk().num_latent_frames == 3


def test_restart_frees_the_frames_and_keeps_the_cross_stores() -> None:
    spec = tiny_spec(sink=0, window=6, at_window=AtWindow.RESTART)
    cache = make_cache(spec)
    cache.open("a")
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        chunk.cross_store("text").publish(random_text(TEXT, spec, generator(0), 5))
        write_all(chunk, spec, generator(1))
        with pytest.raises(KVCacheError, match="can't restart session 'a' while its chunk is open"):
            lease.restart()
        chunk.commit()
    run_chunks(cache, "a", 1, generator(2))
    with cache.lease("a") as lease:
        lease.restart()
        assert cache.free_pages == cache.total_pages
        chunk = lease.begin_chunk(1)
        assert chunk.visible_latent_frames == (0,)
        assert chunk.cross_store("text").is_filled
