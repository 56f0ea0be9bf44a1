"""What a session holds in the worker: a place, and model state that may be lost before the place is given back.

    held, state known ──state is lost──> held, state lost ──close──> nothing of it left ──give_back──> not held
           ↑                                    └────────────────begin_run────────────────┐              │
           └──────────────────────────────────────────────────────────────────────────────┴──begin_run───┘

Callers make one call at a time, between ticks; only `leave` may come in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from server.admission import Place
from server.errors import BadInput, ErrorCode, SessionFailed
from server.logs import about
from server.uploads import RawImage
from server.worker import Worker
from worldmodel.errors import WorkerUnavailable, WorldModelError
from worldmodel.messages import (
    CloseSession,
    MediaFormat,
    OpenSession,
    RequestId,
    ResetSession,
    SessionId,
)

log = logging.getLogger(__name__)


class WorkerSeat:
    """One session's place and state in the worker. `state_lost`: nothing can be computed from what is there."""

    def __init__(
        self,
        worker: Worker,
        place: Place | None,
        *,
        session_id: SessionId,
        outputs: tuple[MediaFormat, ...],
        new_request_id: Callable[[], RequestId],
        take_place: Callable[[], Coroutine[Any, Any, Place]],
    ) -> None:
        """With a `place` the session is open in the worker. `take_place` waits for one, or raises `Unavailable`."""
        self.generation = worker.generation
        self.state_lost = False
        self._worker = worker
        self._place = place
        self._is_leaving = False
        self._session_id = session_id
        self._outputs = outputs
        self._new_request_id = new_request_id
        self._take_place = take_place
        self._taking: asyncio.Task[Place] | None = None

    @property
    def held(self) -> bool:
        """Whether the session holds, or may hold, state in the worker."""
        return self._place is not None

    def give_back(self) -> None:
        """Let another session have the place. Again does nothing."""
        place, self._place = self._place, None
        if place is not None:
            place.release()

    async def close(self) -> bool:
        """Close in the worker. Returns whether nothing of the session is left there; a dead worker holds nothing."""
        if self._place is None:
            return True
        message = CloseSession(request_id=self._new_request_id(), session_id=self._session_id)
        try:
            await self._worker.close_session(message)
        except WorkerUnavailable:
            return True
        except WorldModelError as error:
            log.error(
                "session %s: the worker did not close it: %s",
                self._session_id,
                error,
                extra=about(session_id=self._session_id, request_id=message.request_id),
            )
            return False
        return True

    def leave(self) -> None:
        """Promise the place to others, because a close has begun; who waits for one here fails at once."""
        self._is_leaving = True
        if self._taking is not None:
            self._taking.cancel()
        if self._place is not None:
            self._place.promise()

    def stay(self) -> None:
        """Take the promise back, because the close failed."""
        self._is_leaving = False
        if self._place is not None:
            self._place.keep()

    async def _require_place(self) -> None:
        if self._place is None:
            self._place = await self._wait_for_place()
        if self._is_leaving:
            self._place.promise()

    async def _wait_for_place(self) -> Place:
        taking = self._taking = asyncio.get_running_loop().create_task(self._take_place())
        try:
            await asyncio.wait((taking,))
        except asyncio.CancelledError:
            taking.cancel()
            raise
        finally:
            self._taking = None
        if taking.cancelled():
            raise BadInput(ErrorCode.BAD_STATE, "the session was closed while it waited for a place")
        return taking.result()

    async def begin_run(
        self, *, prompt: str, seed: int, image: RawImage | None, load_image: Callable[[], Awaitable[RawImage]]
    ) -> None:
        """Begin a run, from nothing if the state is lost; `image` None keeps the one before, which `load_image` gives.

        Raises `ServerError` or `WorldModelError`; the caller clears `state_lost` once the run counts.
        """
        if self._place is not None and not self.state_lost:
            reset = ResetSession(
                request_id=self._new_request_id(),
                session_id=self._session_id,
                prompt=prompt,
                seed=seed,
                image=None if image is None else image.size,
            )
            await self._worker.reset_session(reset, None if image is None else image.pixels)
            return
        if not await self.close():
            raise SessionFailed(ErrorCode.RESET_FAILED, "the worker did not release the failed run")
        await self._require_place()
        raw = image if image is not None else await load_image()
        await self.open(prompt=prompt, seed=seed, image=raw)

    async def open(self, *, prompt: str, seed: int, image: RawImage | None) -> None:
        """Begin the first run of a session that holds nothing, after waiting for a place.

        Raises `ServerError`, or `WorldModelError` with the place held.
        """
        await self._require_place()
        self.generation = self._worker.generation
        message = OpenSession(
            request_id=self._new_request_id(),
            session_id=self._session_id,
            prompt=prompt,
            seed=seed,
            image=None if image is None else image.size,
            outputs=self._outputs,
        )
        await self._worker.open_session(message, b"" if image is None else image.pixels)
