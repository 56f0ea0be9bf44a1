"""The right to one session during one tick. While a lease lives, its session can't be leased again, reset or closed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvcache.errors import KVCacheError
from kvcache.transaction import ChunkState, ChunkTransaction


class Lease:
    """Pin one session. Use as a context manager; a chunk still open at its end is rolled back.

    The session is pinned from the call of `KVCache.lease` on, so a lease that is never entered must be released.
    """

    def __init__(
        self,
        session_id: str,
        *,
        begin: Callable[[int | None], ChunkTransaction],
        restart: Callable[[], None],
        unpin: Callable[[], None],
    ) -> None:
        self.session_id = session_id
        self._begin = begin
        self._restart = restart
        self._unpin = unpin
        self._chunk: ChunkTransaction | None = None
        self._held = True

    def begin_chunk(self, num_latent_frames: int | None = None) -> ChunkTransaction:
        """Stage the session's next chunk, of the spec's length unless another, smaller one is given.

        Raises ValueError for a length out of range, ChunkInFlight, WindowFull, FramesLost.
        """
        self._require_held("begin_chunk")
        self._chunk = self._begin(num_latent_frames)
        return self._chunk

    def restart(self) -> None:
        """Free all frames of the session and count from 0 again; cross stores stay. Can't be rolled back.

        For models that restart at their window. Raises KVCacheError while a chunk is open.
        """
        self._require_held("restart")
        if self._chunk is not None and self._chunk.state is ChunkState.OPEN:
            raise KVCacheError(f"can't restart session {self.session_id!r} while its chunk is open")
        self._restart()

    def release(self) -> None:
        """Roll back a chunk that is still open and unpin the session. Does nothing the second time."""
        if not self._held:
            return
        self._held = False
        try:
            if self._chunk is not None and self._chunk.state is ChunkState.OPEN:
                self._chunk.rollback()
        finally:
            self._unpin()

    def _require_held(self, action: str) -> None:
        if not self._held:
            raise KVCacheError(f"{action} on a released lease of session {self.session_id!r}")

    def __enter__(self) -> Self:
        self._require_held("enter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
