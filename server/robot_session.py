"""One robot's session as a state machine without I/O: no socket, no worker, no clock of its own.

    accept ──> begin_tick ──> commit ──> answered           one call, in this order; calls are treated in theirs
                   │             └─ CommitMismatch ─┐
                   └─ retry_tick / refuse_tick / fail

    empty ──begin_opening──> opening ──opened──> active      nothing is held in the worker before the first call
      ↑                         └──opening_failed──> empty
    active ──fail──> failed                                  calls are refused until a reset
    empty | opening | active | failed ──begin_reset──> resetting ──finish_reset──> active | empty
    any ──begin_close──> closing ──finish_close──> closed | cleanup_failed ──begin_close──> closing

A call may have a step id. Step ids rise within a run; the last answered one may be asked again and gets the same
answer, so that a client that lost an answer can ask again without the model seeing the observation twice. Times are
seconds of the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from server.errors import BadInput, CommitMismatch, ErrorCode, ServerError, SessionFailed, Unavailable
from worldmodel.messages import ArrayPart, RequestId, SessionId, Tick, TickCommitted

MAX_WAITING_CALLS = 4
"""Calls that may wait in one session while another is computed. A client that waits for its answers has none."""

Actions: TypeAlias = npt.NDArray[np.float32]


class RobotPhase(StrEnum):
    """Life of a robot's session."""

    EMPTY = "empty"
    OPENING = "opening"
    ACTIVE = "active"
    FAILED = "failed"
    RESETTING = "resetting"
    CLOSING = "closing"
    CLOSED = "closed"
    CLEANUP_FAILED = "cleanup_failed"


