"""The `omni` dialect: one client of vLLM-Omni's `WS /v1/realtime/video` and its session.

opening ──session.start──> starting ──video.start──> running ──last chunk, session.stop──> session.done, closed
   ↑                          │ error that keeps the socket
   └──────────────────────────┘

A video and its socket live and die together: there is no resume and no reset. Sessions, ticks, pacing and encoding are
those of every world; this file translates.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace
from functools import partial

from starlette.websockets import WebSocket

from server.actor import SessionActor
from server.chunks import ReadyChunk
from server.context import ServerContext
from server.dialects.omni_events import EVENT_ID_CONFLICT, INTERACTION_FAILED, Known, OmniEvents
from server.dialects.omni_messages import (
    StartPlan,
    find_event_id,
    parse_client_message,
    plan_interaction,
    plan_start,
    translate_start_error,
)
from server.dialects.omni_playhead import Playhead
from server.dialects.opening import Beginning, HeldMessages, StartTimer, read_text, serve_dialog
from server.endpoint import BinaryFrame, Outbox, TextFrame
from server.errors import BadInput, CloseCode, ErrorCode, ServerError
from server.limits import RateLimiter
from server.media.formats import EncodedChunk, EpochMuxer
from server.starting import check_start
from server.tasks import TaskSet
from server.wire.messages import (
    DropReason,
    ErrorMessage,
    EventDropped,
    Pacing,
    ServerMessage,
    SessionClosedMessage,
    SessionState,
    SessionStateMessage,
)
from server.wire.omni_messages import (
    ChunkMetadata,
    Interaction,
    InteractionQueued,
    OmniError,
    OmniInteraction,
    OmniPing,
    OmniPlayback,
    OmniPong,
    OmniQueued,
    OmniServerMessage,
    OmniStart,
    OmniStop,
    SessionDone,
    VideoConfig,
    VideoStart,
)

COMPLETE = "complete"
STOPPED = "stopped"
FAILED = "failed"
"""Reasons of an end that this dialect brings about."""

log = logging.getLogger(__name__)


async def omni_endpoint(websocket: WebSocket, context: ServerContext) -> None:
    """Serve `GET /v1/realtime/video`."""
    await serve_dialog(websocket, context, OmniDialog)


class OmniDialog:
    """Maps messages to a session and back. Also the session's `Outlet`."""

    def __init__(self, context: ServerContext, outbox: Outbox) -> None:
        self.owner: str | None = None
        self._context = context
        self._outbox = outbox
        self._actor: SessionActor | None = None
        self._epoch = 0
        self._muxer: EpochMuxer | None = None
        self._plan: StartPlan | None = None
        self._model = context.config.model.name
        self._buffer_s: float | None = None
        self._tasks = TaskSet("omni dialog")
        self._starting: asyncio.Task[None] | None = None
        self._held: HeldMessages[OmniInteraction | OmniPlayback] = HeldMessages(context.config)
        self._event_rate = RateLimiter(context.config.limits.max_events_per_second)
        self.start_timer = StartTimer(
            context.config.session.start_timeout_s, beginning=self._beginning, send_error=self.send_error
        )
        self._events = OmniEvents(max_pending=context.config.session.max_pending_events)
        self._next_number = 0
        self._num_chunks = 0
        self._init = b""
        self._playhead = Playhead()
        self._dropped: list[str] = []
        self._failed: list[str] = []
        self._failure = "the session failed"

    # ------------------------------------------------------------ client -> session

    async def on_text(self, text: str) -> None:
        try:
            message = await read_text(text, parse_client_message, self._context.config.limits)
        except BadInput as error:
            self.send_error(error, event_id=find_event_id(text))
            self.start_timer.refused(text)
            return
        if self._actor is not None:
            self._actor.touch()
        match message:
            case OmniPing():
                self._send(OmniPong())
            case OmniStart():
                if self._actor is not None or self._starting is not None:
                    raise BadInput(ErrorCode.ALREADY_STARTED, "this socket has its session already")
                self._starting = self._tasks.spawn(self._start(message))
            case OmniStop():
                self._stop()
            case _ if self._starting is not None:
                self._hold(message, len(text))
            case _:
                self._on_session_message(message)

    async def on_binary(self, data: bytes) -> None:
        raise BadInput(ErrorCode.BINARY_NOT_ALLOWED, "clients send text frames only")

    def _on_session_message(self, message: OmniInteraction | OmniPlayback) -> None:
        match message:
            case OmniInteraction():
                self._interact(message)
            case OmniPlayback():
                self._report(self._require_actor(), message.position_seconds)

    def _require_actor(self) -> SessionActor:
        if self._actor is None:
            raise BadInput(ErrorCode.NOT_STARTED, "send session.start first")
        return self._actor

    def _hold(self, message: OmniInteraction | OmniPlayback, num_chars: int) -> None:
        """Keep what comes before `video.start`, so that a client need not wait for it."""
        try:
            self._held.add(message, num_chars)
        except ServerError as error:
            event_id = message.interaction.event_id if isinstance(message, OmniInteraction) else None
            self.send_error(error, event_id=event_id)

    def _interact(self, message: OmniInteraction) -> None:
        interaction = message.interaction
        event_id = interaction.event_id or uuid.uuid4().hex
        content = interaction.model_copy(update={"event_id": event_id})
        try:
            actor = self._require_actor()
            match self._events.look_up(event_id, content):
                case Known.NEW:
                    self._queue(actor, content, event_id)
                case Known.RETRY:
                    pass
                case Known.CONFLICT:
                    self._refuse_conflict(event_id)
                    return
        except ServerError as error:
            self._context.metrics.events.labels("refused").inc()
            self.send_error(error, event_id=event_id if interaction.event_id else None)
            return
        self._send(InteractionQueued(request_id=actor.session_id, event_id=event_id))

    def _queue(self, actor: SessionActor, message: Interaction, event_id: str) -> None:
        now = self._context.clock()
        self._event_rate.require(now, what="events a second", key="limits.max_events_per_second")
        plan = plan_interaction(message, self._context.parse_control)
        number = self._next_number
        actor.session.accept(event_id=number, prompt=plan.prompt, controls=plan.controls, now=now)
        self._next_number += 1
        self._events.queue(number, event_id, message, plan.spans)
        self._context.metrics.events.labels("queued").inc()
        actor.changed()

    def _refuse_conflict(self, event_id: str) -> None:
        self._context.metrics.events.labels("refused").inc()
        text = "interaction.event_id: this id was used for another event"
        self._send_failure(EVENT_ID_CONFLICT, text, event_id=event_id, field="interaction.event_id")

    def _report(self, actor: SessionActor, position_s: float) -> None:
        """Tell the session what the viewer has seen, where its pacing listens to that."""
        if actor.session.pacing is not Pacing.PLAYBACK:
            return
        shown = self._playhead.move(position_s, actor.info.fps)
        if shown is None:
            return
        run, chunk_index, now = shown.chunk.run, shown.chunk.chunk_index, self._context.clock()
        actor.session.report_playback(
            epoch=self._epoch, run=run, chunk_index=chunk_index, buffered_ms=shown.buffered_ms, now=now
        )
        actor.changed()

    def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._actor is not None:
            self._actor.begin_close(STOPPED)
        elif self._starting is not None:
            interactions = [held.interaction for held in self._held.take_all() if isinstance(held, OmniInteraction)]
            dropped = [each.event_id for each in interactions if each.event_id is not None]
            self._send(SessionDone(request_id=None, chunks=0, stopped=True, dropped_event_ids=dropped))
            self.close(CloseCode.DONE, STOPPED)
        else:
            self._require_actor()

    # ------------------------------------------------------------ starting

    def _beginning(self) -> Beginning:
        if self._actor is not None:
            return Beginning.DONE
        return Beginning.AWAITED if self._starting is None else Beginning.UNDER_WAY

    async def _start(self, message: OmniStart) -> None:
        try:
            await self._open(message)
        except ServerError as error:
            self.send_error(translate_start_error(error))
        except Exception:
            # The boundary of a start, as the reader's is of messages: a bug must not leave the client waiting.
            log.exception("a start broke")
            self.send_error(ServerError(ErrorCode.INTERNAL, "the server failed to start the session"))
        finally:
            self._starting = None
            self.start_timer.start_over()
        while self._held:
            held = self._held.take()
            try:
                self._on_session_message(held)
            except ServerError as error:
                self.send_error(error)

    async def _open(self, message: OmniStart) -> None:
        """Check everything, take a place, and connect. Raises `ServerError`; then nothing has begun."""
        context = self._context
        plan = plan_start(
            message,
            context.table.require_worker(),
            model=context.config.model.name,
            aliases=context.config.omni.model_names,
            parse_control=context.parse_control,
        )
        request = replace(
            await check_start(plan.start, context, owner=self.owner),
            max_chunks=plan.max_chunks,
        )
        on_position = self._send_position if context.config.omni.queue_when_full else None
        actor = await context.table.create(request, owner=self.owner, on_position=on_position)
        self._plan, self._model = plan, message.model or self._model
        self._buffer_s = message.streaming_buffer_seconds
        if plan.script:
            actor.session.accept(event_id=self._next_number, prompt=None, controls=plan.script, now=context.clock())
            self._next_number += 1
        actor.attach(self)

    def _send_position(self, position: int, num_queued: int) -> None:
        self._send(OmniQueued(position=position, queued=num_queued))

    # ------------------------------------------------------------ session -> client (Outlet)

    def open_epoch(self, actor: SessionActor, epoch: int, muxer: EpochMuxer) -> None:
        assert self._plan is not None
        self._actor, self._epoch, self._muxer = actor, epoch, muxer
        init = muxer.init_segment()
        self._init = b"" if init is None else init.payload
        config = VideoConfig(
            model=self._model,
            prompt=actor.session.prompt,
            width=actor.info.width,
            height=actor.info.height,
            fps=actor.info.fps,
            num_frames=self._plan.num_frames,
            seed=actor.session.seed,
            streaming_buffer_seconds=self._buffer_s,
        )
        self._send(VideoStart(request_id=actor.session_id, config=config, mime=actor.mime))

    def send(self, message: ServerMessage) -> None:
        match message:
            case ErrorMessage():
                self._failure = message.message
                self._answer_failed()
                self._send_failure(message.code, message.message)
            case EventDropped():
                self._drop(message)
            case SessionStateMessage(state=SessionState.FAILED):
                # Nothing can follow in this dialect. Later, because the session is in the middle of failing.
                asyncio.get_running_loop().call_soon(self._give_up)
            case SessionStateMessage(state=SessionState.CLEANUP_FAILED):
                # The error that says so comes first; losing the socket tries again.
                asyncio.get_running_loop().call_soon(self.close, CloseCode.INTERNAL, FAILED)
            case SessionClosedMessage(reason=reason):
                self._end(reason)
            case _:
                pass

    def send_chunk(self, ready: ReadyChunk[EncodedChunk]) -> None:
        """Queue metadata and payload together; nothing can come between them."""
        assert self._actor is not None
        assert self._muxer is not None
        assert self._plan is not None
        muxed = self._muxer.mux(ready.encoded)
        payload, self._init = self._init + muxed.payload, b""
        events = self._events.chunk(receipt.event_id for receipt in ready.chunk.applied)
        self._send(
            ChunkMetadata(
                request_id=self._actor.session_id,
                transport_chunk_index=self._num_chunks,
                generation_chunk_index=ready.chunk.chunk_index,
                num_frames=muxed.num_frames,
                byte_length=len(payload),
                started_event_ids=list(events.started),
                active_event_ids=list(events.active),
                completed_event_ids=list(events.completed),
            )
        )
        self._outbox.put(BinaryFrame(build=lambda: payload, sent=partial(self._chunk_sent, ready)))
        self._num_chunks += 1
        if ready.chunk.chunk_index + 1 == self._plan.max_chunks:
            self._actor.begin_close(COMPLETE)

    def close(self, code: int, reason: str, *, discard: bool = False) -> None:
        """Close after everything queued; nothing is discarded, for metadata must not come without its payload."""
        self._outbox.close(code, reason)

    def send_error(self, error: ServerError, *, event_id: str | None = None) -> None:
        self._context.metrics.errors.labels(error.code).inc()
        self._send_failure(error.code, error.message, event_id=event_id, field=error.field)
        if error.kind.close_code is not None:
            self.close(error.kind.close_code, error.code)

    def on_lost(self) -> None:
        self._tasks.cancel()
        self.start_timer.stop()
        if self._actor is not None and self._actor.detach(self._epoch):
            self._actor.begin_close("disconnected")

    def _drop(self, message: EventDropped) -> None:
        """Answer for an event that was queued: at the end all together, before it each for itself."""
        event_id = self._events.drop(message.event_id)
        if event_id is None:
            return
        match message.reason:
            case DropReason.CLOSED:
                self._dropped.append(event_id)
            case DropReason.RESET:
                self._send_failure(INTERACTION_FAILED, "the session was reset", event_id=event_id)
            case DropReason.FAILED:
                self._failed.append(event_id)
                # Later, because an error that closes the socket says why only after this.
                asyncio.get_running_loop().call_soon(self._answer_failed)

    def _answer_failed(self) -> None:
        for event_id in self._failed:
            self._send_failure(INTERACTION_FAILED, self._failure, event_id=event_id)
        self._failed.clear()

    def _give_up(self) -> None:
        if self._actor is not None:
            self._actor.begin_close(FAILED)

    def _end(self, reason: str) -> None:
        assert self._actor is not None
        if reason == FAILED:
            self._outbox.close(CloseCode.INTERNAL, FAILED)
            return
        self._send(
            SessionDone(
                request_id=self._actor.session_id,
                chunks=self._num_chunks,
                stopped=reason != COMPLETE,
                dropped_event_ids=self._dropped,
            )
        )

    def _chunk_sent(self, ready: ReadyChunk[EncodedChunk], num_bytes: int) -> None:
        assert self._actor is not None
        self._context.metrics.sent_bytes.inc(num_bytes)
        chunk = ready.chunk
        if self._actor.session.pacing is Pacing.PLAYBACK:
            self._playhead.sent(run=chunk.run, chunk_index=chunk.chunk_index, num_media_frames=chunk.num_media_frames)
        self._actor.chunk_sent(self._epoch, chunk)

    def _send(self, message: OmniServerMessage) -> None:
        self._outbox.put(TextFrame(text=message.model_dump_json(exclude_none=True)))

    def _send_failure(self, code: str, message: str, *, event_id: str | None = None, field: str | None = None) -> None:
        request_id = None if self._actor is None else self._actor.session_id
        self._send(OmniError(code=code, message=message, field=field, request_id=request_id, event_id=event_id))
