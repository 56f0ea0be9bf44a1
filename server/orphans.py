"""Sessions that may be in the worker although nobody owns them: their opening failed, and so did the close after it.

opening: outcome unknown ─> close fails ─> the place is kept ─ close again, later and later ─> place released
                                                            └── the worker process is gone ───┘
"""

from __future__ import annotations

import asyncio
import logging

from server.admission import Place
from server.clock import Clock, wait_until
from server.logs import about
from server.tasks import TaskSet
from server.worker import Worker, WorkerStatus
from worldmodel.errors import WorkerUnavailable, WorldModelError
from worldmodel.messages import CloseSession, RequestId, SessionId

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

log = logging.getLogger(__name__)


class Orphans:
    """Closes such sessions. Each keeps its place until the worker has let go of it."""

    def __init__(self, worker: Worker, tasks: TaskSet, clock: Clock) -> None:
        """`tasks` are cancelled when the server ends; the worker's sessions end with it."""
        self._worker = worker
        self._tasks = tasks
        self._clock = clock
        self._num_left = 0

    def __len__(self) -> int:
        return self._num_left

    async def close(self, session_id: SessionId, place: Place, *, generation: int) -> None:
        """Close a session of a worker process, now or else later, and release its place then."""
        if await self._try_to_close(session_id, 0):
            place.release()
            return
        self._num_left += 1
        self._tasks.spawn(self._close_later(session_id, place, generation))

    async def _close_later(self, session_id: SessionId, place: Place, generation: int) -> None:
        changed = asyncio.Event()
        unsubscribe = self._worker.subscribe(changed.set)
        pause_s, number = FIRST_PAUSE_S, 0
        try:
            while self._is_there(generation):
                changed.clear()
                await wait_until(changed, until=self._clock() + pause_s, clock=self._clock)
                if not self._is_there(generation):
                    break
                number += 1
                if await self._try_to_close(session_id, number):
                    break
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        finally:
            unsubscribe()
            self._num_left -= 1
            place.release()

    def _is_there(self, generation: int) -> bool:
        """Tell whether the process that may hold the session still runs."""
        return self._worker.generation == generation and self._worker.status is WorkerStatus.READY

    async def _try_to_close(self, session_id: SessionId, number: int) -> bool:
        """Close in the worker. Returns whether nothing of the session is left there; a dead worker holds nothing."""
        request_id = RequestId(f"{session_id}-close-{number}")
        try:
            await self._worker.close_session(CloseSession(request_id=request_id, session_id=session_id))
        except WorkerUnavailable:
            return True
        except WorldModelError as error:
            log.error(
                "session %s: the worker could neither open nor close it: %s",
                session_id,
                error,
                extra=about(session_id=session_id, request_id=request_id),
            )
            return False
        return True
