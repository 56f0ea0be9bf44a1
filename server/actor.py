"""The asyncio shell around one `Session`: worker calls, and the sockets that listen to it.

    Scheduler.run ─> run_tick ─> worker.tick ─> commit ─> ChunkEncoder ─> Outlet.send_chunk ─> chunk_sent
    client task   ─> begin_reset / begin_close ─> a task of the actor's own, one at a time, between ticks

No method awaits the worker in a client's task, so that a lost socket cancels nothing half-way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from server.admission import Place
from server.audience import Audience, Listener
from server.chunks import CommittedChunk
from server.clock import Clock
from server.encoding import ChunkEncoder, EncodingDone, EncodingServices
from server.errors import (
    BadInput,
    CloseCode,
    CommitMismatch,
    ErrorCode,
    ServerError,
    SessionFailed,
    Unavailable,
    from_worker,
)
from server.ids import ResumeToken, WatchToken
from server.logs import about
from server.media.formats import EncodedChunk, EpochMuxer, StreamEncoder
from server.metrics import Metrics
from server.recorder import SessionRecorder
from server.scheduler import Scheduler
from server.session import Phase, Session
from server.tasks import TaskSet
from server.ticking import TickGate, run_attempts
from server.uploads import RawImage
from server.wire.messages import (
    DropReason,
    SessionClosedMessage,
    SessionState,
    SessionStateMessage,
    StreamFormat,
)
from server.worker import CommittedTick, Worker
from server.worker_seat import WorkerSeat
from worldmodel.errors import RequestRefused, TickRolledBack, WorkerUnavailable, WorldModelError
from worldmodel.messages import (
    ControlEvent,
    ModelInfo,
    SessionId,
    Tick,
)

log = logging.getLogger(__name__)


class Outlet(Listener, Protocol):
    """The owner's socket in one epoch, as a session sees it."""

    def open_epoch(self, actor: SessionActor, epoch: int, muxer: EpochMuxer) -> None:
        """Send `session.started` and the init segment."""
        ...


class Spectator(Listener, Protocol):
    """A socket that only watches, as a session sees it."""

    def open_watch(self, actor: SessionActor, muxer: EpochMuxer) -> None:
        """Send `session.watching` and the init segment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorServices:
    """What all sessions share. `take_place` waits for one, or raises `Unavailable`; `load_image` blocks."""

    worker: Worker
    scheduler: Scheduler
    encode_pool: Executor
    clock: Clock
    metrics: Metrics
    max_missed_messages: int
    max_watchers: int
    take_place: Callable[[], Coroutine[Any, Any, Place]]
    load_image: Callable[[bytes], RawImage]
    ended: Callable[[SessionActor], None]
    not_released: Callable[[], None]
    parked_again: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a client wants to go on; `run` None means the run it was last sent."""

    last_chunk_index: int
    run: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartImage:
    """A start image as a file, decoded, and the SHA-256 of the file."""

    file: bytes
    raw: RawImage
    sha256: str


