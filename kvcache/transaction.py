"""One chunk in flight: staged K/V and cross stores that a commit makes visible at once and a rollback discards.

Knows nothing of the model. Does not import torch when imported, so that light code may name its types.

Shapes: N tokens of the chunk in (frame, row, column) order, or query tokens; R registers; S visible rows; H heads;
D head size; B streams of a layer: its local branches in order, or one in a layer that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvcache.checks import check_index, check_rows
from kvcache.draft import ChunkDraft, attend_streams
from kvcache.errors import ChunkIncomplete, HistoryFixed, TransactionClosed
from kvcache.page_table import PageTable, StagedChunk
from kvcache.pages import PageId
from kvcache.rewrite import HistoryRewrite
from kvcache.spec import KVSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.attention import Attention
    from kvcache.cross_store import CrossStore, CrossStores
    from kvcache.located_rows import IndexedChunk
    from kvcache.pool import BoundChunk, KVPool, WritableRows


class ChunkState(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class LayerKV(Protocol):
    """What a forward needs of the cache: the chunk in flight, or a part of history that is written anew."""

    def write(self, layer: int, k_NHD: Tensor, v_NHD: Tensor, *, branch: int = 0) -> None: ...

    def rows_to_write(self, layer: int, *, branch: int = 0) -> WritableRows: ...

    def attend(self, layer: int, q_NHD: Tensor, *, branch: int = 0) -> Tensor: ...

    def cross_store(self, name: str, *, branch: int = 0) -> CrossStore: ...


class BranchedLayerKV(Protocol):
    """What a forward of all branches at once needs of the cache: the chunk in flight, or a draft after it."""

    def write_all(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> None: ...

    def rows_to_write_all(self, layer: int) -> WritableRows: ...

    def attend_all(self, layer: int, q_BNHD: Tensor) -> Tensor: ...

    def cross_store(self, name: str, *, branch: int = 0) -> CrossStore: ...


class ChunkTransaction:
    """Stage the K/V of one chunk of one session. Made by `Lease.begin_chunk`; ends with one commit or rollback.

    A denoising step writes each layer's K/V and attends over history and chunk; the next step writes over it; the
    forward at timestep 0 writes what stays. A rollback leaves the K/V of every frame that the same chunk sees when it
    is run again as it was. A shorter chunk may see frames that the longer one evicted; it is refused (`FramesLost`).
    """

    def __init__(
        self,
        *,
        spec: KVSpec,
        table: PageTable,
        staged: StagedChunk,
        pool: KVPool,
        cross: CrossStores,
        attention: Attention,
        on_close: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._table = table
        self._staged = staged
        self._pool = pool
        self._bound: BoundChunk = pool.bind(staged)
        self._rewrite: HistoryRewrite | None = None
        self._draft: StagedChunk | None = None
        self._like = pool.example
        self._cross = cross
        self._attention = attention
        self._on_close = on_close
        self._written: set[tuple[int, int]] = set()
        self._num_registers: dict[tuple[int, int], int] = {}
        self._state = ChunkState.OPEN

    # ---------------------------------------------------------------- facts

    @property
    def state(self) -> ChunkState:
        return self._state

    @property
    def staged(self) -> StagedChunk:
        """What the accounting knows of the chunk; for checks of the cache."""
        return self._staged

    @property
    def taken_pages(self) -> tuple[PageId, ...]:
        """Pages that the chunk and its draft hold beside the session's own; for checks of the cache."""
        return self._staged.taken if self._draft is None else (*self._staged.taken, *self._draft.taken)

    @property
    def first_latent_frame(self) -> int:
        """Absolute index of the chunk's first latent frame since the start of the run."""
        return self._staged.first_latent_frame

    @property
    def num_latent_frames(self) -> int:
        return self._staged.num_latent_frames

    @property
    def visible_latent_frames(self) -> tuple[int, ...]:
        """Absolute indices of all frames the chunk attends to, its own included, in storage order.

        Storage order is by ring slot in extents (sink, then the ring from its first slot), ascending in pages.
        """
        return self._staged.visible

    # ---------------------------------------------------------------- self-attention

    def write(self, layer: int, k_NHD: Tensor, v_NHD: Tensor, *, branch: int = 0) -> None:
        """Copy the chunk's K and V of one layer to its rows; N = frames * tokens per frame. May be repeated.

        Raises ValueError for another shape, dtype or device than the cache's.
        """
        slot = self._locate("write", layer, branch)
        num_tokens = self.num_latent_frames * self._spec.tokens_per_latent_frame
        self._check_pair(layer, k_NHD, v_NHD, num_tokens)
        if not self._written:
            self._table.mark_overwritten(self._staged)
        self._bound.write(layer, slot, k_NHD, v_NHD)
        self._written.add((layer, slot))

    def rows_to_write(self, layer: int, *, branch: int = 0) -> WritableRows:
        """Return the chunk's rows of one layer for a kernel that writes K and V in place; counts as `write`.

        The caller must have enqueued the writing of every row before it attends or commits.
        """
        slot = self._locate("rows_to_write", layer, branch)
        if not self._written:
            self._table.mark_overwritten(self._staged)
        self._written.add((layer, slot))
        return self._bound.writable(layer, slot, self._staged.latent_frames)

    def write_registers(self, layer: int, k_RHD: Tensor, v_RHD: Tensor, *, branch: int = 0) -> None:
        """Copy K and V of non-video tokens that `attend` sees until they are replaced or the chunk ends.

        R is 0 up to the spec's `register_tokens`; 0 takes them out of sight.
        """
        slot = self._locate("write_registers", layer, branch)
        num_registers = int(k_RHD.shape[0])
        if num_registers > self._spec.register_tokens:
            raise ValueError(f"registers: at most {self._spec.register_tokens} tokens, got {num_registers}")
        self._check_pair(layer, k_RHD, v_RHD, num_registers)
        self._bound.write_registers(layer, slot, k_RHD, v_RHD)
        self._num_registers[layer, slot] = num_registers

    def attend(self, layer: int, q_NHD: Tensor, *, branch: int = 0) -> Tensor:
        """Return attention [N, H, D] of any queries over registers, history and the chunk in flight.

        Raises ChunkIncomplete if the chunk's own K/V of this layer was not written.
        """
        slot = self._locate_written("attend", layer, branch)
        return self._bound.attend(self._attention, layer, slot, self._num_registers.get((layer, slot), 0), q_NHD)

    def visible(self, layer: int, *, branch: int = 0) -> tuple[Tensor, Tensor]:
        """Return K and V [S, H, D] of the visible frames in storage order, without registers.

        Extents give views that the next write changes; pages give copies.
        """
        slot = self._locate_written("visible", layer, branch)
        return self._bound.visible(layer, slot, 0)

    def write_all(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        """Do what `write` does for every stream of a layer."""
        for branch, (k_NHD, v_NHD) in enumerate(self._streams(layer, k_BNHD, v_BNHD)):
            self.write(layer, k_NHD, v_NHD, branch=self._branch_of(branch))

    def rows_to_write_all(self, layer: int) -> WritableRows:
        """Return the chunk's rows in every stream of a layer, one after the other; counts as `write_all`.

        The caller must have enqueued the writing of every row before it attends or commits.
        """
        for slot in range(self._spec.layer_slots(layer)):
            self._locate("rows_to_write_all", layer, self._branch_of(slot))
            if not self._written:
                self._table.mark_overwritten(self._staged)
            self._written.add((layer, slot))
        return self._bound.writable_all(layer, 0)

    def attend_all(self, layer: int, q_BNHD: Tensor) -> Tensor:
        """Return attention [B, N, H, D] of every stream of a layer, as `attend` does without registers."""
        slots = range(self._spec.layer_slots(layer))
        for slot in slots:
            self._locate_written("attend_all", layer, self._branch_of(slot))
        return attend_streams(self._attention, q_BNHD, *self._bound.visible_branches(layer, 0))

    def indexed(self, num_registers: int = 0) -> IndexedChunk:
        """Return where the chunk and its registers lie, as numbers; `rows_to_write` says that they are written.

        Raises ValueError unless the chunk lies in an extent.
        """
        self._require_open("indexed")
        return self._bound.indexed(num_registers)

    def cross_store(self, name: str, *, branch: int = 0) -> CrossStore:
        """Return the staged view of a cross store. Raises ValueError for an unknown name."""
        self._require_open("cross_store")
        return self._cross.view(name, self._spec.local_slot(branch), self._require_open, self._attention)

    # ---------------------------------------------------------------- history

    def rewrite_history(self) -> HistoryRewrite:
        """Move the chunk to a copy of the history it sees, and return what writes that copy anew.

        From here on the chunk attends to the copy; the session's own K/V stays as it is until the commit. Call it
        once, before anything is written. Raises HistoryFixed if the spec is not `rewritable_history`, or too late.
        """
        self._require_open("rewrite_history")
        if not self._spec.rewritable_history:
            raise HistoryFixed("rewrite_history: the spec has rewritable_history=False, so there is no room for a copy")
        if self._written or self._num_registers or self._rewrite is not None:
            raise HistoryFixed("rewrite_history: expected once and before the chunk's first write")
        before = self._staged
        self._staged = self._table.stage_copy(before)
        self._bound = self._pool.bind(self._staged)
        self._pool.copy_history(before, self._staged)
        self._rewrite = HistoryRewrite(
            spec=self._spec,
            latent_frames=before.history,
            bound=self._bound,
            like=self._like,
            attention=self._attention,
            locate=self._locate,
            cross_store=self.cross_store,
        )
        return self._rewrite

    def restart(self, num_latent_frames: int) -> None:
        """Make this the first chunk of a new run: it begins at frame 0 and sees no history. Cross stores stay.

        The session's own K/V stays as it is until the commit. Call it before anything is written. Raises HistoryFixed
        if the spec is not `rewritable_history`, or too late, ValueError for a chunk longer than the spec's.
        """
        self._require_open("restart")
        if not self._spec.rewritable_history:
            raise HistoryFixed("restart: the spec has rewritable_history=False, so there is no room for a second run")
        if self._written or self._num_registers or self._rewrite is not None or self._draft is not None:
            raise HistoryFixed("restart: expected before the chunk's first write")
        self._staged = self._table.stage_restart(self._staged, num_latent_frames)
        self._bound = self._pool.bind(self._staged)

    def draft(self, num_latent_frames: int) -> ChunkDraft:
        """Return frames after the chunk's own that see it and are dropped when it ends. Once per chunk.

        Raises ValueError for more frames than the spec's `draft_latent_frames`, WindowFull if they do not fit.
        """
        self._require_open("draft")
        if self._draft is not None:
            raise HistoryFixed("draft: expected once per chunk")
        self._draft = self._table.stage_draft(self._staged, num_latent_frames)
        return ChunkDraft(
            spec=self._spec,
            latent_frames=self._draft.latent_frames,
            bound=self._pool.bind(self._draft),
            like=self._like,
            attention=self._attention,
            require_open=self._require_open,
            cross_store=self.cross_store,
        )

    # ---------------------------------------------------------------- end

    def commit(self) -> None:
        """Make the chunk's frames and cross stores the session's, and evict frames that left the window.

        Raises ChunkIncomplete, with the chunk still open, unless every layer of every local branch was written, also
        of the parts of history that were begun anew.
        """
        self._require_open("commit")
        if self._rewrite is not None:
            self._rewrite.require_complete()
        self._require_all_written()
        self._state = ChunkState.COMMITTED
        try:
            self._drop_draft()
            self._table.commit(self._staged)
            self._cross.commit()
        finally:
            self._on_close()

    def rollback(self) -> None:
        """Discard everything staged. Does nothing if that was done before; raises TransactionClosed after a commit."""
        if self._state is ChunkState.ROLLED_BACK:
            return
        self._require_open("rollback")
        self._state = ChunkState.ROLLED_BACK
        try:
            self._drop_draft()
            self._table.rollback(self._staged)
            self._cross.rollback()
        finally:
            self._on_close()

    def _drop_draft(self) -> None:
        if self._draft is not None:
            draft, self._draft = self._draft, None
            self._table.drop_draft(draft)

    # ---------------------------------------------------------------- checks

    def _require_all_written(self) -> None:
        layers, slots = range(self._spec.num_layers), range(self._spec.num_local_branches)
        places = [(layer, slot) for slot in slots for layer in layers if slot < self._spec.layer_slots(layer)]
        missing = [place for place in places if place not in self._written]
        if missing:
            layer, slot = missing[0]
            raise ChunkIncomplete(
                f"commit: {len(missing)} of {len(places)} layers were not written, "
                f"the first is layer {layer} of local branch {slot}"
            )

    def _require_open(self, action: str) -> None:
        if self._state is not ChunkState.OPEN:
            raise TransactionClosed(action, first_latent_frame=self.first_latent_frame, state=self._state)

    def _locate(self, action: str, layer: int, branch: int) -> int:
        self._require_open(action)
        check_index("layer", layer, self._spec.num_layers)
        slot = self._spec.local_slot(branch)
        return 0 if layer < self._spec.shared_layers else slot

    def _locate_written(self, action: str, layer: int, branch: int) -> int:
        slot = self._locate(action, layer, branch)
        if (layer, slot) not in self._written:
            raise ChunkIncomplete(f"{action}: the chunk has not written layer {layer} of branch {branch}")
        return slot

    def _branch_of(self, slot: int) -> int:
        return next(index for index, branch in enumerate(self._spec.branches) if branch.local_slot == slot)

    def _streams(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        check_index("layer", layer, self._spec.num_layers)
        streams = self._spec.layer_slots(layer)
        for name, tensor in (("K", k_BNHD), ("V", v_BNHD)):
            if tensor.shape[0] != streams:
                raise ValueError(f"{name} of layer {layer}: expected {streams} streams, got {tensor.shape[0]}")
        return zip(k_BNHD.unbind(0), v_BNHD.unbind(0), strict=True)

    def _check_pair(self, layer: int, k_XHD: Tensor, v_XHD: Tensor, num_rows: int) -> None:
        shape = (num_rows, self._spec.num_kv_heads, self._spec.head_dim)
        check_rows(f"K of layer {layer}", k_XHD, shape, self._like)
        check_rows(f"V of layer {layer}", v_XHD, shape, self._like)
