"""Window arithmetic against brute force, and the page bookkeeping of stage, commit and rollback."""

from __future__ import annotations

from itertools import product

import pytest

from kvcache.errors import FramesLost, WindowFull
from kvcache.page_table import PageTable, ring_slot, visible_latent_frames
from kvcache.pages import PageLedger
from kvcache.spec import AtWindow, KVSpec, Storage
from tests.support.kv_geometry import GOLDEN_GEOMETRIES, tiny_spec


def make_table(spec: KVSpec) -> tuple[PageTable, PageLedger]:
    ledger = PageLedger(spec.num_pages(1))
    extent = 0 if spec.effective_storage is Storage.EXTENTS else None
    return PageTable(spec, ledger, "s", extent=extent), ledger


def advance(table: PageTable, num_latent_frames: int) -> None:
    table.commit(table.stage(num_latent_frames))


@pytest.mark.parametrize("name", GOLDEN_GEOMETRIES)
def test_resident_frames_of_the_golden_rollouts(name: str) -> None:
    sink, window, resident = GOLDEN_GEOMETRIES[name]
    table, _ = make_table(tiny_spec(sink=sink, window=window))
    for _ in range(7):
        advance(table, 3)
    assert table.resident == resident


def test_visible_set_equals_dropping_the_oldest_frame_behind_the_sink() -> None:
    for sink, window, chunk in product(range(9), range(1, 9), range(1, 9)):
        if window < chunk:
            continue
        spec = tiny_spec(sink=sink, window=window, chunk=chunk)
        history: list[int] = []
        for index in range(24):
            history += range(index * chunk, (index + 1) * chunk)
            while len(history) > sink + window:
                del history[sink]
            assert visible_latent_frames(spec, (index + 1) * chunk) == tuple(history), (sink, window, chunk, index)


def test_ring_fills_a_prefix_and_a_chunk_writes_only_outside_its_visible_history() -> None:
    for sink, window, chunk in product(range(9), range(1, 9), range(1, 9)):
        if window < chunk:
            continue
        spec = tiny_spec(sink=sink, window=window, chunk=chunk)
        for index in range(24):
            end = (index + 1) * chunk
            visible = visible_latent_frames(spec, end)
            slots = [ring_slot(spec, frame) for frame in visible]
            assert sorted(slots) == list(range(len(visible))), (sink, window, chunk, index)
            history = {ring_slot(spec, frame) for frame in visible if frame < end - chunk}
            assert not history.intersection(ring_slot(spec, frame) for frame in range(end - chunk, end))


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("chunk", range(1, 9))
def test_60_chunks_of_every_small_geometry_see_what_a_list_of_frames_says(chunk: int, storage: Storage) -> None:
    for sink, window in product(range(9), range(chunk, 9)):
        table, ledger = make_table(tiny_spec(sink=sink, window=window, chunk=chunk, storage=storage))
        frames: list[int] = []
        for index in range(60):
            frames += range(index * chunk, (index + 1) * chunk)
            while len(frames) > sink + window:
                del frames[sink]
            staged = table.stage(chunk)
            where = (sink, window, index)
            assert sorted(staged.visible) == frames, where
            assert len({page for pages in staged.visible_pages for page in pages}) == len(frames), where
            table.commit(staged)
            assert list(table.resident) == frames, where
            assert ledger.total_pages - ledger.free_pages == len(frames), where
        ledger.check({"s": table.held_pages()})


@pytest.mark.parametrize("storage", Storage)
def test_pages_are_distinct_and_eviction_frees_them_at_commit(storage: Storage) -> None:
    spec = tiny_spec(sink=2, window=5, chunk=3, storage=storage, num_branches=2)
    table, ledger = make_table(spec)
    for _ in range(8):
        before = table.held_pages()
        staged = table.stage(3)
        assert table.held_pages() == before
        ledger.check({"s": [*before, *staged.taken]})
        visible_pages = [page for pages in staged.visible_pages for page in pages]
        assert len(set(visible_pages)) == len(visible_pages)
        table.commit(staged)
        ledger.check({"s": table.held_pages()})
        assert sorted(table.held_pages()) == sorted(visible_pages)
        assert ledger.total_pages - ledger.free_pages == 2 * len(staged.visible)
    table.clear()
    assert ledger.free_pages == ledger.total_pages
    assert table.num_latent_frames == 0


