"""Row indices of a chunk in flight, as written-out tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcache.page_table import PageTable
from kvcache.pages import PageLedger
from kvcache.slots import RowRun, chunk_pages, layer_extents, visible_pages, visible_rows, write_runs
from kvcache.spec import KVSpec, Storage
from tests.support.kv_geometry import tiny_spec


def table_after(spec: KVSpec, num_chunks: int, *, extent: int | None) -> PageTable:
    table = PageTable(spec, PageLedger(spec.num_pages(4)), "s", extent=extent)
    for _ in range(num_chunks):
        table.commit(table.stage(spec.latent_frames_per_chunk))
    return table


@pytest.mark.parametrize(
    ("num_chunks", "runs"),
    [
        # sink 2, ring of 5 frames, 10 tokens a frame, 4 register rows in front
        (0, [(0, 4, 30)]),  # frames 0 1 2 -> slots 0 1 2: the sink runs into the ring
        (1, [(0, 34, 30)]),  # frames 3 4 5 -> slots 3 4 5
        (2, [(0, 64, 10), (10, 24, 20)]),  # frames 6 7 8 -> slots 6, 2 3: the ring wraps
        (3, [(0, 44, 30)]),  # frames 9 10 11 -> slots 4 5 6
    ],
)
def test_runs_of_a_wrapping_ring(num_chunks: int, runs: list[tuple[int, int, int]]) -> None:
    spec = tiny_spec(sink=2, window=5, chunk=3, tokens=10, registers=4)
    staged = table_after(spec, num_chunks, extent=1).stage(3)
    assert write_runs(spec, staged) == tuple(
        RowRun(source_row=source, target_row=target, num_rows=rows) for source, target, rows in runs
    )
    assert visible_rows(spec, staged) == (4, 4 + 10 * min(3 * (num_chunks + 1), 7))


def test_extents_of_branches_lie_side_by_side() -> None:
    spec = tiny_spec(num_branches=2)
    staged = table_after(spec, 0, extent=3).stage(3)
    assert layer_extents(spec, staged, 1) == slice(6, 8)
    assert layer_extents(replace(spec, shared_layers=1), staged, 0) == slice(3, 4)


def test_page_indices_follow_the_table() -> None:
    spec = tiny_spec(sink=1, window=3, chunk=3, storage=Storage.PAGES, num_branches=2)
    staged = table_after(spec, 1, extent=None).stage(3)
    assert staged.visible == (0, 3, 4, 5)
    assert chunk_pages(staged, 0) == (6, 8, 10)
    assert chunk_pages(staged, 1) == (7, 9, 11)
    assert visible_pages(staged, 1) == (1, 7, 9, 11)
