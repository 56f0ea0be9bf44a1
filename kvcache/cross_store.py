"""K/V of cross-attention inputs: storage for all sessions, and the staged view that one chunk in flight has of a store.

Each store has one slot per session (and local branch, unless shared) and one spare set. A publication goes to a spare
slot and the commit exchanges slot numbers, so nothing a session holds is ever written over.

Shapes: Z slots, L tokens of a store, N query tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.attention import Attention
from kvcache.checks import check_index, check_rows
from kvcache.errors import CrossStoreEmpty
from kvcache.located_rows import IndexedRows, clear
from kvcache.pages import PageId, PageLedger
from kvcache.pool import allocate
from kvcache.spec import CrossStoreSpec, KVSpec

CrossKey = tuple[str, int]
"""Store name and local slot of the branch; slot 0 for a shared store."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossEntry:
    """What a store of one session holds: `num_tokens` rows of a slot, and the bias of each row's logit (float32)."""

    slot: PageId
    num_tokens: int
    logit_bias_L: Tensor | None


class CrossPool:
    """Storage of one store for all sessions. Slots are counted by a ledger like pages."""

    def __init__(
        self, spec: KVSpec, store: CrossStoreSpec, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        head_dim = store.head_dim if store.head_dim is not None else spec.head_dim
        copies = 1 if store.shared_between_branches else spec.num_local_branches
        shape = ((capacity + 1) * copies, store.num_tokens, store.num_heads, head_dim)
        self.store = store
        self.num_layers = spec.num_layers
        self.ledger = PageLedger(shape[0])
        self.k_ZLHD = allocate(spec.num_layers, shape, device, dtype)
        self.v_ZLHD = allocate(spec.num_layers, shape, device, dtype)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.k_ZLHD, *self.v_ZLHD))

    def read(self, layer: int, entry: CrossEntry) -> tuple[Tensor, Tensor]:
        """Return K and V [L, H, D] of one layer."""
        rows = slice(0, entry.num_tokens)
        return self.k_ZLHD[layer][entry.slot, rows], self.v_ZLHD[layer][entry.slot, rows]

    def fill(self, slot: PageId, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            for layer, (k_LHD, v_LHD) in enumerate(pairs):
                self.k_ZLHD[layer][slot, : k_LHD.shape[0]].copy_(k_LHD)
                self.v_ZLHD[layer][slot, : v_LHD.shape[0]].copy_(v_LHD)
            # Kernels that are told lengths in device memory read whole tiles: see `IndexedKV`.
            end = pairs[0][0].shape[0]
            clear(v_LHD for v_ZLHD in self.v_ZLHD if len(v_LHD := v_ZLHD[slot, end:]))

    def check_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]], logit_bias_L: Tensor | None) -> int:
        """Check a whole publication before anything is written and return its number of tokens."""
        name = f"cross store {self.store.name!r}"
        if len(pairs) != self.num_layers:
            raise ValueError(f"{name}: expected K/V pairs of {self.num_layers} layers, got {len(pairs)}")
        num_tokens = int(pairs[0][0].shape[0])
        if not 1 <= num_tokens <= self.store.num_tokens:
            raise ValueError(f"{name}: num_tokens must be 1..{self.store.num_tokens}, got {num_tokens}")
        like = self.k_ZLHD[0]
        shape = (num_tokens, *like.shape[2:])
        for layer, pair in enumerate(pairs):
            for label, tensor in zip(("K", "V"), pair, strict=True):
                check_rows(f"{name}: {label} of layer {layer}", tensor, shape, like)
        if logit_bias_L is not None and tuple(logit_bias_L.shape) != (num_tokens,):
            raise ValueError(f"{name}: logit_bias_L must have shape ({num_tokens},), got {tuple(logit_bias_L.shape)}")
        return num_tokens


