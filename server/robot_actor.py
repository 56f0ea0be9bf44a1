"""The asyncio shell around one `RobotSession`: worker calls, and the futures of those who wait for actions.

    submit ─> (open in the worker) ─> Scheduler.run ─> run_tick ─> worker.tick ─> commit ─> actions ─> future
    begin_reset / begin_close ─> a task of the actor's own, one at a time, between ticks

No method awaits the worker in a client's task, so that a lost socket cancels nothing half-way.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Protocol

from server.errors import (
    BadInput,
    CommitMismatch,
    ErrorCode,
    ServerError,
    SessionFailed,
    Unavailable,
    from_worker,
    open_failed,
)
from server.ids import new_seed
from server.logs import about
from server.robot_answers import actions_lost, read_actions, server_timing
from server.robot_arrivals import Arrivals
from server.robot_calls import DROPPED, FAILED, REFUSED, RobotCalls, Submission
from server.robot_history import CallHistory
from server.robot_services import RobotServices
from server.robot_session import Observation, RobotCall, RobotPhase, RobotSession
from server.tasks import TaskSet
from server.ticking import TickGate, run_attempts
from server.worker import CommittedTick
from server.worker_seat import WorkerSeat
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack, WorldModelError
from worldmodel.messages import (
    MediaFormat,
    ResetSession,
    SessionId,
    Tick,
)

EVICTED, REPLACED = "evicted", "replaced"
"""Reasons to end a session whose place is needed, by another connection or by another session of its own."""

log = logging.getLogger(__name__)


class Holder(Protocol):
    """Who speaks for a session: a connection, or the REST interface."""

    @property
    def title(self) -> str:
        """What another client is told it is."""
        ...

    def taken_over(self, actor: RobotActor) -> None:
        """Hear that another connection has taken the session's name."""
        ...