@pytest.mark.parametrize("storage", Storage)
def test_rollback_restores_the_table_exactly(storage: Storage) -> None:
    table, ledger = make_table(tiny_spec(sink=1, window=4, chunk=3, storage=storage))
    for _ in range(5):
        free, resident, held = ledger.free_pages, table.resident, table.held_pages()
        staged = table.stage(3)
        table.mark_overwritten(staged)
        table.rollback(staged)
        assert (ledger.free_pages, table.resident, table.held_pages()) == (free, resident, held)
        advance(table, 3)


def test_storage_order_is_by_slot_in_extents_and_ascending_in_pages() -> None:
    for storage, expected in (
        (Storage.EXTENTS, (0, 9, 10, 11, 8)),
        (Storage.PAGES, (0, 8, 9, 10, 11)),
    ):
        table, _ = make_table(tiny_spec(sink=1, window=4, chunk=3, storage=storage))
        for _ in range(3):
            advance(table, 3)
        assert table.stage(3).visible == expected


def test_a_shorter_chunk_after_a_rolled_back_longer_one_would_see_lost_frames() -> None:
    table, _ = make_table(tiny_spec(sink=1, window=4, chunk=3))
    for _ in range(3):
        advance(table, 3)
    staged = table.stage(3)
    table.rollback(staged)
    assert table.stage(1).visible == (0, 9, 6, 7, 8)  # nothing was written, so nothing is lost

    table, _ = make_table(tiny_spec(sink=1, window=4, chunk=3))
    for _ in range(3):
        advance(table, 3)
    staged = table.stage(3)
    table.mark_overwritten(staged)
    table.rollback(staged)
    with pytest.raises(FramesLost, match=r"chunk of 1 latent frames would see frames \(6, 7\)"):
        table.stage(1)
    advance(table, 3)
    advance(table, 1)
    assert table.resident == (0, 9, 10, 11, 12)


def test_pages_lose_nothing_to_a_rollback() -> None:
    table, _ = make_table(tiny_spec(sink=1, window=4, chunk=3, storage=Storage.PAGES))
    for _ in range(3):
        advance(table, 3)
    staged = table.stage(3)
    table.mark_overwritten(staged)
    table.rollback(staged)
    assert table.stage(1).visible == (0, 6, 7, 8, 9)


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("count", [0, -1, 4])
def test_chunk_length_is_checked(count: int, storage: Storage) -> None:
    table, _ = make_table(tiny_spec(storage=storage))
    with pytest.raises(ValueError, match=rf"num_latent_frames must be 1\.\.3, got {count}"):
        table.stage(count)


def test_restart_window_is_full_instead_of_sliding() -> None:
    table, ledger = make_table(tiny_spec(sink=0, window=9, chunk=2, at_window=AtWindow.RESTART))
    for count in (1, 2, 2, 2, 2):
        advance(table, count)
    with pytest.raises(WindowFull, match="2 latent frames at frame 9 exceed the 9 latent frames"):
        table.stage(2)
    assert table.resident == tuple(range(9))
    table.clear()
    assert ledger.free_pages == ledger.total_pages
    assert table.stage(1).first_latent_frame == 0


def test_unlimited_window_ends_at_its_horizon() -> None:
    table, _ = make_table(tiny_spec(window=None, max_latent_frames=7))
    advance(table, 3)
    advance(table, 3)
    with pytest.raises(WindowFull, match="3 latent frames at frame 6 exceed the 7 latent frames"):
        table.stage(3)
    advance(table, 1)
    assert table.resident == tuple(range(7))