class CrossStores:
    """The cross stores of one session: committed entries, and what the chunk in flight staged over them."""

    def __init__(self, pools: dict[str, CrossPool], session_id: str) -> None:
        self._pools = pools
        self._session_id = session_id
        self._committed: dict[CrossKey, CrossEntry] = {}
        self._staged: dict[CrossKey, CrossEntry | None] = {}

    def view(self, name: str, local_slot: int, require_open: Callable[[str], None], attention: Attention) -> CrossStore:
        """Return a store as the chunk in flight sees it. Raises ValueError for an unknown name."""
        if name not in self._pools:
            raise ValueError(f"unknown cross store {name!r}: expected one of {list(self._pools)}")
        pool = self._pools[name]
        key = (name, 0 if pool.store.shared_between_branches else local_slot)
        return CrossStore(self, pool, key, require_open, attention)

    def held_slots(self, name: str) -> list[PageId]:
        """Slots of a store that this session holds, staged ones included."""
        entries = (*self._committed.items(), *self._staged.items())
        return [entry.slot for key, entry in entries if key[0] == name and entry is not None]

    def get(self, key: CrossKey) -> CrossEntry | None:
        """Return what the chunk in flight sees."""
        return self._staged[key] if key in self._staged else self._committed.get(key)

    def stage(self, key: CrossKey, pairs: Sequence[tuple[Tensor, Tensor]], logit_bias_L: Tensor | None) -> None:
        """Write a whole publication to a spare slot. On any failure the store is as before, or cleared if restaged."""
        pool = self._pools[key[0]]
        num_tokens = pool.check_pairs(pairs, logit_bias_L)
        bias_L = None
        if logit_bias_L is not None:
            like = pool.k_ZLHD[0]
            bias_L = logit_bias_L.detach().to(device=like.device, dtype=torch.float32, copy=True)
        if self._staged.get(key) is not None:
            self.stage_clear(key)
        slot = pool.ledger.take(self._session_id)
        try:
            pool.fill(slot, pairs)
        except BaseException:
            pool.ledger.give_back(slot, self._session_id)
            raise
        self._staged[key] = CrossEntry(slot=slot, num_tokens=num_tokens, logit_bias_L=bias_L)

    def stage_clear(self, key: CrossKey) -> None:
        """Stage the store as empty."""
        self._free(key, self._staged.get(key))
        self._staged[key] = None

    def commit(self) -> None:
        """Make what was staged the session's and free the slots it replaces."""
        for key, entry in self._staged.items():
            self._free(key, self._committed.pop(key, None))
            if entry is not None:
                self._committed[key] = entry
        self._staged = {}

    def rollback(self) -> None:
        """Free what was staged."""
        for key, entry in self._staged.items():
            self._free(key, entry)
        self._staged = {}

    def clear(self) -> None:
        """Free everything at once."""
        self.rollback()
        for key, entry in self._committed.items():
            self._free(key, entry)
        self._committed = {}

    def _free(self, key: CrossKey, entry: CrossEntry | None) -> None:
        if entry is not None:
            self._pools[key[0]].ledger.give_back(entry.slot, self._session_id)


class CrossStore:
    """One cross store as the chunk in flight sees it. Valid until the chunk is committed or rolled back."""

    def __init__(
        self,
        table: CrossStores,
        pool: CrossPool,
        key: CrossKey,
        require_open: Callable[[str], None],
        attention: Attention,
    ) -> None:
        self._table = table
        self._pool = pool
        self._key = key
        self._require_open = require_open
        self._attention = attention

    @property
    def is_filled(self) -> bool:
        return self._table.get(self._key) is not None

    def publish(self, pairs: Sequence[tuple[Tensor, Tensor]], logit_bias_L: Tensor | None = None) -> None:
        """Stage K and V [L, H, D] of every layer, or nothing; the session keeps them from the commit on.

        `logit_bias_L` is added to the logits of each row: log(c) makes a row count as c equal rows. The tensors are
        copied. Raises ValueError before anything changes if a pair is missing or has another shape, dtype or device.
        """
        self._require_open("publish")
        self._table.stage(self._key, pairs, logit_bias_L)

    def clear(self) -> None:
        """Stage the store as empty; history of self-attention is not touched."""
        self._require_open("clear")
        self._table.stage_clear(self._key)

    def attend(self, layer: int, q_NHD: Tensor) -> Tensor:
        """Return attention of the queries over the store, [N, H, D]. Raises CrossStoreEmpty."""
        k_LHD, v_LHD, bias_L = self.read(layer)
        return self._attention(q_NHD, k_LHD, v_LHD, logit_bias_S=bias_L)

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return views of K and V [L, H, D], and the logit bias [L] if there is one. Raises CrossStoreEmpty."""
        self._require_open("read")
        check_index("layer", layer, self._pool.num_layers)
        entry = self._entry()
        k_LHD, v_LHD = self._pool.read(layer, entry)
        return k_LHD, v_LHD, entry.logit_bias_L

    def indexed(self) -> IndexedRows:
        """Return where the store lies, as numbers. Raises CrossStoreEmpty."""
        self._require_open("indexed")
        entry = self._entry()
        return IndexedRows(
            k_EXHD=self._pool.k_ZLHD,
            v_EXHD=self._pool.v_ZLHD,
            entry=entry.slot,
            first_row=0,
            num_rows=entry.num_tokens,
            logit_bias_S=entry.logit_bias_L,
        )

    def _entry(self) -> CrossEntry:
        entry = self._table.get(self._key)
        if entry is None:
            raise CrossStoreEmpty(self._key[0])
        return entry
