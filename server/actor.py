"""The asyncio shell around one `Session`: what clients ask for, and the sockets that listen to it.

    Scheduler.run ─> run_tick ─> `server/session_ticks.py` ─> Outlet.send_chunk ─> chunk_sent
    client task   ─> begin_reset / begin_close ─> `server/session_life.py`

No method awaits the worker in a client's task, so that a lost socket cancels nothing half-way.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from server.actor_services import ActorServices
from server.admission import Place
from server.audience import Audience, Listener, state_message
from server.chunks import CommittedChunk, ResumePoint
from server.errors import BadInput, CloseCode, ErrorCode, ServerError
from server.ids import ResumeToken, WatchToken
from server.media.formats import EncodedChunk, EpochMuxer, StreamEncoder
from server.recorder import SessionRecorder
from server.session import Phase, Session
from server.session_life import SessionLife
from server.session_ticks import SessionTicks
from server.ticking import TickGate
from server.uploads import StartImage
from server.wire.messages import SessionState, StreamFormat
from server.worker_seat import WorkerSeat
from worldmodel.messages import ModelInfo, SessionId


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
        self._recorder = recorder
        self._services = services
        self._seat = WorkerSeat(
            services.worker,
            place,
            session_id=session.session_id,
            outputs=encoder.outputs,
            new_request_id=session.new_request_id,
            take_place=services.take_place,
        )
        self._audience = Audience(
            services.metrics,
            max_missed_messages=services.max_missed_messages,
            max_watchers=services.max_watchers,
        )
        gate = TickGate()
        self._ticks = SessionTicks(
            session,
            encoder,
            gate=gate,
            audience=self._audience,
            recorder=recorder,
            services=services,
            fail=self._fail,
        )
        self._life = SessionLife(
            session,
            seat=self._seat,
            gate=gate,
            audience=self._audience,
            encoder=self._ticks.encoder,
            recorder=recorder,
            image_file=image_file,
            services=services,
            on_ended=self._ended,
        )
        services.scheduler.add(self)

    # ------------------------------------------------------------ what can be seen

    @property
    def session_id(self) -> SessionId:
        return self.session.session_id

    @property
    def mime(self) -> str | None:
        return self._ticks.encoder.mime

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

    @property
    def end_reason(self) -> str | None:
        """Why the session ends or has ended, None before."""
        return self._life.end_reason

    @property
    def lost_reason(self) -> str | None:
        """Why the world is gone, if it went with its worker process and no reset has begun another one."""
        return self._life.lost_reason

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
        outlet.open_epoch(self, epoch, self._ticks.encoder.new_epoch())
        if session.state is not SessionState.ACTIVE:
            outlet.send(state_message(self.session))
        if session.state is not state:
            self._audience.send_state_to_watchers(state_message(self.session))
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
            self._audience.send_state_to_watchers(state_message(self.session))
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
        spectator.open_watch(self, self._ticks.encoder.new_epoch())
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
            self._audience.send_state(state_message(self.session))
            self.changed()
        else:
            self._audience.send(state_message(self.session))

    def begin_reset(self, *, prompt: str, seed: int | None, image: StartImage | None) -> asyncio.Task[None]:
        """Drop queued events and begin a new run between two ticks; the task raises `ServerError` if that failed."""
        return self._life.begin_reset(prompt=prompt, seed=seed, image=image)

    def begin_close(self, reason: str) -> asyncio.Task[None]:
        """Close for good, between two ticks. Asking again joins the close under way, or tries a failed one again."""
        return self._life.begin_close(reason)

    # ------------------------------------------------------------ what the scheduler, the worker and the server do

    async def run_tick(self) -> None:
        await self._ticks.run_tick()

    def tick_broke(self, error: Exception) -> None:
        self._ticks.tick_broke(error)

    def worker_lost(self, reason: str) -> None:
        """Fail at once because the worker process, and with it all state, is gone."""
        self._life.worker_lost(reason)

    def say_goodbye(self) -> None:
        """End the session because the server ends: answer every event and close the sockets. Again does nothing."""
        self._life.say_goodbye()

    async def shut_down(self) -> None:
        """Stop everything at once because the server ends."""
        await self._life.shut_down()

    def _fail(self, error: ServerError) -> None:
        self._life.fail(error)

    def _ended(self) -> None:
        self._services.ended(self)


def _gap_error(num_chunks: int) -> ServerError:
    text = f"{num_chunks} chunks after the last one received are no longer kept; the stream goes on behind them"
    return ServerError(ErrorCode.RESUME_GAP, text)
