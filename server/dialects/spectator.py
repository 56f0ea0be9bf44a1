"""A socket of the `world` dialect that watches somebody else's session and can change nothing.

What it is sent never waits for it: at most `MAX_WAITING_CHUNKS` chunks wait for the socket, and a newer one takes the
place of the oldest. Every chunk begins with a key frame, and a chunk gets its place in time when it is sent, so what a
slow spectator receives is one gapless stream with parts of the story missing.
"""

from __future__ import annotations

from collections import deque

from server.actor import SessionActor
from server.audience import SPECTATOR_EPOCH
from server.chunks import ReadyChunk
from server.context import ServerContext
from server.dialects.world_messages import init_frame, media_frame
from server.endpoint import MAX_QUEUED_FRAMES, BinaryFrame, Outbox, TextFrame
from server.errors import BadInput, CloseCode, ErrorCode, EventRefused
from server.media.formats import EncodedChunk, EpochMuxer
from server.wire.messages import ClientMessage, ServerMessage, SessionClose, SessionEvent, SessionWatch, SessionWatching

MAX_WAITING_CHUNKS = 2
"""Chunks that may wait while one is on its way; more would only make a slow spectator later."""


class SpectatorDialog:
    """One spectator of one session; the session's `Spectator`."""

    def __init__(self, context: ServerContext, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox
        self._actor: SessionActor | None = None
        self._muxer: EpochMuxer | None = None
        self._waiting: deque[ReadyChunk[EncodedChunk]] = deque()

    def join(self, message: SessionWatch, *, owner: str | None) -> None:
        """Begin to watch. Raises `ServerError`; then the socket may still do something else."""
        table = self._context.table
        if message.watch_token is not None and message.session_id is None:
            actor = table.watchable(message.watch_token)
        elif message.session_id is not None and message.watch_token is None:
            actor = table.find(message.session_id, owner, field="session_id")
        else:
            raise BadInput(
                ErrorCode.BAD_MESSAGE,
                "watch_token: expected exactly one of watch_token and session_id",
                field="watch_token",
            )
        actor.watch(self)
        self._context.watching.joined.inc()

    def on_message(self, message: ClientMessage) -> None:
        """Refuse everything but leaving; the caller answers pings."""
        match message:
            case SessionClose():
                self.close(CloseCode.DONE, "closed")
            case SessionEvent(event_id=event_id):
                raise EventRefused(ErrorCode.READ_ONLY, "a spectator can't steer", event_id=event_id)
            case _:
                raise BadInput(ErrorCode.READ_ONLY, f"a spectator can't send {message.type}")

    def leave(self) -> None:
        """Clean up; the socket is gone."""
        if self._actor is not None:
            self._actor.unwatch(self)

    # ------------------------------------------------------------ session -> client (Spectator)

    def open_watch(self, actor: SessionActor, muxer: EpochMuxer) -> None:
        self._actor, self._muxer = actor, muxer
        session, info = actor.session, actor.info
        self.send(
            SessionWatching(
                session_id=actor.session_id,
                state=session.state,
                run=session.run,
                start_image=session.start_image,
                model=info.model,
                width=info.width,
                height=info.height,
                fps=info.fps,
                latent_frames_per_chunk=info.latent_frames_per_chunk,
                mime=actor.mime,
                format=actor.format,
            )
        )
        init = muxer.init_segment()
        if init is not None:
            frame = init_frame(
                init,
                session_id=actor.session_id,
                epoch=SPECTATOR_EPOCH,
                run=session.run,
                timescale=muxer.timescale,
            )
            self._outbox.put(BinaryFrame(build=lambda: frame, sent=self._count_bytes))

    def send(self, message: ServerMessage) -> None:
        if len(self._outbox) >= MAX_QUEUED_FRAMES:
            self.close(CloseCode.TRY_LATER, "too slow", discard=True)
        self._outbox.put(TextFrame(text=message.model_dump_json()))

    def send_chunk(self, ready: ReadyChunk[EncodedChunk]) -> None:
        if len(self._waiting) < MAX_WAITING_CHUNKS:
            # One frame in the outbox for each waiting chunk; which chunk it carries is decided when its turn comes.
            self._outbox.put(BinaryFrame(build=self._build_next, sent=self._count_bytes))
        else:
            self._waiting.popleft()
            self._context.watching.skipped_chunks.inc()
        self._waiting.append(ready)

    def close(self, code: int, reason: str, *, discard: bool = False) -> None:
        self._outbox.close(code, reason, discard=discard)

    def _build_next(self) -> bytes:
        assert self._actor is not None
        assert self._muxer is not None
        ready = self._waiting.popleft()
        muxed = self._muxer.mux(ready.encoded)
        return media_frame(ready, muxed, session_id=self._actor.session_id, epoch=SPECTATOR_EPOCH)

    def _count_bytes(self, num_bytes: int) -> None:
        self._context.metrics.sent_bytes.inc(num_bytes)
