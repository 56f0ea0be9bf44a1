"""The `world` dialect: one client's conversation with one session.

opening ──session.start──> starting ──session.started──> running ──> closed
   ↑ │                        │ error that keeps the socket          ↑
   └─┼────────────────────────┘                                      │
     └──session.watch──> watching (`server/dialects/spectator.py`) ──┘
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from starlette.websockets import WebSocket

from server.actor import SessionActor
from server.audience import error_message
from server.chunks import ReadyChunk, ResumePoint
from server.context import ServerContext
from server.dialects.opening import Beginning, HeldMessages, StartTimer, read_text, serve_dialog
from server.dialects.spectator import SpectatorDialog
from server.dialects.world_messages import (
    init_frame,
    limits_message,
    media_frame,
    parse_client_message,
    read_controls,
)
from server.endpoint import BinaryFrame, Outbox, TextFrame
from server.errors import BadInput, CloseCode, ErrorCode, EventRefused, ServerError
from server.limits import RateLimiter
from server.media.formats import EncodedChunk, EpochMuxer
from server.session import Phase
from server.starting import check_start
from server.tasks import TaskSet
from server.wire.messages import (
    EventQueued,
    Ping,
    Playback,
    Pong,
    ServerMessage,
    SessionClose,
    SessionEvent,
    SessionPause,
    SessionQueued,
    SessionReset,
    SessionResume,
    SessionStart,
    SessionStarted,
    SessionUnpause,
    SessionWatch,
)

log = logging.getLogger(__name__)


async def world_endpoint(websocket: WebSocket, context: ServerContext) -> None:
    """Serve `GET /v1/world`."""
    await serve_dialog(websocket, context, WorldDialog)


SessionMessage = SessionEvent | SessionReset | SessionPause | SessionUnpause | SessionClose | Playback
"""What needs a session."""


class WorldDialog:
    """Maps messages to a session and back. Also the session's `Outlet` for one epoch."""

    def __init__(self, context: ServerContext, outbox: Outbox) -> None:
        self.owner: str | None = None
        self._context = context
        self._outbox = outbox
        self._actor: SessionActor | None = None
        self._spectator: SpectatorDialog | None = None
        self._epoch = 0
        self._muxer: EpochMuxer | None = None
        self._tasks = TaskSet("world dialog")
        self._starting: asyncio.Task[None] | None = None
        self._held: HeldMessages[SessionMessage] = HeldMessages(context.config)
        self._event_rate = RateLimiter(context.config.limits.max_events_per_second)
        self.start_timer = StartTimer(
            context.config.session.start_timeout_s, beginning=self._beginning, send_error=self.send_error
        )

    # ------------------------------------------------------------ client -> session

    async def on_text(self, text: str) -> None:
        try:
            await self._on_text(text)
        except ServerError:
            self.start_timer.refused(text)
            raise

    async def _on_text(self, text: str) -> None:
        message = await read_text(text, parse_client_message, self._context.config.limits)
        match message:
            case Ping():
                self.send(Pong(t=message.t))
            case _ if self._spectator is not None:
                self._spectator.on_message(message)
            case SessionStart():
                self._require_unstarted()
                self._starting = self._tasks.spawn(self._start(message))
            case SessionResume():
                self._require_unstarted()
                self._resume(message)
            case SessionWatch():
                self._require_unstarted()
                self._watch(message)
            case SessionClose() if self._starting is not None and self._actor is None:
                self._starting.cancel()
                self._refuse_held()
                self.close(CloseCode.DONE, "closed")
            case SessionClose() if self._starting is not None:
                # Its turn comes after what was held before it.
                self._held.put_last(message, len(text))
            case _ if self._starting is not None:
                self._hold(message, len(text))
            case _:
                await self._on_session_message(message)

    async def on_binary(self, data: bytes) -> None:
        raise BadInput(ErrorCode.BINARY_NOT_ALLOWED, "clients send text frames only")

    def _hold(self, message: SessionMessage, num_chars: int) -> None:
        """Keep what a client sends before its session has started, so that it need not wait for `session.started`."""
        try:
            self._held.add(message, num_chars)
        except ServerError as error:
            error.event_id = _event_id(message)
            raise

    async def _take_held(self) -> None:
        """Treat what was held in the order it came, as if it came now."""
        while self._held:
            try:
                await self._on_session_message(self._held.take())
            except ServerError as error:
                self.send_error(error)

    def _refuse_held(self) -> None:
        """Answer what was held for a session that will not start."""
        for message in self._held.take_all():
            refused = EventRefused(ErrorCode.NOT_STARTED, "closed before it started", event_id=_event_id(message))
            self.send_error(refused)

    async def _on_session_message(self, message: SessionMessage) -> None:
        actor = self._require_actor(message)
        match message:
            case Playback():
                actor.session.report_playback(
                    epoch=message.epoch,
                    run=message.run,
                    chunk_index=message.chunk_index,
                    buffered_ms=message.buffered_ms,
                    now=self._context.clock(),
                )
                actor.changed()
                return
            case SessionEvent():
                self._on_event(actor, message)
            case SessionReset():
                await self._on_reset(actor, message)
            case SessionPause():
                actor.set_paused(True)
            case SessionUnpause():
                actor.set_paused(False)
            case SessionClose():
                actor.begin_close("client")
        actor.touch()

    def _on_event(self, actor: SessionActor, message: SessionEvent) -> None:
        now = self._context.clock()
        metrics = self._context.metrics
        try:
            self._event_rate.require(now, what="events a second", key="limits.max_events_per_second")
            controls = read_controls(message.controls or [], self._context.parse_control, event_id=message.event_id)
            actor.session.accept(event_id=message.event_id, prompt=message.prompt, controls=controls, now=now)
        except ServerError as error:
            metrics.events.labels("refused").inc()
            error.event_id = message.event_id
            raise
        metrics.events.labels("queued").inc()
        self.send(EventQueued(event_id=message.event_id))
        actor.changed()

    async def _on_reset(self, actor: SessionActor, message: SessionReset) -> None:
        image = None
        if message.image is not None:
            image = await self._context.images.read(message.image, owner=self.owner)
        actor.begin_reset(prompt=message.prompt or "", seed=message.seed, image=image)

    # ------------------------------------------------------------ starting

    def _beginning(self) -> Beginning:
        if self._actor is not None or self._spectator is not None:
            return Beginning.DONE
        return Beginning.AWAITED if self._starting is None else Beginning.UNDER_WAY

    def _require_unstarted(self) -> None:
        if self._actor is not None or self._starting is not None:
            raise BadInput(ErrorCode.ALREADY_STARTED, "this socket has its session already")

    def _require_actor(self, message: SessionMessage) -> SessionActor:
        event_id = _event_id(message)
        if self._actor is None:
            raise EventRefused(ErrorCode.NOT_STARTED, "send session.start first", event_id=event_id)
        if self._actor.session.phase in (Phase.CLOSED, Phase.CLEANUP_FAILED) and event_id is not None:
            raise EventRefused(ErrorCode.BAD_STATE, "the session is closed", event_id=event_id)
        return self._actor

    async def _start(self, message: SessionStart) -> None:
        try:
            request = await check_start(message, self._context, owner=self.owner)
            actor = await self._context.table.create(request, owner=self.owner, on_position=self._send_position)
            actor.attach(self)
        except ServerError as error:
            self.send_error(error)
        except Exception:
            # The boundary of a start, as the reader's is of messages: a bug must not leave the client waiting.
            log.exception("a start broke")
            self.send_error(ServerError(ErrorCode.INTERNAL, "the server failed to start the session"))
        try:
            await self._take_held()
        finally:
            self._starting = None
            self.start_timer.start_over()

    def _resume(self, message: SessionResume) -> None:
        actor = self._context.table.resume(message.resume_token, self.owner)
        actor.attach(self, ResumePoint(last_chunk_index=message.last_chunk_index, run=message.run))
        actor.touch()
        self._context.metrics.resumed.inc()

    def _watch(self, message: SessionWatch) -> None:
        spectator = SpectatorDialog(self._context, self._outbox)
        spectator.join(message, owner=self.owner)
        self._spectator = spectator

    def _send_position(self, position: int, num_queued: int) -> None:
        self.send(SessionQueued(position=position, queued=num_queued))

    # ------------------------------------------------------------ session -> client (Outlet)

    def open_epoch(self, actor: SessionActor, epoch: int, muxer: EpochMuxer) -> None:
        self._actor, self._epoch, self._muxer = actor, epoch, muxer
        self.send(self._started(actor, epoch))
        init = muxer.init_segment()
        if init is not None:
            frame = init_frame(
                init,
                session_id=actor.session_id,
                epoch=epoch,
                run=actor.session.run,
                timescale=muxer.timescale,
            )
            self._outbox.put(BinaryFrame(build=lambda: frame, sent=self._count_bytes))

    def send(self, message: ServerMessage) -> None:
        self._outbox.put(TextFrame(text=message.model_dump_json()))

    def send_chunk(self, ready: ReadyChunk[EncodedChunk]) -> None:
        self._outbox.put(BinaryFrame(build=partial(self._build, ready), sent=partial(self._chunk_sent, ready)))

    def close(self, code: int, reason: str, *, discard: bool = False) -> None:
        self._outbox.close(code, reason, discard=discard)

    def send_error(self, error: ServerError) -> None:
        self._context.metrics.errors.labels(error.code).inc()
        self.send(error_message(error))
        if error.kind.close_code is not None:
            self.close(error.kind.close_code, error.code)

    def on_lost(self) -> None:
        self._tasks.cancel()
        self.start_timer.stop()
        if self._spectator is not None:
            self._spectator.leave()
        if self._actor is not None:
            self._context.table.detach(self._actor, self._epoch)

    def _build(self, ready: ReadyChunk[EncodedChunk]) -> bytes:
        assert self._actor is not None
        assert self._muxer is not None
        muxed = self._muxer.mux(ready.encoded)
        return media_frame(ready, muxed, session_id=self._actor.session_id, epoch=self._epoch)

    def _chunk_sent(self, ready: ReadyChunk[EncodedChunk], num_bytes: int) -> None:
        assert self._actor is not None
        self._count_bytes(num_bytes)
        self._actor.chunk_sent(self._epoch, ready.chunk)

    def _count_bytes(self, num_bytes: int) -> None:
        self._context.metrics.sent_bytes.inc(num_bytes)

    def _started(self, actor: SessionActor, epoch: int) -> SessionStarted:
        context, session, info = self._context, actor.session, actor.info
        return SessionStarted(
            session_id=actor.session_id,
            epoch=epoch,
            run=session.run,
            resume_token=actor.resume_token,
            watch_token=actor.watch_token,
            model=info.model,
            width=info.width,
            height=info.height,
            fps=info.fps,
            latent_frames_per_chunk=info.latent_frames_per_chunk,
            mime=actor.mime,
            format=actor.format,
            pacing=session.pacing,
            seed=session.seed,
            prompt=session.prompt,
            start_image=session.start_image,
            controls=dict(context.control_schemas),
            limits=limits_message(context.config),
            start_images=context.start_images.offers,
            prompts=list(context.config.model.prompts),
        )


def _event_id(message: SessionMessage) -> int | None:
    return message.event_id if isinstance(message, SessionEvent) else None
