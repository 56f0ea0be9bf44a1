"""The K/V of whichever chunk was shown last, for a forward whose launches may not depend on the chunk.

A captured forward runs over an `IndexedKV` in place of a chunk in flight or its draft. Between two replays the same
object is shown another chunk: its numbers and rows are copied to fixed places in device memory. Nothing here decides
where K/V lies.

A kernel that learns the number of rows on the device reads whole tiles of them. FlashAttention-3 gives what lies past
the end the weight 0 and still multiplies it, so that one NaN there, left by whoever had the extent before, would spoil
every result. Showing a chunk therefore clears the rows that a last tile may reach; they belong to no visible frame.

Shapes: B streams of a layer, N tokens of a chunk, R registers, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from kvcache.attention_indexed import IndexedAttention
from kvcache.cross_store import CrossStore
from kvcache.located_rows import IndexedChunk, IndexedRows, clear
from kvcache.pool import WritableRows, allocate
from kvcache.spec import KVSpec

TILE_ROWS = 256
"""Rows that a kernel reads at once, at most; those of FlashAttention-3 for heads of 128 read 176 or 224."""


class IndexableKV(Protocol):
    """A chunk in flight, or its draft."""

    def indexed(self, num_registers: int = 0) -> IndexedChunk: ...

    def cross_store(self, name: str, *, branch: int = 0) -> CrossStore: ...


class IndexedKV:
    """Made from an example; afterwards `show` chunks with as many frames, of any session and any length.

    Implements what forwards need of a chunk and of a draft: those of all branches at once (`BranchedLayerKV`), and in
    models with one branch those that name it (`LayerKV`). Showing a chunk is not writing it: the caller tells a
    transaction which layers are written. Rows of the cross stores `biased_stores` may have a bias.
    """

    def __init__(
        self,
        spec: KVSpec,
        attention: IndexedAttention,
        example: IndexableKV,
        *,
        num_registers: int = 0,
        biased_stores: Collection[str] = (),
    ) -> None:
        chunk = example.indexed(num_registers)
        device = chunk.read.k_EXHD[0].device
        self._spec = spec
        self._attention = attention
        self._num_registers = num_registers
        self._read = chunk.read
        self._rows = {
            streams: allocate(1, tuple(rows.shape), device, rows.dtype)[0]
            for streams, rows in chunk.rows_to_write.items()
        }
        stores = {key: example.cross_store(key[0], branch=key[1]).indexed() for key in self._store_keys()}
        self._numbers = _Numbers([*self._rows, *(1 for _ in stores)], device)
        self._places = dict(zip(self._rows, self._numbers.places, strict=False))
        store_places = self._numbers.places[len(self._rows) :]
        self._stores = {
            key: IndexedStore(attention, rows, place, name=key[0], is_biased=key[0] in biased_stores)
            for (key, rows), place in zip(stores.items(), store_places, strict=True)
        }
        self.show(example)

    @property
    def num_bytes(self) -> int:
        rows_bytes = sum(rows.nbytes for rows in self._rows.values())
        return self._numbers.num_bytes + rows_bytes + sum(store.num_bytes for store in self._stores.values())

    def show(self, kv: IndexableKV) -> None:
        """Let the next run read and write where a chunk lies.

        Raises ValueError for a chunk of another length or cache, CrossStoreEmpty if a store was not filled.
        """
        chunk = kv.indexed(self._num_registers)
        texts = [kv.cross_store(name, branch=branch).indexed() for name, branch in self._stores]
        if chunk.read.k_EXHD is not self._read.k_EXHD:
            raise ValueError("expected a chunk of the cache that the example is of, got one of another cache")
        for streams, rows in chunk.rows_to_write.items():
            if rows.shape != self._rows[streams].shape:
                raise ValueError(
                    f"expected a chunk that writes {self._rows[streams].shape[0]} rows, got {rows.shape[0]}"
                )
        for store, text in zip(self._stores.values(), texts, strict=True):
            store.show_bias(text)
        for streams, rows in chunk.rows_to_write.items():
            self._rows[streams].copy_(rows)
        self._numbers.set([*(chunk.read for _ in self._rows), *texts])
        self._clear_past_the_end(chunk.read)

    def _clear_past_the_end(self, rows: IndexedRows) -> None:
        """Clear values: keys there may be anything, since their weight does not depend on them."""
        end = rows.first_row + rows.num_rows
        if end == rows.v_EXHD[0].shape[1]:
            return
        tails: list[Tensor] = []
        for layer, v_EXHD in enumerate(rows.v_EXHD):
            streams = self._spec.layer_slots(layer)
            tails += v_EXHD[rows.entry * streams : (rows.entry + 1) * streams, end : end + TILE_ROWS].unbind(0)
        clear(tails)

    # ---------------------------------------------------------------- what a forward asks for

    def rows_to_write_all(self, layer: int, num_registers: int = 0) -> WritableRows:
        """Return the rows of the frames and registers of every stream of a layer."""
        if num_registers != self._num_registers:
            raise ValueError(f"registers: expected {self._num_registers} tokens, got {num_registers}")
        return WritableRows(
            k_XHD=self._read.k_EXHD[layer].flatten(0, 1),
            v_XHD=self._read.v_EXHD[layer].flatten(0, 1),
            first_rows_F=self._rows[self._spec.layer_slots(layer)],
            tokens_per_frame=1,
        )

    def write_all(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        """Copy K and V of the frames in every stream of a layer."""
        self._write(layer, slice(0, k_BNHD.shape[1]), k_BNHD, v_BNHD)

    def write_registers_all(self, layer: int, k_BRHD: Tensor, v_BRHD: Tensor) -> None:
        """Copy K and V of all registers in every stream of a layer."""
        if k_BRHD.shape[1] != self._num_registers:
            raise ValueError(f"registers: expected {self._num_registers} tokens, got {k_BRHD.shape[1]}")
        if self._num_registers:
            self._write(layer, slice(-self._num_registers, None), k_BRHD, v_BRHD)

    @torch.no_grad()
    def _write(self, layer: int, part: slice, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        streams = self._spec.layer_slots(layer)
        rows = self._rows[streams].view(streams, -1)[:, part].flatten()
        for storage_EXHD, new_BNHD in ((self._read.k_EXHD[layer], k_BNHD), (self._read.v_EXHD[layer], v_BNHD)):
            if new_BNHD.dtype != storage_EXHD.dtype:
                raise ValueError(f"K/V of layer {layer}: expected {storage_EXHD.dtype}, got {new_BNHD.dtype}")
            # As bytes: torch has few operations on float8.
            rows_XHD, new_XHD = (x.flatten(0, 1).view(torch.uint8) for x in (storage_EXHD, new_BNHD))
            rows_XHD.index_copy_(0, rows, new_XHD)

    def attend_all(self, layer: int, q_BNHD: Tensor) -> Tensor:
        """Return attention [B, N, H, D] over registers, history and chunk in every stream of a layer."""
        streams, first = self._spec.layer_slots(layer), self._read.first_row
        if q_BNHD.shape[0] != streams:
            raise ValueError(f"queries: expected {streams} streams, got {q_BNHD.shape[0]}")
        entries_B, num_rows_B = self._places[streams]
        return self._attention(
            q_BNHD,
            self._read.k_EXHD[layer][:, first:],
            self._read.v_EXHD[layer][:, first:],
            entries_B=entries_B,
            num_rows_B=num_rows_B,
        )

    def write(self, layer: int, k_NHD: Tensor, v_NHD: Tensor, *, branch: int = 0) -> None:
        """Copy K and V of the frames of a layer, in a model with one branch."""
        self._require_one_stream(layer, branch)
        self.write_all(layer, k_NHD.unsqueeze(0), v_NHD.unsqueeze(0))

    def rows_to_write(self, layer: int, *, branch: int = 0) -> WritableRows:
        """Return the rows of the frames of a layer, in a model with one branch."""
        self._require_one_stream(layer, branch)
        return self.rows_to_write_all(layer)

    def attend(self, layer: int, q_NHD: Tensor, *, branch: int = 0) -> Tensor:
        """Return attention [N, H, D] over history and chunk, in a model with one branch."""
        self._require_one_stream(layer, branch)
        return self.attend_all(layer, q_NHD.unsqueeze(0)).squeeze(0)

    def _require_one_stream(self, layer: int, branch: int) -> None:
        if branch or self._spec.num_local_branches != 1:
            raise ValueError(
                f"layer {layer}, branch {branch}: expected a model with one branch, it has "
                f"{self._spec.num_local_branches}"
            )

    def cross_store(self, name: str, *, branch: int = 0) -> IndexedStore:
        """Return a cross store of the chunk shown. Raises ValueError for an unknown name."""
        shared = {store.name: store.shared_between_branches for store in self._spec.cross_stores}
        if name not in shared:
            raise ValueError(f"unknown cross store {name!r}: expected one of {list(shared)}")
        return self._stores[name, 0 if shared[name] else branch]

    def _store_keys(self) -> list[tuple[str, int]]:
        branches = [index for index, branch in enumerate(self._spec.branches) if branch.local_slot is not None]
        return [
            (store.name, branch)
            for store in self._spec.cross_stores
            for branch in ([0] if store.shared_between_branches else branches)
        ]


class IndexedStore:
    """A cross store of whichever chunk was shown last."""

    def __init__(
        self,
        attention: IndexedAttention,
        example: IndexedRows,
        place: tuple[Tensor, Tensor],
        *,
        name: str,
        is_biased: bool,
    ) -> None:
        self._attention = attention
        self._rows = example
        self._entries_B, self._num_rows_B = place
        self._name = name
        self._bias_X: Tensor | None = None
        if is_biased:
            storage_EXHD = example.k_EXHD[0]
            (self._bias_X,) = allocate(1, (storage_EXHD.shape[1],), storage_EXHD.device, torch.float32)

    @property
    def num_bytes(self) -> int:
        return 0 if self._bias_X is None else self._bias_X.nbytes

    def show_bias(self, rows: IndexedRows) -> None:
        """Let the next run add the bias of these rows. Raises ValueError for one that was not expected."""
        if self._bias_X is None:
            if rows.logit_bias_S is not None:
                raise ValueError(f"indexed: expected rows without a bias in cross store {self._name!r}")
        elif rows.logit_bias_S is None:
            self._bias_X.zero_()
        else:
            self._bias_X[: rows.num_rows].copy_(rows.logit_bias_S)

    def attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        """Return attention [N, H, D] of the queries over the store."""
        out_BNHD = self._attention(
            q_NHD.unsqueeze(0),
            self._rows.k_EXHD[layer],
            self._rows.v_EXHD[layer],
            entries_B=self._entries_B,
            num_rows_B=self._num_rows_B,
            logit_bias_X=self._bias_X,
        )
        return out_BNHD.squeeze(0)


class _Numbers:
    """Entries and lengths of several readers in one int32 tensor, so that showing a chunk is one copy.

    `places` has for each reader its entries and its lengths, one of each per stream.
    """

    def __init__(self, streams: list[int], device: torch.device) -> None:
        self._streams = streams
        (self._numbers,) = allocate(1, (2 * sum(streams),), device, torch.int32)
        self.places: list[tuple[Tensor, Tensor]] = []
        first = 0
        for count in streams:
            middle, end = first + count, first + 2 * count
            self.places.append((self._numbers[first:middle], self._numbers[middle:end]))
            first = end

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes

    def set(self, readers: list[IndexedRows]) -> None:
        numbers: list[int] = []
        for count, rows in zip(self._streams, readers, strict=True):
            numbers += range(rows.entry * count, (rows.entry + 1) * count)
            numbers += [rows.num_rows] * count
        given = torch.tensor(numbers, dtype=torch.int32)
        if self._numbers.is_cuda:
            # Pinned, so that the copy doesn't make the host wait for the device.
            given = given.pin_memory()
        self._numbers.copy_(given, non_blocking=True)