_ACCEPTING = (RobotPhase.EMPTY, RobotPhase.OPENING, RobotPhase.ACTIVE, RobotPhase.RESETTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a robot saw, ready for the worker: `payload` holds the bytes of `arrays`, in order."""

    prompt: str
    arrays: tuple[ArrayPart, ...]
    payload: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotAnswer:
    """Actions, float32 [rows, dims], and where the time went."""

    run: int
    step_id: int | None
    actions: Actions
    server_timing: Mapping[str, float]


@dataclass(slots=True, kw_only=True, eq=False)
class RobotCall:
    """One request for actions. `answer` is there once it is known; `started_at` once it is computed."""

    observation: Observation
    step_id: int | None
    arrived_at: float
    started_at: float | None = None
    answer: RobotAnswer | None = None


class RobotSession:
    """Order of calls, step ids, runs and phases of one session."""

    def __init__(self, *, session_id: SessionId, retry_rolled_back_ticks: int = 0) -> None:
        self.session_id = session_id
        self.phase = RobotPhase.EMPTY
        self.run = 0
        self.next_chunk_index = 0
        self.in_flight: RobotCall | None = None
        self.failure: ServerError | None = None
        self._tick: Tick | None = None
        self._waiting: deque[RobotCall] = deque()
        self._last: RobotCall | None = None
        self._last_step_id: int | None = None
        self._retries_allowed = retry_rolled_back_ticks
        self._retries_left = 0
        self._num_requests = 0

    # ------------------------------------------------------------ what can be seen

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def last_step_id(self) -> int | None:
        """The last step id that was answered in this run."""
        return self._last_step_id

    @property
    def is_busy(self) -> bool:
        """Whether a call waits or is computed."""
        return self.in_flight is not None or bool(self._waiting)

    @property
    def needs_opening(self) -> bool:
        return self.phase is RobotPhase.EMPTY and bool(self._waiting)

    @property
    def first_prompt(self) -> str:
        """The prompt of the call that waits longest."""
        return self._waiting[0].observation.prompt if self._waiting else ""

    def opens_at(self, now: float) -> float | None:
        """Return when the next tick may start: now, or None while there is nothing to compute."""
        is_open = self.phase is RobotPhase.ACTIVE and self.in_flight is None and self._waiting
        return now if is_open else None

    def deadline(self) -> float:
        """Return when the longest-waiting call came, so that among sessions the first come is the first served."""
        return self._waiting[0].arrived_at if self._waiting else float("inf")

    def new_request_id(self) -> RequestId:
        self._num_requests += 1
        return RequestId(f"{self.session_id}-{self._num_requests}")

    # ------------------------------------------------------------ calls

    def accept(self, observation: Observation, *, step_id: int | None, run: int | None, now: float) -> RobotCall:
        """Take a call, or return the one with this step id: waiting, under way, or answered before.

        Raises `BadInput`, `SessionFailed`, or `Unavailable` if too many wait.
        """
        self._require_accepting()
        if run is not None and run != self.run:
            raise BadInput(
                ErrorCode.BAD_STATE, f"the step is for run {run}, and the session is in run {self.run}", field="run"
            )
        known = None if step_id is None else self._known(step_id)
        if known is not None:
            return known
        if len(self._waiting) >= MAX_WAITING_CALLS:
            raise Unavailable(ErrorCode.QUEUE_FULL, f"{MAX_WAITING_CALLS} steps of this session are waiting")
        call = RobotCall(observation=observation, step_id=step_id, arrived_at=now)
        self._waiting.append(call)
        return call

    def _require_accepting(self) -> None:
        if self.phase in _ACCEPTING:
            return
        if self.phase is RobotPhase.FAILED:
            reason = "" if self.failure is None else f": {self.failure.message}"
            raise SessionFailed(ErrorCode.BAD_STATE, f"the session failed{reason}; reset it to go on")
        raise BadInput(ErrorCode.BAD_STATE, f"the session is {self.phase}")

    def _known(self, step_id: int) -> RobotCall | None:
        """Return the call with this step id, None if the id is new. Raises `BadInput` for one that is over."""
        for call in (self._last, self.in_flight, *self._waiting):
            if call is not None and call.step_id == step_id:
                return call
        newest = max((call.step_id for call in self._waiting if call.step_id is not None), default=None)
        if newest is None and self.in_flight is not None:
            newest = self.in_flight.step_id
        if newest is None:
            newest = self._last_step_id
        if newest is not None and step_id <= newest:
            raise BadInput(
                ErrorCode.STALE, f"step_id {step_id} after {newest}: step ids rise within a run", field="step_id"
            )
        return None

    def withdraw(self, call: RobotCall) -> bool:
        """Forget a call that nobody waits for any more. Returns whether the model will never see it."""
        if call not in self._waiting:
            return False
        self._waiting.remove(call)
        return True

    # ------------------------------------------------------------ opening

    def begin_opening(self) -> None:
        assert self.phase is RobotPhase.EMPTY, self.phase
        self.phase = RobotPhase.OPENING

    def opened(self) -> None:
        """Note that the worker has the session, unless a reset or a close came meanwhile."""
        if self.phase is RobotPhase.OPENING:
            self._begin_run(RobotPhase.ACTIVE)

    def opening_failed(self) -> list[RobotCall]:
        """Note that the worker has nothing of the session; returns the calls that wait in vain."""
        if self.phase is not RobotPhase.OPENING:
            return []
        self.phase = RobotPhase.EMPTY
        return self._drop_waiting()

    # ------------------------------------------------------------ ticks

    def begin_tick(self, now: float) -> Tick | None:
        """Begin to compute the next call, None if there is none."""
        if self.opens_at(now) is None:
            return None
        call = self._waiting.popleft()
        call.started_at = now
        self.in_flight = call
        self._retries_left = self._retries_allowed
        self._tick = Tick(
            request_id=self.new_request_id(),
            session_id=self.session_id,
            chunk_index=self.next_chunk_index,
            prompt=call.observation.prompt,
            arrays=call.observation.arrays,
        )
        return self._tick

    def retry_tick(self) -> Tick | None:
        """Return the tick in flight under a new request id, None if it may not be tried again."""
        if self._tick is None or not self._retries_left:
            return None
        self._retries_left -= 1
        self._tick = replace(self._tick, request_id=self.new_request_id())
        return self._tick

    def commit(self, committed: TickCommitted) -> None:
        """Note that the chunk in flight is part of the session. Raises `CommitMismatch`; then nothing has changed."""
        tick = self._tick
        assert tick is not None
        expected = (tick.request_id, tick.session_id, tick.chunk_index, ())
        answer = (committed.request_id, committed.session_id, committed.chunk_index, committed.applied_event_ids)
        if answer != expected:
            raise CommitMismatch(f"expected {expected}, the worker committed {answer}")
        self.next_chunk_index += 1
        self._tick = None

    def answered(self, actions: Actions, server_timing: Mapping[str, float]) -> RobotCall:
        """Complete the call in flight; its answer is kept until the next one."""
        call = self.in_flight
        assert call is not None
        call.answer = RobotAnswer(run=self.run, step_id=call.step_id, actions=actions, server_timing=server_timing)
        # The pictures are the worker's by now; only the answer is still of use.
        call.observation = replace(call.observation, payload=())
        self.in_flight = None
        self._last = call
        if call.step_id is not None:
            self._last_step_id = call.step_id
        return call

    def refuse_tick(self) -> RobotCall:
        """Go on without the call in flight, of which nothing was done; its step id may be used again."""
        call, self.in_flight, self._tick = self.in_flight, None, None
        assert call is not None
        return call

    # ------------------------------------------------------------ failure, reset, close

    def fail(self, error: ServerError) -> list[RobotCall]:
        """Refuse calls until a reset; returns those that get no answer."""
        dropped = self._drop_all()
        if self.phase in (RobotPhase.OPENING, RobotPhase.ACTIVE, RobotPhase.RESETTING):
            self.phase = RobotPhase.FAILED
            self.failure = error
        return dropped

    def begin_reset(self) -> list[RobotCall]:
        """Leave the run behind; returns the calls that get no answer. Raises `BadInput`."""
        if self.phase in (RobotPhase.CLOSING, RobotPhase.CLOSED, RobotPhase.CLEANUP_FAILED):
            raise BadInput(ErrorCode.BAD_STATE, f"the session is {self.phase}")
        self.phase = RobotPhase.RESETTING
        return self._drop_all()

    def finish_reset(self, *, holds_state: bool) -> None:
        """Begin the next run; `holds_state`: the worker has the session, emptied."""
        if self.phase is RobotPhase.RESETTING:
            self.run += 1
            self._begin_run(RobotPhase.ACTIVE if holds_state else RobotPhase.EMPTY)

    def begin_close(self) -> list[RobotCall]:
        """Close for good; returns the calls that get no answer."""
        if self.phase is not RobotPhase.CLOSED:
            self.phase = RobotPhase.CLOSING
        return self._drop_all()

    def finish_close(self, *, cleaned_up: bool) -> None:
        self.phase = RobotPhase.CLOSED if cleaned_up else RobotPhase.CLEANUP_FAILED

    def _begin_run(self, phase: RobotPhase) -> None:
        self.phase = phase
        self.failure = None
        self.next_chunk_index = 0
        self._last = None
        self._last_step_id = None

    def _drop_waiting(self) -> list[RobotCall]:
        dropped = list(self._waiting)
        self._waiting.clear()
        return dropped

    def _drop_all(self) -> list[RobotCall]:
        dropped = [] if self.in_flight is None else [self.in_flight]
        self.in_flight = self._tick = None
        return dropped + self._drop_waiting()
