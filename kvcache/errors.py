"""Errors of the K/V cache. Bad argument values (shapes, dtypes, counts) are plain `ValueError`s.

KVCacheError
├── BudgetTooSmall       memory can't hold one session: change the configuration
├── CapacityExceeded     every session slot is taken: close a session, or refuse
├── SessionExists        the id is open already
├── SessionUnknown       the id is not open
├── SessionLeased        a tick holds the session: try again after it
├── ChunkInFlight        another chunk is staged: one tick at a time
├── TransactionClosed    the chunk was committed or rolled back before
├── ChunkIncomplete      K/V was read or committed before it was written
├── WindowFull           the session can't grow: restart it
├── HistoryFixed         history can't be written anew: plan for it in the spec, and do it before the chunk's own K/V
├── FramesLost           a rolled-back longer chunk overwrote frames this one would see: use its length, or reset
├── CrossStoreEmpty      a cross-attention store was read before it was published
└── IntegrityError       our bookkeeping disagrees with itself: restart the worker
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of all errors of this package."""


class BudgetTooSmall(KVCacheError):
    """Report that not even one session fits."""

    def __init__(self, *, required_bytes: int, free_bytes: int, detail: str) -> None:
        super().__init__(
            f"one session needs {required_bytes} bytes ({required_bytes / 1e9:.2f} GB: {detail}), "
            f"but {free_bytes} bytes ({free_bytes / 1e9:.2f} GB) are free"
        )
        self.required_bytes = required_bytes
        self.free_bytes = free_bytes


class CapacityExceeded(KVCacheError):
    """Refuse to open more sessions than storage was allocated for."""

    def __init__(self, session_id: str, *, capacity: int) -> None:
        super().__init__(f"session {session_id!r} does not fit: all {capacity} session slots are taken")
        self.session_id = session_id
        self.capacity = capacity


class SessionExists(KVCacheError):
    """Refuse to open an id twice."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} is open already")
        self.session_id = session_id


class SessionUnknown(KVCacheError):
    """Report an id that is not open."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} is not open")
        self.session_id = session_id


class SessionLeased(KVCacheError):
    """Refuse to lease, reset or close a session while a tick holds it."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} is leased by a running tick")
        self.session_id = session_id


class ChunkInFlight(KVCacheError):
    """Refuse a second chunk while one is staged; staging storage is for one chunk per worker."""

    def __init__(self, session_id: str, *, in_flight_session_id: str) -> None:
        super().__init__(
            f"can't begin a chunk of session {session_id!r}: a chunk of session {in_flight_session_id!r} is in flight"
        )
        self.session_id = session_id
        self.in_flight_session_id = in_flight_session_id


class TransactionClosed(KVCacheError):
    """Refuse to use a chunk after its commit or rollback."""

    def __init__(self, action: str, *, first_latent_frame: int, state: str) -> None:
        super().__init__(f"{action} on the chunk at latent frame {first_latent_frame}, which is {state}")
        self.state = state


class ChunkIncomplete(KVCacheError):
    """Refuse to read or commit K/V that the chunk in flight has not written."""


class WindowFull(KVCacheError):
    """Report that the next chunk would pass the frames a session may hold, and nothing may be evicted."""

    def __init__(self, *, first_latent_frame: int, num_latent_frames: int, max_latent_frames: int) -> None:
        super().__init__(
            f"{num_latent_frames} latent frames at frame {first_latent_frame} exceed the {max_latent_frames} "
            "latent frames a session may hold: restart the session"
        )
        self.first_latent_frame = first_latent_frame
        self.num_latent_frames = num_latent_frames
        self.max_latent_frames = max_latent_frames


class FramesLost(KVCacheError):
    """Report that frames of the visible set were overwritten by a longer chunk that was rolled back."""

    def __init__(self, lost_latent_frames: tuple[int, ...], *, num_latent_frames: int) -> None:
        super().__init__(
            f"a chunk of {num_latent_frames} latent frames would see frames {lost_latent_frames}, which a longer "
            "chunk overwrote before it was rolled back: run that chunk's length again, or reset the session"
        )
        self.lost_latent_frames = lost_latent_frames


class HistoryFixed(KVCacheError):
    """Refuse to write history anew where storage was not planned for it, or after the chunk's own K/V."""


class AttentionUnavailable(KVCacheError):
    """Refuse an attention backend that can't run here, with the reason."""

    def __init__(self, name: str, *, reason: str) -> None:
        super().__init__(f"attention {name!r} can't be used: {reason}")
        self.name = name
        self.reason = reason


class CrossStoreEmpty(KVCacheError):
    """Refuse to attend over a store that holds nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"cross-attention store {name!r} is empty: publish its K/V first")
        self.name = name


class IntegrityError(KVCacheError):
    """Report bookkeeping that contradicts itself, with the numbers."""
