"""How a session fails, begins anew, and ends: what is done with its state in the worker between two ticks.

fail ─> _release                          the worker's state and the place are free, the client may reset or close
begin_reset, begin_close ─> a task each   one at a time, in no client's task: a lost socket cancels nothing half-way
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from server.actor_services import ActorServices
from server.audience import Audience, state_message
from server.encoding import ChunkEncoder
from server.errors import CloseCode, ErrorCode, ServerError, SessionFailed, Unavailable, from_worker
from server.logs import about
from server.media.formats import EncodedChunk
from server.recorder import SessionRecorder
from server.recording import FLUSH_TIMEOUT_S
from server.session import Phase, Session
from server.tasks import TaskSet
from server.ticking import TickGate
from server.uploads import RawImage, StartImage
from server.wire.messages import DropReason, SessionClosedMessage
from server.worker_seat import WorkerSeat
from worldmodel.errors import WorldModelError

log = logging.getLogger(__name__)


class SessionLife:
    """The life of one session. `image_file` begins its runs until a reset brings another."""

    def __init__(
        self,
        session: Session[EncodedChunk],
        *,
        seat: WorkerSeat,
        gate: TickGate,
        audience: Audience,
        encoder: ChunkEncoder,
        recorder: SessionRecorder | None,
        image_file: bytes,
        services: ActorServices,
        on_ended: Callable[[], None],
    ) -> None:
        self.end_reason: str | None = None
        """Why the session ends or has ended, None before."""
        self.lost_reason: str | None = None
        """Why the world is gone, if it went with its worker process and no reset has begun another one."""
        self._session = session
        self._seat = seat
        self._gate = gate
        self._audience = audience
        self._encoder = encoder
        self._recorder = recorder
        self._image_file = image_file
        self._services = services
        self._on_ended = on_ended
        self._tasks = TaskSet(f"session {session.session_id}")
        self._encode_task = self._tasks.spawn(encoder.run())
        self._closing: asyncio.Task[None] | None = None

    def begin_reset(self, *, prompt: str, seed: int | None, image: StartImage | None) -> asyncio.Task[None]:
        """Drop queued events and begin a new run between two ticks; the task raises `ServerError` if that failed."""
        dropped = self._session.begin_reset()
        self._audience.send_dropped(dropped, DropReason.RESET)
        self._audience.send_state(state_message(self._session))
        seed = self._session.seed if seed is None else seed
        return self._tasks.spawn(self._reset(prompt=prompt, seed=seed, image=image))

    def begin_close(self, reason: str) -> asyncio.Task[None]:
        """Close for good, between two ticks. Asking again joins the close under way, or tries a failed one again."""
        if self._closing is None or (self._closing.done() and self._session.phase is Phase.CLEANUP_FAILED):
            self.end_reason = reason
            self._audience.send_dropped(self._session.begin_close(), DropReason.CLOSED)
            self._audience.send_state(state_message(self._session))
            self._seat.leave()
            self._closing = self._tasks.spawn(self._close(reason))
        return self._closing

    # ------------------------------------------------------------ failure

    def worker_lost(self, reason: str) -> None:
        """Fail at once because the worker process, and with it all state, is gone."""
        self.fail(Unavailable(ErrorCode.WORKER_UNAVAILABLE, reason))
        if self._session.phase is Phase.CLEANUP_FAILED:
            # What could not be released has died with the process.
            self.begin_close("worker lost")

    def fail(self, error: ServerError) -> None:
        """Note that the worker's state is lost, enter `failed` and tell the client.

        While a reset or a close is under way they decide: they wait for the tick, find the state lost, and answer.
        """
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self._seat.give_back()
        self._seat.state_lost = True
        match self._session.phase:
            case Phase.ACTIVE:
                self._enter_failed(error)
            case Phase.RESETTING | Phase.CLOSING:
                self._audience.send_dropped(self._session.abandon_tick(), DropReason.FAILED)
            case Phase.FAILED | Phase.CLOSED | Phase.CLEANUP_FAILED:
                pass

    def _enter_failed(self, error: ServerError) -> None:
        close_code = error.kind.close_code
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self.lost_reason = error.message
        if close_code is None:
            self._audience.send_error(error)
        dropped = self._session.fail()
        if close_code is not None:
            # The socket is closed below: what is still being encoded will not reach it.
            dropped = self._session.answer_all_events() + dropped
        log.warning(
            "session %s failed: %s: %s",
            self._session.session_id,
            error.code,
            error.message,
            extra=about(session_id=self._session.session_id, request_id=error.request_id, event_ids=dropped),
        )
        self._audience.send_dropped(dropped, DropReason.FAILED)
        self._audience.send_state(state_message(self._session, error.code))
        if error.code is not ErrorCode.WORKER_UNAVAILABLE:
            self._tasks.spawn(self._release())
        if close_code is not None:
            # A fatal error is the last message of its socket.
            self._audience.send_error(error)
            self._audience.close_owner(close_code, error.code)

    async def _release(self) -> None:
        """Free the worker's state of a failed session; what can't be freed now is tried again by reset or close."""
        async with self._gate.operation():
            if self._session.phase is not Phase.FAILED:
                return
            if await self._seat.close():
                self._seat.give_back()
            else:
                self._can_make_room()

    # ------------------------------------------------------------ reset

    async def _reset(self, *, prompt: str, seed: int, image: StartImage | None) -> None:
        async with self._gate.operation():
            if self._session.phase is not Phase.RESETTING:
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
                log.exception(
                    "reset of session %s broke",
                    self._session.session_id,
                    extra=about(session_id=self._session.session_id),
                )
                self._reset_failed(SessionFailed(ErrorCode.RESET_FAILED, "the reset failed inside the server"))
            else:
                self._reset_done(prompt=prompt, seed=seed, image=image)

    async def _load_image(self) -> RawImage:
        return await asyncio.to_thread(self._services.load_image, self._image_file)

    def _reset_done(self, *, prompt: str, seed: int, image: StartImage | None) -> None:
        if self._session.phase is not Phase.RESETTING:
            return
        if image is not None:
            self._image_file = image.file
            self._session.start_image = image.name
        self._seat.state_lost = False
        self.lost_reason = None
        self._session.finish_reset(prompt=prompt, seed=seed)
        if self._recorder is not None:
            self._recorder.reset(run=self._session.run, prompt=prompt, seed=seed, image=image)
        self._audience.send_state(state_message(self._session))
        self._services.scheduler.wake()
        self._can_make_room()

    def _can_make_room(self) -> None:
        """Let a session that lost its socket meanwhile be given up for another; during a reset it could not be."""
        if not self._session.connected and self._seat.held:
            self._services.parked_again()

    def _reset_failed(self, error: WorldModelError | ServerError) -> None:
        if isinstance(error, WorldModelError):
            error = from_worker(error, fallback=ErrorCode.RESET_FAILED)
        if error.code is ErrorCode.WORKER_UNAVAILABLE:
            self._seat.give_back()
        self._seat.state_lost = True
        if self._session.phase is Phase.RESETTING:
            self._enter_failed(error)
        raise error

    # ------------------------------------------------------------ close

    async def _close(self, reason: str) -> None:
        try:
            cleaned_up = await self._let_go()
        except Exception:
            # The boundary of a close: after a bug it can be tried again, and the session is not `closing` for ever.
            log.exception(
                "the close of session %s broke",
                self._session.session_id,
                extra=about(session_id=self._session.session_id),
            )
            cleaned_up = False
        self._session.finish_close(cleaned_up=cleaned_up)
        self._services.scheduler.remove(self._session.session_id)
        if not cleaned_up:
            self._seat.stay()
            error = SessionFailed(ErrorCode.CLEANUP_FAILED, "the worker did not release the session; close it again")
            self._audience.send_state(state_message(self._session))
            self._audience.send_error(error)
            self._services.not_released()
            raise error
        self._services.metrics.ended.labels(reason).inc()
        closed = SessionClosedMessage(session_id=self._session.session_id, reason=reason)
        self._audience.end(CloseCode.DONE, last_words=closed, reason=reason, discard=False)
        try:
            await self._free()
        finally:
            self._on_ended()

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
            await self._recorder.close(within_s=FLUSH_TIMEOUT_S)
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
        self._services.scheduler.remove(self._session.session_id)
        if self._audience.is_empty:
            return
        self._audience.send_dropped(self._session.abandon_tick() + self._session.begin_close(), DropReason.CLOSED)
        self._audience.send_error(Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
        closed = SessionClosedMessage(session_id=self._session.session_id, reason=ErrorCode.SHUTTING_DOWN)
        self._audience.end(CloseCode.RESTART, last_words=closed, reason="shutting down", discard=True)

    async def shut_down(self) -> None:
        """Stop everything at once because the server ends."""
        self.say_goodbye()
        self._tasks.cancel()
        try:
            await self._tasks.join()
            if self._recorder is not None:
                await self._recorder.close(within_s=None)
        finally:
            self._encoder.close()