class RobotActor:
    """One robot's session with everything it owns. `name` is the client's own name for it, None if it gave none."""

    def __init__(
        self,
        session: RobotSession,
        *,
        name: str | None,
        owner: str | None,
        holder: Holder,
        idle_s: float | None,
        services: RobotServices,
    ) -> None:
        self.session = session
        self.name = name
        self.owner = owner
        self.holder = holder
        self.idle_s = idle_s
        self.is_standby = False
        """Whether its connection speaks for another session now; such a session gives way when a place is needed."""
        self.created_at = self.active_at = services.clock()
        self.num_steps = 0
        self.history = CallHistory()
        self.arrivals = Arrivals()
        self.close_reason: str | None = None
        """Why it was closed, from the moment that a close begins; also if that fails."""
        self.end_reason: str | None = None
        self._seed = new_seed()
        self._services = services
        self._seat = WorkerSeat(
            services.worker,
            None,
            session_id=session.session_id,
            outputs=(MediaFormat.ACTIONS,),
            new_request_id=session.new_request_id,
            take_place=services.admit,
        )
        self._calls = RobotCalls(services.robot_metrics)
        self._gate = TickGate()
        self._tasks = TaskSet(f"robot session {session.session_id}")
        self._closing: asyncio.Task[None] | None = None
        services.scheduler.add(self)

    # ------------------------------------------------------------ what can be seen

    @property
    def session_id(self) -> SessionId:
        return self.session.session_id

    @property
    def holds_place(self) -> bool:
        """Whether the session holds, or may hold, state in the worker."""
        return self._seat.held

    @property
    def generation(self) -> int | None:
        """Which worker process the session's state is in, None without state."""
        return self._seat.generation if self._seat.held else None

    @property
    def is_closing(self) -> bool:
        return self._closing is not None and not self._closing.done()

    def opens_at(self, now: float) -> float | None:
        return self.session.opens_at(now)

    def deadline(self) -> float:
        return self.session.deadline()

    # ------------------------------------------------------------ calls

    def submit(self, observation: Observation, *, step_id: int | None = None, run: int | None = None) -> Submission:
        """Take a request for actions. A step id known already gives its call again. Raises `ServerError`."""
        now = self.active_at = self._services.clock()
        call = self.session.accept(observation, step_id=step_id, run=run, now=now)
        submission = self._calls.submission(call)
        self._go_on()
        return submission

    def withdraw(self, call: RobotCall) -> None:
        """Stop caring for a call: it is not computed if it has not begun."""
        if self.session.withdraw(call):
            error = BadInput(ErrorCode.SUPERSEDED, "a later request took the place of this one")
            self._calls.reject([call], error, DROPPED)

    def _go_on(self) -> None:
        """Have what waits computed, after opening the session if it isn't."""
        if self.session.needs_opening:
            self._tasks.spawn(self._open())
        else:
            self._services.scheduler.wake()

    # ------------------------------------------------------------ opening

    async def open(self) -> None:
        """Take a place and open in the worker now rather than with the first call. Raises `ServerError`."""
        await asyncio.shield(self._tasks.spawn(self._open(eagerly=True)))

    async def _open(self, *, eagerly: bool = False) -> None:
        async with self._gate.operation():
            if not (self.session.needs_opening or (eagerly and self.session.phase is RobotPhase.EMPTY)):
                return
            self.session.begin_opening()
            try:
                await self._open_in_worker()
            except ServerError as error:
                self._calls.reject(self.session.opening_failed(), error, FAILED)
                if eagerly:
                    raise

    async def _open_in_worker(self) -> None:
        """Take a place, open in the worker. Raises `ServerError`; then the place is free if nothing is left there."""
        seat = self._seat
        if seat.held and not await self._release():
            text = "the worker did not release what an opening before this one left"
            raise SessionFailed(ErrorCode.WORKER_UNAVAILABLE, text)
        try:
            await seat.open(prompt=self.session.first_prompt, seed=self._seed, image=None)
        except WorldModelError as error:
            if isinstance(error, OutcomeUnknown):
                await self._release()
            else:
                seat.give_back()
            raise open_failed(error) from error
        except ServerError:
            raise
        except Exception as error:
            # The boundary of an opening: after a bug nobody waits for ever, and the place is not lost.
            log.exception("robot session %s did not open", self.session_id, extra=about(session_id=self.session_id))
            seat.give_back()
            raise SessionFailed(ErrorCode.INTERNAL, "the server failed to open the session") from error
        seat.state_lost = False
        self.session.opened()
        self._services.scheduler.wake()

    # ------------------------------------------------------------ ticks

    async def run_tick(self) -> None:
        tick = self.session.begin_tick(self._services.clock())
        call = self.session.in_flight
        if tick is None or call is None:
            return
        services = self._services
        with self._gate.tick():
            await run_attempts(
                services.worker,
                services.metrics,
                tick,
                call.observation.payload,
                failed=partial(self._tick_failed, call),
                committed=partial(self._commit, call),
            )

    def tick_broke(self, error: Exception) -> None:
        self._fail(SessionFailed(ErrorCode.TICK_FAILED, "the step failed inside the server"))

    def _tick_failed(self, call: RobotCall, tick: Tick, error: WorldModelError) -> Tick | None:
        """Handle a failed tick and return what to try instead, if anything."""
        if self.session.in_flight is not call:
            return None
        if isinstance(error, TickRolledBack) and error.transient and (retry := self.session.retry_tick()) is not None:
            return retry
        failure = from_worker(error, fallback=ErrorCode.TICK_FAILED, request_id=tick.request_id)
        if isinstance(error, RequestRefused):
            self._calls.reject([self.session.refuse_tick()], failure, REFUSED)
        else:
            self._fail(failure)
        return None

    def _commit(self, call: RobotCall, tick: Tick, answered: CommittedTick) -> None:
        if self.session.in_flight is not call:
            return
        try:
            self.session.commit(answered.committed)
        except CommitMismatch as error:
            log.error("robot session %s: %s", self.session_id, error, extra=about(session_id=self.session_id))
            self._fail(SessionFailed(ErrorCode.TICK_FAILED, "the worker answered another step than it was given"))
            return
        self._services.metrics.chunks.inc()
        self._tasks.spawn(self._finish(call, answered))

    async def _finish(self, call: RobotCall, answered: CommittedTick) -> None:
        """Wait for the actions of a committed chunk and hand them out, unless a reset has left them behind."""
        try:
            media, payload = await answered.media
            actions = read_actions(media, payload)
        except (WorldModelError, ValueError) as error:
            if self.session.in_flight is call:
                log.error(
                    "robot session %s: actions lost: %s",
                    self.session_id,
                    error,
                    extra=about(session_id=self.session_id, request_id=answered.committed.request_id),
                )
                self._fail(actions_lost(error))
            return
        if self.session.in_flight is not call:
            return
        now = self._services.clock()
        timing = server_timing(call, answered.committed, media, now=now)
        self._services.metrics.observe_stages(answered.committed.timings, queue_ms=timing["queue_ms"])
        self.session.answered(actions, timing)
        self.history.note(call)
        self.num_steps += 1
        self.active_at = now
        self._calls.answer(call)
        self._services.scheduler.wake()

    # ------------------------------------------------------------ failure

    def worker_lost(self, reason: str) -> None:
        """Fail at once because the worker process, and with it all state, is gone."""
        self._fail(Unavailable(ErrorCode.WORKER_UNAVAILABLE, reason))
        if self.session.phase is RobotPhase.CLEANUP_FAILED:
            # What could not be released has died with the process.
            self.begin_close("worker lost")

    def _fail(self, error: ServerError) -> None:
        """Note that the worker's state is lost, enter `failed` and tell who waits.

        While a reset or a close is under way they decide: they wait for the tick, find the state lost, and answer.
        """
        self._seat.state_lost = True
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self._seat.give_back()
        if self.session.phase is not RobotPhase.ACTIVE:
            return
        log.warning(
            "robot session %s failed: %s: %s",
            self.session_id,
            error.code,
            error.message,
            extra=about(session_id=self.session_id, request_id=error.request_id),
        )
        self._calls.reject(self.session.fail(error), error, FAILED)
        self._tasks.spawn(self._release_failed())

    async def _release_failed(self) -> None:
        """Free the worker's state of a failed session; what can't be freed now is tried again by reset or close."""
        async with self._gate.operation():
            if self.session.phase is RobotPhase.FAILED:
                await self._release()

    async def _release(self) -> bool:
        """Close in the worker and give the place back. Returns whether nothing of the session is left there."""
        if not await self._seat.close():
            self._seat.state_lost = True
            return False
        self._seat.give_back()
        return True

    # ------------------------------------------------------------ reset and close

    def begin_reset(self) -> asyncio.Task[None]:
        """Drop what waits and begin a new run between two ticks; the task raises `ServerError` if that failed."""
        self.active_at = self._services.clock()
        dropped = self.session.begin_reset()
        self._calls.reject(dropped, BadInput(ErrorCode.SUPERSEDED, "the session was reset"), DROPPED)
        return self._tasks.spawn(self._reset())

    async def _reset(self) -> None:
        async with self._gate.operation():
            if self.session.phase is RobotPhase.FAILED:
                # A reset before this one failed while this one waited: that it was asked for still counts.
                self.session.begin_reset()
            if self.session.phase is not RobotPhase.RESETTING:
                return
            try:
                holds_state = await self._empty()
            except ServerError as error:
                self._reset_failed(error)
                raise
            except Exception as error:
                # The boundary of a reset: a bug must not leave the session between two runs for good.
                log.exception("reset of session %s broke", self.session_id, extra=about(session_id=self.session_id))
                failure = SessionFailed(ErrorCode.RESET_FAILED, "the reset failed inside the server")
                self._reset_failed(failure)
                raise failure from error
            self.session.finish_reset(holds_state=holds_state)
            self._go_on()

    def _reset_failed(self, error: ServerError) -> None:
        self._seat.state_lost = True
        self._calls.reject(self.session.fail(error), error, FAILED)

    async def _empty(self) -> bool:
        """Have the worker forget the run. Returns whether the session keeps its place. Raises `ServerError`."""
        seat = self._seat
        if not seat.held or seat.state_lost:
            if not await self._release():
                raise SessionFailed(ErrorCode.RESET_FAILED, "the worker did not release the failed run")
            return False
        message = ResetSession(request_id=self.session.new_request_id(), session_id=self.session_id, seed=self._seed)
        try:
            await self._services.worker.reset_session(message, None)
        except WorldModelError as error:
            seat.state_lost = True
            await self._release()
            raise from_worker(error, fallback=ErrorCode.RESET_FAILED) from error
        return True

    def begin_close(self, reason: str) -> asyncio.Task[None]:
        """Close for good, between two ticks. Asking again joins the close under way, or tries a failed one again."""
        if self._closing is None or (self._closing.done() and self.session.phase is RobotPhase.CLEANUP_FAILED):
            # Who asks again only has done what was to be done for the first reason.
            self.close_reason = reason = self.close_reason or reason
            self._drop_all(BadInput(ErrorCode.BAD_STATE, f"the session was closed: {reason}"))
            self._seat.leave()
            self._closing = self._tasks.spawn(self._close(reason))
        return self._closing

    def _drop_all(self, error: ServerError) -> None:
        self._calls.reject(self.session.begin_close(), error, DROPPED)

    async def _close(self, reason: str) -> None:
        try:
            async with self._gate.operation():
                cleaned_up = await self._release()
        except Exception:
            # The boundary of a close: after a bug it can be tried again, and the session is not `closing` for ever.
            log.exception(
                "the close of robot session %s broke", self.session_id, extra=about(session_id=self.session_id)
            )
            cleaned_up = False
        self.session.finish_close(cleaned_up=cleaned_up)
        self._services.scheduler.remove(self.session_id)
        if not cleaned_up:
            self._seat.stay()
            self._services.not_released()
            raise SessionFailed(ErrorCode.CLEANUP_FAILED, "the worker did not release the session; close it again")
        self.end_reason = reason
        self._services.metrics.ended.labels(reason).inc()
        self._services.ended(self)

    def say_goodbye(self) -> None:
        """Answer everybody who waits because the server ends. Nothing is asked of the worker any more."""
        self._services.scheduler.remove(self.session_id)
        self._drop_all(Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))

    async def shut_down(self) -> None:
        """Stop everything at once because the server ends."""
        self.say_goodbye()
        self._tasks.cancel()
        await self._tasks.join()
