"""Latent frames computed after a chunk in flight and never kept: those of a model that commits only what it observed.

A draft sees the chunk, its history and registers of its own; nothing of it is left when the chunk ends. Does not import
torch when imported. Shapes: N tokens of the draft, or query tokens; R registers; B streams of a layer; H heads; D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kvcache.checks import check_index, check_rows
from kvcache.errors import ChunkIncomplete
from kvcache.spec import KVSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.attention import Attention
    from kvcache.cross_store import CrossStore
    from kvcache.located_rows import IndexedChunk
    from kvcache.pool import BoundChunk, WritableRows


class FindCrossStore(Protocol):
    def __call__(self, name: str, *, branch: int = 0) -> CrossStore: ...


class ChunkDraft:
    """Made by `ChunkTransaction.draft`; valid until the chunk ends. Each forward writes over the one before."""

    def __init__(
        self,
        *,
        spec: KVSpec,
        latent_frames: range,
        bound: BoundChunk,
        like: Tensor,
        attention: Attention,
        require_open: Callable[[str], None],
        cross_store: FindCrossStore,
    ) -> None:
        self.latent_frames = latent_frames
        self._spec = spec
        self._bound = bound
        self._like = like
        self._attention = attention
        self._require_open = require_open
        self._cross_store = cross_store
        self._written: set[int] = set()
        self._num_registers: dict[int, int] = {}

    @property
    def first_latent_frame(self) -> int:
        return self.latent_frames.start

    @property
    def num_latent_frames(self) -> int:
        return len(self.latent_frames)

    def write_all(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        """Copy K and V of the draft's frames in every stream of a layer.

        Raises ValueError for another shape, dtype or device than the cache's.
        """
        num_tokens = len(self.latent_frames) * self._spec.tokens_per_latent_frame
        for slot, (k_NHD, v_NHD) in enumerate(self._streams("write_all", layer, k_BNHD, v_BNHD, num_tokens)):
            self._bound.write(layer, slot, k_NHD, v_NHD)
        self._written.add(layer)

    def write_registers_all(self, layer: int, k_BRHD: Tensor, v_BRHD: Tensor) -> None:
        """Copy K and V of non-video tokens, R up to the spec's `register_tokens`, in every stream of a layer."""
        num_registers = int(k_BRHD.shape[1])
        if num_registers > self._spec.register_tokens:
            raise ValueError(f"registers: at most {self._spec.register_tokens} tokens, got {num_registers}")
        pairs = self._streams("write_registers_all", layer, k_BRHD, v_BRHD, num_registers)
        for slot, (k_RHD, v_RHD) in enumerate(pairs):
            self._bound.write_registers(layer, slot, k_RHD, v_RHD)
        self._num_registers[layer] = num_registers

    def rows_to_write_all(self, layer: int, num_registers: int = 0) -> WritableRows:
        """Return rows for a kernel that writes K and V in place: of each stream the frames', then the registers'.

        Counts as `write_all` and `write_registers_all`. The caller must have enqueued the writing of every row before
        it attends. Raises ValueError where registers are stored apart.
        """
        self._require_open("rows_to_write_all")
        check_index("layer", layer, self._spec.num_layers)
        if not 0 <= num_registers <= self._spec.register_tokens:
            raise ValueError(f"registers: at most {self._spec.register_tokens} tokens, got {num_registers}")
        rows = self._bound.writable_all(layer, num_registers)
        self._written.add(layer)
        self._num_registers[layer] = num_registers
        return rows

    def attend_all(self, layer: int, q_BNHD: Tensor) -> Tensor:
        """Return attention [B, N, H, D] over registers, history, chunk and draft in every stream of a layer.

        Raises ChunkIncomplete if the draft's own K/V of this layer was not written.
        """
        self._require_open("attend_all")
        if layer not in self._written:
            raise ChunkIncomplete(f"attend_all: the draft has not written layer {layer}")
        k_BSHD, v_BSHD = self._bound.visible_branches(layer, self._num_registers.get(layer, 0))
        return attend_streams(self._attention, q_BNHD, k_BSHD, v_BSHD)

    def indexed(self, num_registers: int = 0) -> IndexedChunk:
        """Return where the draft and its registers lie, as numbers. Raises ValueError unless that is an extent."""
        self._require_open("indexed")
        return self._bound.indexed(num_registers)

    def cross_store(self, name: str, *, branch: int = 0) -> CrossStore:
        """Return a cross store as the chunk in flight sees it."""
        return self._cross_store(name, branch=branch)

    def _streams(
        self, action: str, layer: int, k_BXHD: Tensor, v_BXHD: Tensor, num_rows: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        self._require_open(action)
        check_index("layer", layer, self._spec.num_layers)
        spec = self._spec
        shape = (spec.layer_slots(layer), num_rows, spec.num_kv_heads, spec.head_dim)
        check_rows(f"K of layer {layer}", k_BXHD, shape, self._like)
        check_rows(f"V of layer {layer}", v_BXHD, shape, self._like)
        return zip(k_BXHD.unbind(0), v_BXHD.unbind(0), strict=True)


def attend_streams(attention: Attention, q_BNHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
    """Attend in every stream of a layer, one after the other."""
    if q_BNHD.shape[0] != k_BSHD.shape[0]:
        raise ValueError(f"queries: expected {k_BSHD.shape[0]} streams, got {q_BNHD.shape[0]}")
    if q_BNHD.shape[0] == 1:
        return attention(q_BNHD[0], k_BSHD[0], v_BSHD[0]).unsqueeze(0)
    out_BNHD = q_BNHD.new_empty(q_BNHD.shape)
    for out_NHD, q_NHD, k_SHD, v_SHD in zip(out_BNHD, q_BNHD, k_BSHD, v_BSHD, strict=True):
        out_NHD.copy_(attention(q_NHD, k_SHD, v_SHD))
    return out_BNHD
