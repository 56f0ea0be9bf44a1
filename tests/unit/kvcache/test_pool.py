"""The storage: its size, and that extents are read as one view while pages are gathered."""

from __future__ import annotations

import pytest
import torch

from kvcache.page_table import PageTable
from kvcache.pages import PageLedger
from kvcache.pool import ExtentPool, PagePool, allocate_pool
from kvcache.spec import KVSpec, Storage
from tests.support.kv_geometry import generator, random_pair, tiny_spec

CPU = torch.device("cpu")


def make_table(spec: KVSpec, *, extent: int | None) -> PageTable:
    return PageTable(spec, PageLedger(spec.num_pages(2)), "s", extent=extent)


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("capacity", [1, 3])
def test_allocates_what_the_spec_says(storage: Storage, capacity: int) -> None:
    spec = tiny_spec(storage=storage, num_branches=2, registers=3)
    pool = allocate_pool(spec, capacity, CPU, torch.float32)
    assert pool.num_bytes == spec.storage_bytes(capacity)
    assert isinstance(pool, ExtentPool if storage is Storage.EXTENTS else PagePool)


def test_extents_are_read_as_one_contiguous_view_of_the_storage() -> None:
    spec = tiny_spec(sink=2, window=5, chunk=3, tokens=4, registers=6, num_branches=2)
    pool = ExtentPool(spec, 2, CPU, torch.float32)
    table = make_table(spec, extent=1)
    rng = generator(0)
    row_bytes = spec.num_kv_heads * spec.head_dim * 4
    for chunk_index in range(5):
        staged = table.stage(3)
        bound = pool.bind(staged)
        for branch in (0, 1):
            bound.write(0, branch, *random_pair(spec, 12, rng))
            for num_registers in (0, 2, 6):
                for view, storage in zip(
                    bound.visible(0, branch, num_registers), (pool.k_EXHD[0], pool.v_EXHD[0]), strict=True
                ):
                    frames = min(3 * (chunk_index + 1), 7)
                    assert view.is_contiguous()
                    assert view.shape[0] == num_registers + 4 * frames
                    first_row = (2 + branch) * spec.extent_tokens + 6 - num_registers
                    assert view.data_ptr() == storage.data_ptr() + first_row * row_bytes
        table.commit(staged)


@pytest.mark.parametrize("storage", Storage)
def test_a_chunk_changes_no_other_row(storage: Storage) -> None:
    spec = tiny_spec(sink=2, window=5, chunk=3, tokens=4, storage=storage)
    pool = allocate_pool(spec, 2, CPU, torch.float32)
    table = make_table(spec, extent=0 if storage is Storage.EXTENTS else None)
    tensors = (*pool.k_EXHD, *pool.v_EXHD) if isinstance(pool, ExtentPool) else (*pool.k_PTHD, *pool.v_PTHD)
    rng = generator(1)
    for _ in range(6):
        staged = table.stage(3)
        before = [tensor.clone() for tensor in tensors]
        pool.bind(staged).write(1, 0, *random_pair(spec, 12, rng))
        changed = [int((tensor != old).flatten(2).any(-1).sum()) for tensor, old in zip(tensors, before, strict=True)]
        assert changed == [0, 12, 0, 12]  # K and V of layer 1 only
        table.commit(staged)


@pytest.mark.parametrize("storage", Storage)
def test_registers_come_first_and_stay_out_of_the_frames(storage: Storage) -> None:
    spec = tiny_spec(tokens=4, registers=5, storage=storage, num_branches=2)
    pool = allocate_pool(spec, 1, CPU, torch.float32)
    bound = pool.bind(make_table(spec, extent=0 if storage is Storage.EXTENTS else None).stage(3))
    rng = generator(2)
    chunk, registers = random_pair(spec, 12, rng), random_pair(spec, 3, rng)
    bound.write(0, 1, *chunk)
    bound.write_registers(0, 1, *registers)
    for got, frames, extra in zip(bound.visible(0, 1, 3), chunk, registers, strict=True):
        assert torch.equal(got, torch.cat((extra, frames)))
    for got, frames in zip(bound.visible(0, 1, 0), chunk, strict=True):
        assert torch.equal(got, frames)


def test_storage_can_be_written_in_and_out_of_inference_mode() -> None:
    spec = tiny_spec()
    with torch.inference_mode():
        pool = ExtentPool(spec, 1, CPU, torch.float32)
        bound = pool.bind(make_table(spec, extent=0).stage(3))
        bound.write(0, 0, *random_pair(spec, 6, generator(3)))
    trained = torch.ones(6, 2, 4, requires_grad=True)
    bound.write(0, 0, trained, trained)
    assert not pool.k_EXHD[0].requires_grad
    assert torch.equal(bound.visible(0, 0, 0)[0], trained)


@pytest.mark.parametrize("storage", Storage)
def test_rows_written_in_place_are_those_that_write_fills(storage: Storage) -> None:
    spec = tiny_spec(sink=2, window=5, chunk=3, tokens=4, registers=2, num_branches=2, storage=storage)
    by_copy, in_place = (allocate_pool(spec, 2, CPU, torch.float32) for _ in range(2))
    table = make_table(spec, extent=1 if storage is Storage.EXTENTS else None)
    rng = generator(2)
    for _ in range(4):
        staged = table.stage(3)
        copying, placing = by_copy.bind(staged), in_place.bind(staged)
        for branch in (1, 0):
            k_NHD, v_NHD = random_pair(spec, 12, rng)
            copying.write(1, branch, k_NHD, v_NHD)
            rows = placing.writable(1, branch, staged.latent_frames)
            for frame, first in enumerate(rows.first_rows_F.tolist()):
                chunk_rows = slice(frame * rows.tokens_per_frame, (frame + 1) * rows.tokens_per_frame)
                rows.k_XHD[first : first + rows.tokens_per_frame] = k_NHD[chunk_rows]
                rows.v_XHD[first : first + rows.tokens_per_frame] = v_NHD[chunk_rows]
            for got, expected in zip(placing.visible(1, branch, 0), copying.visible(1, branch, 0), strict=True):
                assert torch.equal(got, expected)
        table.commit(staged)
