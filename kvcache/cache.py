"""The K/V cache of one worker: all storage, all sessions, one chunk in flight. The only entry for other packages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache.attention import Attention, TorchAttention
from kvcache.cross_store import CrossPool, CrossStores
from kvcache.errors import (
    CapacityExceeded,
    ChunkInFlight,
    SessionExists,
    SessionLeased,
    SessionUnknown,
)
from kvcache.lease import Lease
from kvcache.page_table import PageTable
from kvcache.pages import PageId, PageLedger
from kvcache.pool import allocate_pool
from kvcache.spec import KVSpec, Storage
from kvcache.transaction import ChunkTransaction


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    session_id: str
    table: PageTable
    cross: CrossStores
    lease: Lease | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _InFlight:
    session: _Session
    chunk: ChunkTransaction


class KVCache:
    """Hold the K/V of up to `capacity` sessions in storage that is allocated here and never grows.

    Not thread-safe: one thread of a worker runs its ticks one after the other. Raises ValueError if `dtype` has another
    size than the spec's `element_bytes`.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        capacity: int,
        device: torch.device | str,
        dtype: torch.dtype,
        attention: Attention | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if dtype.itemsize != spec.element_bytes:
            raise ValueError(
                f"dtype {dtype} has {dtype.itemsize} bytes, the spec says element_bytes {spec.element_bytes}"
            )
        self.spec = spec
        self.capacity = capacity
        self.attention: Attention = attention if attention is not None else TorchAttention()
        device = torch.device(device)
        self._pool = allocate_pool(spec, capacity, device, dtype)
        self._cross_pools = {store.name: CrossPool(spec, store, capacity, device, dtype) for store in spec.cross_stores}
        self._ledger = PageLedger(spec.num_pages(capacity))
        self._extents: PageLedger | None = None
        if spec.effective_storage is Storage.EXTENTS:
            self._extents = PageLedger(spec.num_extents(capacity))
        self._sessions: dict[str, _Session] = {}
        self._in_flight: _InFlight | None = None

    # ---------------------------------------------------------------- questions

    @property
    def total_pages(self) -> int:
        """All pages that sessions can own: one latent frame of one local branch each, all layers."""
        return self._ledger.total_pages

    @property
    def free_pages(self) -> int:
        """Pages that hold no frame of any session."""
        return self._ledger.free_pages

    @property
    def storage_bytes(self) -> int:
        """Bytes allocated for K/V of self-attention and cross stores."""
        return self._pool.num_bytes + sum(pool.num_bytes for pool in self._cross_pools.values())

    @property
    def session_ids(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def num_latent_frames(self, session_id: str) -> int:
        """Return the committed frames of a session's run, evicted ones included. Raises SessionUnknown."""
        return self._find(session_id).table.num_latent_frames

    def resident_latent_frames(self, session_id: str) -> tuple[int, ...]:
        """Return the committed frames whose K/V is held, ascending. Raises SessionUnknown."""
        return self._find(session_id).table.resident

    # ---------------------------------------------------------------- sessions

    def open(self, session_id: str) -> None:
        """Give a session its place. Raises SessionExists, CapacityExceeded."""
        if session_id in self._sessions:
            raise SessionExists(session_id)
        if len(self._sessions) >= self.capacity:
            raise CapacityExceeded(session_id, capacity=self.capacity)
        extent = None if self._extents is None else self._extents.take(session_id)
        self._sessions[session_id] = _Session(
            session_id=session_id,
            table=PageTable(self.spec, self._ledger, session_id, extent=extent, extents=self._extents),
            cross=CrossStores(self._cross_pools, session_id),
        )

    def reset(self, session_id: str) -> None:
        """Free the session's pages and cross stores now and count frames from 0.

        Raises SessionUnknown, SessionLeased.
        """
        session = self._find_unleased(session_id)
        session.table.clear()
        session.cross.clear()

    def close(self, session_id: str) -> None:
        """Free everything of a session; an unknown one is closed already. Raises SessionLeased."""
        if session_id not in self._sessions:
            return
        self.reset(session_id)
        extent = self._sessions.pop(session_id).table.extent
        if self._extents is not None and extent is not None:
            self._extents.give_back(PageId(extent), session_id)

    def lease(self, session_id: str) -> Lease:
        """Pin a session for one tick. Raises SessionUnknown, SessionLeased."""
        session = self._find_unleased(session_id)

        def unpin() -> None:
            session.lease = None

        def begin(num_latent_frames: int | None) -> ChunkTransaction:
            return self._begin(session, num_latent_frames)

        session.lease = Lease(session_id, begin=begin, restart=session.table.clear, unpin=unpin)
        return session.lease

    # ---------------------------------------------------------------- chunks

    def _begin(self, session: _Session, num_latent_frames: int | None) -> ChunkTransaction:
        if self._in_flight is not None:
            raise ChunkInFlight(session.session_id, in_flight_session_id=self._in_flight.session.session_id)
        if num_latent_frames is None:
            num_latent_frames = self.spec.latent_frames_per_chunk
        staged = session.table.stage(num_latent_frames)
        try:
            chunk = ChunkTransaction(
                spec=self.spec,
                table=session.table,
                staged=staged,
                pool=self._pool,
                cross=session.cross,
                attention=self.attention,
                on_close=self._chunk_closed,
            )
        except BaseException:
            session.table.rollback(staged)
            raise
        self._in_flight = _InFlight(session=session, chunk=chunk)
        return chunk

    def _chunk_closed(self) -> None:
        self._in_flight = None

    # ---------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Compare every owner's pages and slots with the free lists. Raises IntegrityError with what disagrees."""
        held: dict[str, list[PageId]] = {}
        for session_id, session in self._sessions.items():
            held[session_id] = session.table.held_pages()
            if self._in_flight is not None and self._in_flight.session is session:
                held[session_id].extend(self._in_flight.chunk.taken_pages)
        self._ledger.check(held)
        for name, pool in self._cross_pools.items():
            pool.ledger.check({sid: session.cross.held_slots(name) for sid, session in self._sessions.items()})
        if self._extents is not None:
            self._extents.check({sid: self._held_extents(session) for sid, session in self._sessions.items()})

    def _held_extents(self, session: _Session) -> list[PageId]:
        extents = {session.table.extent}
        if self._in_flight is not None and self._in_flight.session is session:
            extents.add(self._in_flight.chunk.staged.extent)
        return [PageId(extent) for extent in extents if extent is not None]

    def _find(self, session_id: str) -> _Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionUnknown(session_id) from None

    def _find_unleased(self, session_id: str) -> _Session:
        session = self._find(session_id)
        if session.lease is not None:
            raise SessionLeased(session_id)
        return session