class SessionActor:
    """One session with everything it owns: encoder, place in the worker, image, tasks."""

    def __init__(
        self,
        *,
        session: Session[EncodedChunk],
        encoder: StreamEncoder,
        place: Place,
        info: ModelInfo,
        format: StreamFormat,
        image_file: bytes,
        resume_token: ResumeToken,
        watch_token: WatchToken,
        owner: str | None,
        recorder: SessionRecorder | None,
        services: ActorServices,
    ) -> None:
        self.session = session
        self.info = info
        self.format = format
        self.resume_token = resume_token
        self.watch_token = watch_token
        self.owner = owner
        self.created_at = services.clock()
        self.active_at = self.created_at
        self.parked_at: float | None = self.created_at
        self.end_reason: str | None = None
        self.lost_reason: str | None = None
        """Why the world is gone, if it went with its worker process and no reset has begun another one."""
        self._recorder = recorder
        self._services = services
        self._encoder = ChunkEncoder(
            encoder,
            EncodingServices(pool=services.encode_pool, clock=services.clock, metrics=services.metrics),
            on_ready=self._chunk_ready,
            on_lost=self._media_lost,
        )
        self._seat = WorkerSeat(
            services.worker,
            place,
            session_id=session.session_id,
            outputs=encoder.outputs,
            new_request_id=session.new_request_id,
            take_place=services.take_place,
        )
        self._image_file = image_file
        self._audience = Audience(
            services.metrics,
            max_missed_messages=services.max_missed_messages,
            max_watchers=services.max_watchers,
        )
        self._gate = TickGate()
        self._tasks = TaskSet(f"session {session.session_id}")
        self._encode_task = self._tasks.spawn(self._encoder.run())
        self._closing: asyncio.Task[None] | None = None
        services.scheduler.add(self)

    # ------------------------------------------------------------ what can be seen

    @property
    def session_id(self) -> SessionId:
        return self.session.session_id

    @property
    def mime(self) -> str | None:
        return self._encoder.mime

    @property
    def num_watchers(self) -> int:
        return self._audience.num_watchers

    @property
    def recording(self) -> bool:
        """Whether what happens now is being recorded."""
        return self._recorder is not None and self._recorder.active

    @property
    def holds_place(self) -> bool:
        """Whether the session holds, or may hold, state in the worker."""
        return self._seat.held

    @property
    def generation(self) -> int:
        """Which worker process the session's state is, or was, in."""
        return self._seat.generation

    def opens_at(self, now: float) -> float | None:
        return self.session.opens_at(now)

    def deadline(self) -> float:
        return self.session.deadline()

    # ------------------------------------------------------------ sockets

    def attach(self, outlet: Outlet, resume: ResumePoint | None = None) -> int:
        """Connect a socket, send it what it needs, and return its epoch. An older socket is told and closed.

        Raises `BadInput` if `resume` names what was never made; then nothing has changed.
        """
        session = self.session
        resend = None
        if resume is not None:
            resend = session.resume(
                last_chunk_index=resume.last_chunk_index, run=resume.run, now=self._services.clock()
            )
        self._take_over()
        state = session.state
        epoch = session.connect()
        self._audience.owner = outlet
        self.parked_at = None
        outlet.open_epoch(self, epoch, self._encoder.new_epoch())
        if session.state is not SessionState.ACTIVE:
            outlet.send(self._state_message())
        if session.state is not state:
            self._audience.send_state_to_watchers(self._state_message())
        self._audience.send_missed()
        if resend is not None:
            if resend.num_lost_chunks:
                self._audience.send_error(_gap_error(resend.num_lost_chunks))
            for ready in resend.chunks:
                outlet.send_chunk(ready)
        self._services.scheduler.wake()
        return epoch

    def detach(self, epoch: int) -> bool:
        """Note that the socket of an epoch is gone. Returns whether the session is parked by that."""
        state = self.session.state
        if not self.session.disconnect(epoch):
            return False
        self._audience.owner = None
        self.parked_at = self._services.clock()
        if self.session.state is not state:
            self._audience.send_state_to_watchers(self._state_message())
        return True

    def _take_over(self) -> None:
        audience = self._audience
        if audience.owner is not None:
            audience.send_error(ServerError(ErrorCode.TAKEN_OVER, "another socket took this session over"))
            audience.close_owner(CloseCode.POLICY, "taken over", discard=True)
            audience.owner = None

    def watch(self, spectator: Spectator) -> None:
        """Let a spectator see what comes from now on. Raises `ServerError`; then nothing has changed."""
        if self.session.phase in (Phase.CLOSING, Phase.CLOSED, Phase.CLEANUP_FAILED):
            raise BadInput(ErrorCode.BAD_STATE, f"nobody can join while the session is {self.session.phase}")
        self._audience.require_room()
        spectator.open_watch(self, self._encoder.new_epoch())
        self._audience.add_watcher(spectator)

    def unwatch(self, spectator: Spectator) -> None:
        """Forget a spectator whose socket is gone."""
        self._audience.remove_watcher(spectator)

    def chunk_sent(self, epoch: int, chunk: CommittedChunk) -> None:
        self.session.chunk_sent(epoch=epoch, run=chunk.run, chunk_index=chunk.chunk_index)
        self._services.scheduler.wake()

    # ------------------------------------------------------------ what clients ask for

    def touch(self) -> None:
        """Note that the client did something."""
        self.active_at = self._services.clock()

    def changed(self) -> None:
        """Look again whether a tick may start; call it after changing `session`."""
        self._services.scheduler.wake()

    def set_paused(self, paused: bool) -> None:
        """Pause or go on. Who asked is answered, also where nothing changes."""
        if self.session.pause() if paused else self.session.unpause():
            self._audience.send_state(self._state_message())
            self.changed()
        else:
            self._audience.send(self._state_message())

    def begin_reset(self, *, prompt: str, seed: int | None, image: StartImage | None) -> asyncio.Task[None]:
        """Drop queued events and begin a new run between two ticks; the task raises `ServerError` if that failed."""
        dropped = self.session.begin_reset()
        self._audience.send_dropped(dropped, DropReason.RESET)
        self._audience.send_state(self._state_message())
        seed = self.session.seed if seed is None else seed
        return self._tasks.spawn(self._reset(prompt=prompt, seed=seed, image=image))

    def begin_close(self, reason: str) -> asyncio.Task[None]:
        """Close for good, between two ticks. Asking again joins the close under way, or tries a failed one again."""
        if self._closing is None or (self._closing.done() and self.session.phase is Phase.CLEANUP_FAILED):
            self._audience.send_dropped(self.session.begin_close(), DropReason.CLOSED)
            self._audience.send_state(self._state_message())
            self._seat.leave()
            self._closing = self._tasks.spawn(self._close(reason))
        return self._closing

    # ------------------------------------------------------------ ticks

    async def run_tick(self) -> None:
        tick = self.session.begin_tick(self._services.clock())
        if tick is None:
            return
        services = self._services
        with self._gate.tick():
            await run_attempts(
                services.worker, services.metrics, tick, failed=self._tick_failed, committed=self._commit
            )

    def tick_broke(self, error: Exception) -> None:
        self._fail(SessionFailed(ErrorCode.TICK_FAILED, "the tick failed inside the server"))

    def _tick_failed(self, tick: Tick, error: WorldModelError) -> Tick | None:
        """Handle a failed tick and return what to try instead, if anything."""
        session = self.session
        if session.in_flight is not tick:
            return None
        if isinstance(error, TickRolledBack) and error.transient and (retry := session.retry_tick()) is not None:
            return retry
        failure = from_worker(error, fallback=ErrorCode.TICK_FAILED, request_id=tick.request_id)
        if isinstance(error, RequestRefused) and tick.events:
            self._refuse_events(tick.events, failure)
        else:
            self._fail(failure)
        return None

    def _refuse_events(self, events: tuple[ControlEvent, ...], failure: ServerError) -> None:
        """Go on without the events that the model refused; nothing of them was done."""
        self._audience.send_error(failure)
        dropped = self.session.refuse_tick()
        log.info(
            "session %s: the model refused events: %s",
            self.session_id,
            failure.message,
            extra=about(session_id=self.session_id, request_id=failure.request_id, event_ids=dropped),
        )
        self._audience.send_dropped(dropped, DropReason.FAILED)

    def _commit(self, tick: Tick, answered: CommittedTick) -> None:
        if self.session.in_flight is not tick:
            return
        try:
            chunk = self.session.commit(answered.committed)
        except CommitMismatch as error:
            log.error(
                "session %s: %s",
                self.session_id,
                error,
                extra=about(session_id=self.session_id, request_id=tick.request_id, event_ids=tick.event_ids),
            )
            self._fail(
                SessionFailed(
                    ErrorCode.TICK_FAILED,
                    "the worker answered another tick than it was given",
                    request_id=tick.request_id,
                )
            )
            return
        self._observe(chunk)
        if self._recorder is not None:
            self._recorder.committed(tick, chunk)
        self._encoder.put(chunk, answered)

    def _observe(self, chunk: CommittedChunk) -> None:
        metrics = self._services.metrics
        metrics.chunks.inc()
        metrics.observe_stages(chunk.timings, queue_ms=chunk.queue_ms)
        metrics.media_frames.inc(chunk.num_media_frames)
        for receipt in chunk.applied:
            metrics.event_wait_s.observe(receipt.wait_ms / 1000)

    # ------------------------------------------------------------ media

    def _chunk_ready(self, done: EncodingDone) -> None:
        self._services.metrics.events.labels("applied").inc(len(self.session.answer_events(done.chunk)))
        ready = self.session.chunk_ready(
            done.chunk,
            done.encoded,
            transfer_ms=done.transfer_ms,
            encode_ms=done.encode_ms,
            now=self._services.clock(),
        )
        self._audience.send_chunk(ready)
        if self._recorder is not None:
            self._recorder.encoded(done.encoded)
        self._services.scheduler.wake()

    def _media_lost(self, chunk: CommittedChunk, error: Exception) -> None:
        """Fail the session, unless a reset has left the chunk's run behind already, and answer the chunk's events.

        They acted in the world, but no header says so: for the client they are dropped with the pictures.
        """
        reason = DropReason.RESET
        if chunk.run == self.session.run:
            reason = DropReason.FAILED
            self._fail(self._loss_of(chunk, error))
        self._audience.send_dropped(self.session.answer_events(chunk), reason)

    def _loss_of(self, chunk: CommittedChunk, error: Exception) -> ServerError:
        """Return what the client is told; anything but the worker's death goes to the log with its traceback."""
        if isinstance(error, WorkerUnavailable):
            return from_worker(error, fallback=ErrorCode.MEDIA_FAILED, request_id=chunk.request_id)
        log.error(
            "session %s: media of chunk %d lost",
            self.session_id,
            chunk.chunk_index,
            exc_info=error,
            extra=about(session_id=self.session_id, request_id=chunk.request_id),
        )
        text = f"the pictures of chunk {chunk.chunk_index} were lost"
        return SessionFailed(ErrorCode.MEDIA_FAILED, text, request_id=chunk.request_id)

    # ------------------------------------------------------------ failure

    def worker_lost(self, reason: str) -> None:
        """Fail at once because the worker process, and with it all state, is gone."""
        self._fail(Unavailable(ErrorCode.WORKER_UNAVAILABLE, reason))
        if self.session.phase is Phase.CLEANUP_FAILED:
            # What could not be released has died with the process.
            self.begin_close("worker lost")

    def _fail(self, error: ServerError) -> None:
        """Note that the worker's state is lost, enter `failed` and tell the client.

        While a reset or a close is under way they decide: they wait for the tick, find the state lost, and answer.
        """
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self._seat.give_back()
        self._seat.state_lost = True
        match self.session.phase:
            case Phase.ACTIVE:
                self._enter_failed(error)
            case Phase.RESETTING | Phase.CLOSING:
                self._audience.send_dropped(self.session.abandon_tick(), DropReason.FAILED)
            case Phase.FAILED | Phase.CLOSED | Phase.CLEANUP_FAILED:
                pass

    def _enter_failed(self, error: ServerError) -> None:
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self.lost_reason = error.message
        self._audience.send_error(error)
        dropped = self.session.fail()
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            # The socket is closed below: what is still being encoded will not reach it.
            dropped = self.session.answer_all_events() + dropped
        log.warning(
            "session %s failed: %s: %s",
            self.session_id,
            error.code,
            error.message,
            extra=about(session_id=self.session_id, request_id=error.request_id, event_ids=dropped),
        )
        self._audience.send_dropped(dropped, DropReason.FAILED)
        self._audience.send_state(self._state_message(error.code))
        if error.code is not ErrorCode.WORKER_UNAVAILABLE:
            self._tasks.spawn(self._release())
        else:
            self._audience.close_owner(CloseCode.RESTART, "the worker restarts")

    async def _release(self) -> None:
        """Free the worker's state of a failed session; what can't be freed now is tried again by reset or close."""
        async with self._gate.operation():
            if self.session.phase is not Phase.FAILED:
                return
            if await self._seat.close():
                self._seat.give_back()
            else:
                self._can_make_room()

    # ------------------------------------------------------------ reset and close

    async def _reset(self, *, prompt: str, seed: int, image: StartImage | None) -> None:
        async with self._gate.operation():
            if self.session.phase is not Phase.RESETTING:
                return
            try:
                await self._seat.begin_run(
                    prompt=prompt,
                    seed=seed,
                    image=None if image is None else image.raw,
                    load_image=self._load_image,
                )
            except (WorldModelError, ServerError) as error:
                self._reset_failed(error)
            except Exception:
                # The boundary of a reset: a bug must not leave the session between two runs for good.
                log.exception("reset of session %s broke", self.session_id, extra=about(session_id=self.session_id))
                self._reset_failed(SessionFailed(ErrorCode.RESET_FAILED, "the reset failed inside the server"))
            else:
                self._reset_done(prompt=prompt, seed=seed, image=image)

    async def _load_image(self) -> RawImage:
        return await asyncio.to_thread(self._services.load_image, self._image_file)

    def _reset_done(self, *, prompt: str, seed: int, image: StartImage | None) -> None:
        if self.session.phase is not Phase.RESETTING:
            return
        if image is not None:
            self._image_file = image.file
        self._seat.state_lost = False
        self.lost_reason = None
        self.session.finish_reset(prompt=prompt, seed=seed)
        if self._recorder is not None:
            self._recorder.reset(run=self.session.run, prompt=prompt, seed=seed, image=image)
        self._audience.send_state(self._state_message())
        self._services.scheduler.wake()
        self._can_make_room()

    def _can_make_room(self) -> None:
        """Let a session that lost its socket meanwhile be given up for another; during a reset it could not be."""
        if self.parked_at is not None and self._seat.held:
            self._services.parked_again()

    def _reset_failed(self, error: WorldModelError | ServerError) -> None:
        if isinstance(error, WorldModelError):
            error = from_worker(error, fallback=ErrorCode.RESET_FAILED)
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self._seat.give_back()
        self._seat.state_lost = True
        if self.session.phase is Phase.RESETTING:
            self._enter_failed(error)
        raise error

    async def _close(self, reason: str) -> None:
        try:
            cleaned_up = await self._let_go()
        except Exception:
            # The boundary of a close: after a bug it can be tried again, and the session is not `closing` for ever.
            log.exception("the close of session %s broke", self.session_id, extra=about(session_id=self.session_id))
            cleaned_up = False
        self.session.finish_close(cleaned_up=cleaned_up)
        self._services.scheduler.remove(self.session_id)
        if not cleaned_up:
            self._seat.stay()
            error = SessionFailed(ErrorCode.CLEANUP_FAILED, "the worker did not release the session; close it again")
            self._audience.send_state(self._state_message())
            self._audience.send_error(error)
            self._services.not_released()
            raise error
        self.end_reason = reason
        self._services.metrics.ended.labels(reason).inc()
        closed = SessionClosedMessage(session_id=self.session_id, reason=reason)
        self._audience.end(CloseCode.DONE, last_words=closed, reason=reason, discard=False)
        try:
            await self._free()
        finally:
            self._services.ended(self)

    async def _let_go(self) -> bool:
        """Free the worker's state, the place, and finish what was made. Returns whether the worker let go.

        May be called again after it failed or raised: what is done already is not done twice.
        """
        async with self._gate.operation():
            if not await self._seat.close():
                await self._encoder.drain()
                return False
            self._seat.give_back()
        await self._encoder.drain()
        if self._recorder is not None:
            await self._recorder.close()
        return True

    async def _free(self) -> None:
        """Let go of what is large now; the rest is garbage in cycles, which is found later."""
        self._image_file = b""
        self._encode_task.cancel()
        await self._encoder.close_in_pool()

    def say_goodbye(self) -> None:
        """End the session because the server ends: answer every event and close the sockets. Again does nothing.

        Nothing is asked of the worker, which is stopped by its owner.
        """
        self._services.scheduler.remove(self.session_id)
        if self._audience.is_empty:
            return
        self._audience.send_error(Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
        self._audience.send_dropped(self.session.abandon_tick() + self.session.begin_close(), DropReason.CLOSED)
        closed = SessionClosedMessage(session_id=self.session_id, reason=ErrorCode.SHUTTING_DOWN)
        self._audience.end(CloseCode.RESTART, last_words=closed, reason="shutting down", discard=True)

    async def shut_down(self) -> None:
        """Stop everything at once because the server ends."""
        self.say_goodbye()
        self._tasks.cancel()
        await self._tasks.join()
        if self._recorder is not None:
            await self._recorder.close()
        self._encoder.close()

    def _state_message(self, reason: str | None = None) -> SessionStateMessage:
        session = self.session
        return SessionStateMessage(
            session_id=self.session_id, state=session.state, epoch=session.epoch, run=session.run, reason=reason
        )


def _gap_error(num_chunks: int) -> ServerError:
    text = f"{num_chunks} chunks after the last one received are no longer kept; the stream goes on behind them"
    return ServerError(ErrorCode.RESUME_GAP, text)
