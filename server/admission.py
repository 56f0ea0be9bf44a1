"""Places in the worker: who has one, who waits for one. Knows no sessions and no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from server.errors import ErrorCode, ServerError, Unavailable

PositionFn = Callable[[int, int], None]
"""Called with (position from 1, number of waiting) whenever either changes."""


class Place:
    """The right to hold state in the worker, until released."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._is_coming = False

    def promise(self) -> None:
        """Note that the place is being freed, so that somebody may wait for it. Again does nothing."""
        self._note_coming(True)

    def keep(self) -> None:
        """Note that a promised place is not freed after all."""
        self._note_coming(False)

    def release(self) -> None:
        """Give the place back; again does nothing."""
        self._note_coming(False)
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.place_released()

    def _note_coming(self, is_coming: bool) -> None:
        if self._admission is not None and is_coming is not self._is_coming:
            self._is_coming = is_coming
            self._admission.num_coming += 1 if is_coming else -1


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """Somebody in the queue. `on_position` None: it was promised a place and is no client that can be told to wait."""

    granted: asyncio.Future[Place] = field(repr=False)
    on_position: PositionFn | None


class Admission:
    """Hand out at most `capacity()` places, first come, first served."""

    def __init__(self, *, capacity: Callable[[], int], max_queued: int) -> None:
        self.num_coming = 0
        """How many places are promised by who holds them."""
        self._capacity = capacity
        self._max_queued = max_queued
        self._num_taken = 0
        self._queue: list[_Waiting] = []

    @property
    def num_taken(self) -> int:
        return self._num_taken

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_unclaimed(self) -> int:
        """How many promised places nobody waits for; below 0, how many wait for whom no place is promised."""
        return self.num_coming - len(self._queue)

    def full(self) -> Unavailable:
        """Make the error for who can't wait."""
        return Unavailable(ErrorCode.CAPACITY, f"all {self._capacity()} places of the worker are taken")

    def try_take(self) -> Place | None:
        """Take a place if one is free and nobody waits for it."""
        if self._queue or self._num_taken >= self._capacity():
            return None
        return self._take()

    async def wait(self, on_position: PositionFn | None, *, limited: bool = True) -> Place:
        """Queue for a place; cancelling leaves the queue. `on_position` None: only while `refuse_unpromised` allows.

        Raises `Unavailable` if the queue is full, unless not `limited` because a place is being freed for the caller.
        """
        if limited and len(self._queue) >= self._max_queued:
            raise Unavailable(
                ErrorCode.CAPACITY,
                f"all {self._capacity()} places are taken and {len(self._queue)} clients are waiting "
                "(session.max_queued)",
            )
        waiting = _Waiting(granted=asyncio.get_running_loop().create_future(), on_position=on_position)
        self._queue.append(waiting)
        self.grant()
        self._tell_positions()
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def grant(self) -> None:
        """Give free places to those who wait; call it when the capacity may have grown."""
        granted = False
        while self._queue and self._num_taken < self._capacity():
            waiting = self._queue.pop(0)
            if not waiting.granted.cancelled():
                waiting.granted.set_result(self._take())
            granted = True
        if granted:
            self._tell_positions()

    def refuse_all(self, error: ServerError) -> None:
        """Send everybody away who waits."""
        queue, self._queue = self._queue, []
        for waiting in queue:
            if not waiting.granted.cancelled():
                waiting.granted.set_exception(error)

    def refuse_unpromised(self) -> None:
        """Send those away who wait without a position and for whom none of the promised places will be.

        While there is no capacity at all they wait for it to come back.
        """
        if not self._capacity():
            return
        hopeless = [waiting for waiting in self._queue[self.num_coming :] if waiting.on_position is None]
        for waiting in hopeless:
            self._queue.remove(waiting)
            if not waiting.granted.cancelled():
                waiting.granted.set_exception(self.full())
        if hopeless:
            self._tell_positions()

    def place_released(self) -> None:
        self._num_taken -= 1
        self.grant()

    def _take(self) -> Place:
        self._num_taken += 1
        return Place(self)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting in self._queue:
            self._queue.remove(waiting)
            self._tell_positions()
        elif waiting.granted.done() and not waiting.granted.cancelled() and waiting.granted.exception() is None:
            waiting.granted.result().release()

    def _tell_positions(self) -> None:
        for index, waiting in enumerate(self._queue):
            if waiting.on_position is not None:
                waiting.on_position(index + 1, len(self._queue))
