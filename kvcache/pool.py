"""The K/V storage of self-attention, allocated once. Moves rows where `slots` says; decides nothing.

Shapes: E extents, P pages, X rows of an extent, T tokens a latent frame, N tokens of the chunk in flight, R registers,
S visible rows, B streams of a layer (its branches, or one), H heads, D head size. One K and one V tensor per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcache import slots
from kvcache.attention import Attention, PagedAttention
from kvcache.located_rows import IndexedChunk, IndexedRows, PagedRows, to_index
from kvcache.page_table import StagedChunk
from kvcache.spec import RESERVED_PAGES, KVSpec, Storage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WritableRows:
    """Where frames of one layer go, for kernels that write K and V in place: any order, every row once.

    `k_XHD` and `v_XHD` are all rows of the layer's storage. Frame f takes `tokens_per_frame` rows from
    `first_rows_F[f]` on (int64, on the storage's device).
    """

    k_XHD: Tensor
    v_XHD: Tensor
    first_rows_F: Tensor
    tokens_per_frame: int


class BoundChunk(Protocol):
    """The rows of one chunk in flight. `local_slot` names the branch; arguments are checked by the caller."""

    def write(self, layer: int, local_slot: int, k_NHD: Tensor, v_NHD: Tensor) -> None:
        """Copy the chunk's K/V to its rows, over what an earlier forward left there."""
        ...

    def write_registers(self, layer: int, local_slot: int, k_RHD: Tensor, v_RHD: Tensor) -> None:
        """Copy the chunk's non-video K/V to the register rows."""
        ...

    def writable(self, layer: int, local_slot: int, frames: Sequence[int]) -> WritableRows:
        """Return the rows of visible frames, for a kernel that writes them."""
        ...

    def writable_all(self, layer: int, num_registers: int) -> WritableRows:
        """Return the rows of the chunk's tokens, then of registers, of every stream of a layer: one row a "frame".

        Raises ValueError for registers of pages, which lie apart from the frames.
        """
        ...

    def visible(self, layer: int, local_slot: int, num_registers: int) -> tuple[Tensor, Tensor]:
        """Return K and V [S, H, D]: `num_registers` register rows, then the visible frames in storage order."""
        ...

    def visible_pages(self, layer: int, local_slot: int) -> PagedRows:
        """Return the pages of the visible frames. Raises ValueError where registers lie among the frames."""
        ...

    def attend(self, attention: Attention, layer: int, local_slot: int, num_registers: int, q_NHD: Tensor) -> Tensor:
        """Return attention of the queries over what `visible` gives, read in pages where the kernel does that."""
        if isinstance(attention, PagedAttention) and not num_registers:
            rows = self.visible_pages(layer, local_slot)
            return attention.attend_pages(q_NHD, rows.k_PTHD, rows.v_PTHD, rows.pages_F)
        return attention(q_NHD, *self.visible(layer, local_slot, num_registers))

    def visible_branches(self, layer: int, num_registers: int) -> tuple[Tensor, Tensor]:
        """Return the same of all streams of a layer, [B, S, H, D]."""
        ...

    def indexed(self, num_registers: int) -> IndexedChunk:
        """Return where the chunk and `num_registers` registers lie, as numbers. Raises ValueError for pages."""
        ...

    def write_frames(self, layer: int, local_slot: int, frames: Sequence[int], k_NHD: Tensor, v_NHD: Tensor) -> None:
        """Copy K/V to the rows of visible frames."""
        ...

    def read_frames(self, layer: int, local_slot: int, frames: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return K and V [S, H, D] of visible frames in this order: views or copies."""
        ...


class KVPool(Protocol):
    """Storage for all sessions of a worker."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def example(self) -> Tensor:
        """Any tensor of the storage: its dtype and device are those of all K/V."""
        ...

    def bind(self, staged: StagedChunk) -> BoundChunk:
        """Work out the rows of a staged chunk."""
        ...

    def copy_history(self, source: StagedChunk, target: StagedChunk) -> None:
        """Copy the K/V of what a chunk sees, except its own, from one plan of it to another."""
        ...


def allocate_pool(spec: KVSpec, capacity: int, device: torch.device, dtype: torch.dtype) -> KVPool:
    """Allocate the storage of `capacity` sessions."""
    if spec.effective_storage is Storage.EXTENTS:
        return ExtentPool(spec, capacity, device, dtype)
    return PagePool(spec, capacity, device, dtype)


def allocate_layers(spec: KVSpec, num_extents: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Allocate one tensor per layer with an extent for each of its streams."""
    row_shape = (spec.extent_tokens, spec.num_kv_heads, spec.head_dim)
    shapes = [(num_extents * spec.layer_slots(layer), *row_shape) for layer in range(spec.num_layers)]
    return tuple(tensor for shape in shapes for tensor in allocate(1, shape, device, dtype))


def allocate(num: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Allocate `num` zeroed tensors that can be written both inside and outside inference mode."""
    with torch.inference_mode(False):
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(num))


def _total_bytes(*groups: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for group in groups for tensor in group)


class ExtentPool:
    """One contiguous extent per session and local branch, used as a ring; attention reads one view of it."""

    def __init__(self, spec: KVSpec, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.k_EXHD = allocate_layers(spec, spec.num_extents(capacity), device, dtype)
        self.v_EXHD = allocate_layers(spec, spec.num_extents(capacity), device, dtype)

    @property
    def num_bytes(self) -> int:
        return _total_bytes(self.k_EXHD, self.v_EXHD)

    @property
    def example(self) -> Tensor:
        return self.k_EXHD[0]

    def bind(self, staged: StagedChunk) -> BoundChunk:
        return _ExtentChunk(self, staged)

    @torch.no_grad()
    def copy_history(self, source: StagedChunk, target: StagedChunk) -> None:
        runs = slots.frame_runs(self.spec, source.history)
        for layer in range(self.spec.num_layers):
            old = slots.layer_extents(self.spec, source, layer)
            new = slots.layer_extents(self.spec, target, layer)
            for rows_EXHD in (self.k_EXHD[layer], self.v_EXHD[layer]):
                for run in runs:
                    rows = slice(run.target_row, run.target_row + run.num_rows)
                    rows_EXHD[new, rows].copy_(rows_EXHD[old, rows])


class _ExtentChunk(BoundChunk):
    def __init__(self, pool: ExtentPool, staged: StagedChunk) -> None:
        spec = pool.spec
        assert staged.extent is not None, "the chunk is not stored in extents"
        self._pool = pool
        self._extent = staged.extent
        self._extents = [slots.layer_extents(spec, staged, layer) for layer in range(spec.num_layers)]
        self._runs = slots.write_runs(spec, staged)
        self._first_row, self._end_row = slots.visible_rows(spec, staged)
        self._first_rows: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._token_rows: dict[tuple[int, int, int], Tensor] = {}
        self._pages: dict[int, Tensor] = {}

    def write(self, layer: int, local_slot: int, k_NHD: Tensor, v_NHD: Tensor) -> None:
        self._write_runs(layer, local_slot, self._runs, k_NHD, v_NHD)

    def write_frames(self, layer: int, local_slot: int, frames: Sequence[int], k_NHD: Tensor, v_NHD: Tensor) -> None:
        self._write_runs(layer, local_slot, slots.frame_runs(self._pool.spec, frames), k_NHD, v_NHD)

    @torch.no_grad()
    def _write_runs(
        self, layer: int, local_slot: int, runs: Sequence[slots.RowRun], k_NHD: Tensor, v_NHD: Tensor
    ) -> None:
        extent = self._extents[layer].start + local_slot
        for rows_XHD, new_NHD in ((self._pool.k_EXHD[layer][extent], k_NHD), (self._pool.v_EXHD[layer][extent], v_NHD)):
            for run in runs:
                target_NHD = rows_XHD[run.target_row : run.target_row + run.num_rows]
                target_NHD.copy_(new_NHD[run.source_row : run.source_row + run.num_rows])

    def writable(self, layer: int, local_slot: int, frames: Sequence[int]) -> WritableRows:
        spec, extent = self._pool.spec, self._extents[layer].start + local_slot
        key = (extent, tuple(frames))
        if key not in self._first_rows:
            rows = tuple(extent * spec.extent_tokens + row for row in slots.first_rows(spec, frames))
            self._first_rows[key] = to_index(rows, self._pool.example.device)
        return WritableRows(
            k_XHD=self._pool.k_EXHD[layer].flatten(0, 1),
            v_XHD=self._pool.v_EXHD[layer].flatten(0, 1),
            first_rows_F=self._first_rows[key],
            tokens_per_frame=spec.tokens_per_latent_frame,
        )

    def writable_all(self, layer: int, num_registers: int) -> WritableRows:
        extents = self._extents[layer]
        key = (extents.start, extents.stop, num_registers)
        if key not in self._token_rows:
            tokens = [row for run in self._runs for row in range(run.target_row, run.target_row + run.num_rows)]
            registers = range(self._first_row - num_registers, self._first_row)
            size = self._pool.spec.extent_tokens
            rows = tuple(extent * size + row for extent in range(*key[:2]) for row in (*tokens, *registers))
            self._token_rows[key] = to_index(rows, self._pool.example.device)
        return WritableRows(
            k_XHD=self._pool.k_EXHD[layer].flatten(0, 1),
            v_XHD=self._pool.v_EXHD[layer].flatten(0, 1),
            first_rows_F=self._token_rows[key],
            tokens_per_frame=1,
        )

    def indexed(self, num_registers: int) -> IndexedChunk:
        spec, first = self._pool.spec, self._first_row - num_registers
        layers = {spec.layer_slots(layer): layer for layer in range(spec.num_layers)}
        return IndexedChunk(
            read=IndexedRows(
                k_EXHD=self._pool.k_EXHD,
                v_EXHD=self._pool.v_EXHD,
                entry=self._extent,
                first_row=first,
                num_rows=self._end_row - first,
            ),
            rows_to_write={
                streams: self.writable_all(layer, num_registers).first_rows_F for streams, layer in layers.items()
            },
        )

    def read_frames(self, layer: int, local_slot: int, frames: Sequence[int]) -> tuple[Tensor, Tensor]:
        extent, runs = self._extents[layer].start + local_slot, slots.frame_runs(self._pool.spec, frames)

        def read(rows_XHD: Tensor) -> Tensor:
            return torch.cat([rows_XHD[run.target_row : run.target_row + run.num_rows] for run in runs])

        return read(self._pool.k_EXHD[layer][extent]), read(self._pool.v_EXHD[layer][extent])

    @torch.no_grad()
    def write_registers(self, layer: int, local_slot: int, k_RHD: Tensor, v_RHD: Tensor) -> None:
        extent = self._extents[layer].start + local_slot
        first = self._first_row - k_RHD.shape[0]
        self._pool.k_EXHD[layer][extent, first : self._first_row].copy_(k_RHD)
        self._pool.v_EXHD[layer][extent, first : self._first_row].copy_(v_RHD)

    def visible(self, layer: int, local_slot: int, num_registers: int) -> tuple[Tensor, Tensor]:
        extent, first = self._extents[layer].start + local_slot, self._first_row - num_registers
        return (
            self._pool.k_EXHD[layer][extent, first : self._end_row],
            self._pool.v_EXHD[layer][extent, first : self._end_row],
        )

    def visible_pages(self, layer: int, local_slot: int) -> PagedRows:
        spec, extent = self._pool.spec, self._extents[layer].start + local_slot
        if spec.register_tokens:
            raise ValueError(f"pages: {spec.register_tokens} register rows begin every extent, expected none")
        shape = (-1, spec.tokens_per_latent_frame, spec.num_kv_heads, spec.head_dim)
        if extent not in self._pages:
            first, num = extent * spec.session_latent_frames, (self._end_row - self._first_row) // shape[1]
            self._pages[extent] = to_index(tuple(range(first, first + num)), self._pool.example.device)
        k_PTHD, v_PTHD = self._pool.k_EXHD[layer].view(shape), self._pool.v_EXHD[layer].view(shape)
        return PagedRows(k_PTHD=k_PTHD, v_PTHD=v_PTHD, pages_F=self._pages[extent])

    def visible_branches(self, layer: int, num_registers: int) -> tuple[Tensor, Tensor]:
        extents, rows = self._extents[layer], slice(self._first_row - num_registers, self._end_row)
        return self._pool.k_EXHD[layer][extents, rows], self._pool.v_EXHD[layer][extents, rows]


class PagePool:
    """Single latent frames in any order; attention reads a gathered copy."""

    def __init__(self, spec: KVSpec, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        heads = (spec.num_kv_heads, spec.head_dim)
        pages = (spec.num_pages(capacity) + RESERVED_PAGES, spec.tokens_per_latent_frame, *heads)
        registers = (spec.num_local_branches, spec.register_tokens, *heads)
        self.k_PTHD = allocate(spec.num_layers, pages, device, dtype)
        self.v_PTHD = allocate(spec.num_layers, pages, device, dtype)
        self.k_registers_BRHD = allocate(spec.num_layers, registers, device, dtype)
        self.v_registers_BRHD = allocate(spec.num_layers, registers, device, dtype)
        self.device = device

    @property
    def num_bytes(self) -> int:
        return _total_bytes(self.k_PTHD, self.v_PTHD, self.k_registers_BRHD, self.v_registers_BRHD)

    @property
    def example(self) -> Tensor:
        return self.k_PTHD[0]

    def bind(self, staged: StagedChunk) -> BoundChunk:
        return _PagedChunk(self, staged)

    @torch.no_grad()
    def copy_history(self, source: StagedChunk, target: StagedChunk) -> None:
        history = source.history
        for local_slot in range(self.spec.num_local_branches):
            old_F = to_index(slots.pages_of(source, local_slot, history), self.device)
            new_F = to_index(slots.pages_of(target, local_slot, history), self.device)
            for pages_PTHD in (*self.k_PTHD, *self.v_PTHD):
                pages_PTHD.index_copy_(0, new_F, pages_PTHD.index_select(0, old_F))


class _PagedChunk(BoundChunk):
    def __init__(self, pool: PagePool, staged: StagedChunk) -> None:
        local_slots = range(pool.spec.num_local_branches)
        self._pool = pool
        self._staged = staged
        self._chunk = [to_index(slots.chunk_pages(staged, slot), pool.device) for slot in local_slots]
        self._visible = [to_index(slots.visible_pages(staged, slot), pool.device) for slot in local_slots]
        self._first_rows: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def write(self, layer: int, local_slot: int, k_NHD: Tensor, v_NHD: Tensor) -> None:
        self._write_pages(layer, self._chunk[local_slot], k_NHD, v_NHD)

    def write_frames(self, layer: int, local_slot: int, frames: Sequence[int], k_NHD: Tensor, v_NHD: Tensor) -> None:
        self._write_pages(layer, self._pages_of(local_slot, frames), k_NHD, v_NHD)

    def read_frames(self, layer: int, local_slot: int, frames: Sequence[int]) -> tuple[Tensor, Tensor]:
        index_F = self._pages_of(local_slot, frames)
        return (
            self._pool.k_PTHD[layer].index_select(0, index_F).flatten(0, 1),
            self._pool.v_PTHD[layer].index_select(0, index_F).flatten(0, 1),
        )

    def writable(self, layer: int, local_slot: int, frames: Sequence[int]) -> WritableRows:
        key, tokens = (local_slot, tuple(frames)), self._pool.spec.tokens_per_latent_frame
        if key not in self._first_rows:
            self._first_rows[key] = self._pages_of(local_slot, frames) * tokens
        return WritableRows(
            k_XHD=self._pool.k_PTHD[layer].flatten(0, 1),
            v_XHD=self._pool.v_PTHD[layer].flatten(0, 1),
            first_rows_F=self._first_rows[key],
            tokens_per_frame=tokens,
        )

    def writable_all(self, layer: int, num_registers: int) -> WritableRows:
        if num_registers:
            raise ValueError(
                f"registers: {num_registers} tokens can't be written with the frames, pages hold them apart"
            )
        tokens = self._pool.spec.tokens_per_latent_frame
        pages_F = torch.cat(self._chunk[: self._pool.spec.layer_slots(layer)])
        rows_FT = pages_F[:, None] * tokens + torch.arange(tokens, device=pages_F.device)
        return WritableRows(
            k_XHD=self._pool.k_PTHD[layer].flatten(0, 1),
            v_XHD=self._pool.v_PTHD[layer].flatten(0, 1),
            first_rows_F=rows_FT.flatten(),
            tokens_per_frame=1,
        )

    def indexed(self, num_registers: int) -> IndexedChunk:
        raise ValueError("indexed: the frames of a chunk lie in pages, expected one extent")

    def _pages_of(self, local_slot: int, frames: Sequence[int]) -> Tensor:
        return to_index(slots.pages_of(self._staged, local_slot, frames), self._pool.device)

    @torch.no_grad()
    def _write_pages(self, layer: int, index_F: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> None:
        for pages_PTHD, new_NHD in ((self._pool.k_PTHD[layer], k_NHD), (self._pool.v_PTHD[layer], v_NHD)):
            pages_PTHD.index_copy_(0, index_F, new_NHD.reshape(-1, *pages_PTHD.shape[1:]))

    @torch.no_grad()
    def write_registers(self, layer: int, local_slot: int, k_RHD: Tensor, v_RHD: Tensor) -> None:
        self._pool.k_registers_BRHD[layer][local_slot, : k_RHD.shape[0]].copy_(k_RHD)
        self._pool.v_registers_BRHD[layer][local_slot, : v_RHD.shape[0]].copy_(v_RHD)

    def visible(self, layer: int, local_slot: int, num_registers: int) -> tuple[Tensor, Tensor]:
        pool, index_F = self._pool, self._visible[local_slot]
        k_SHD = pool.k_PTHD[layer].index_select(0, index_F).flatten(0, 1)
        v_SHD = pool.v_PTHD[layer].index_select(0, index_F).flatten(0, 1)
        if not num_registers:
            return k_SHD, v_SHD
        return (
            torch.cat((pool.k_registers_BRHD[layer][local_slot, :num_registers], k_SHD)),
            torch.cat((pool.v_registers_BRHD[layer][local_slot, :num_registers], v_SHD)),
        )

    def visible_pages(self, layer: int, local_slot: int) -> PagedRows:
        pool = self._pool
        return PagedRows(k_PTHD=pool.k_PTHD[layer], v_PTHD=pool.v_PTHD[layer], pages_F=self._visible[local_slot])

    def visible_branches(self, layer: int, num_registers: int) -> tuple[Tensor, Tensor]:
        pairs = [self.visible(layer, slot, num_registers) for slot in range(self._pool.spec.layer_slots(layer))]
        return torch.stack([k_SHD for k_SHD, _ in pairs]), torch.stack([v_SHD for _, v_SHD in pairs])
