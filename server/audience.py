"""Whom a session talks to: the socket of its owner, which may be away for a while, and spectators, who come and go.

    state, end, chunks          -> owner and spectators
    errors, answers to events   -> owner; answers wait for the next socket when there is none

Nobody here can slow anybody else: a call queues, and what a slow listener does with its queue is its own affair.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from server.chunks import ReadyChunk
from server.errors import ErrorCode, ServerError, Unavailable
from server.media.formats import EncodedChunk
from server.metrics import Metrics
from server.session import Session
from server.wire.messages import (
    DropReason,
    ErrorMessage,
    EventDropped,
    ServerMessage,
    SessionClosedMessage,
    SessionStateMessage,
)

SPECTATOR_EPOCH = 0
"""Epochs count the owner's connections from 1; what spectators get belongs to none of them."""


class Listener(Protocol):
    """A socket as a session sees it. No call blocks; what is sent after `close` is dropped."""

    def send(self, message: ServerMessage) -> None: ...

    def send_chunk(self, ready: ReadyChunk[EncodedChunk]) -> None:
        """Queue a chunk. An owner's outlet calls `SessionActor.chunk_sent` when its socket took it."""
        ...

    def close(self, code: int, reason: str, *, discard: bool = False) -> None:
        """Close after what is queued was sent; `discard` drops queued chunks first."""
        ...


class Audience:
    """The listeners of one session."""

    def __init__(self, metrics: Metrics, *, max_missed_messages: int, max_watchers: int) -> None:
        self.owner: Listener | None = None
        self._metrics = metrics
        self._max_watchers = max_watchers
        self._watchers: list[Listener] = []
        self._missed: deque[ServerMessage] = deque(maxlen=max_missed_messages)

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def is_empty(self) -> bool:
        return self.owner is None and not self._watchers

    # ------------------------------------------------------------ spectators

    def require_room(self) -> None:
        """Raise `Unavailable` if the session has as many spectators as it may."""
        if len(self._watchers) >= self._max_watchers:
            raise Unavailable(
                ErrorCode.TOO_MANY_WATCHERS,
                f"this session has {self._max_watchers} spectators (session.max_watchers)",
            )

    def add_watcher(self, watcher: Listener) -> None:
        """Let a spectator hear everything from now on. Raises `Unavailable`."""
        self.require_room()
        self._watchers.append(watcher)

    def remove_watcher(self, watcher: Listener) -> None:
        """Forget a spectator, if it is one."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    # ------------------------------------------------------------ to everybody

    def send_state(self, message: SessionStateMessage) -> None:
        self.send(message)
        self.send_state_to_watchers(message)

    def send_state_to_watchers(self, message: SessionStateMessage) -> None:
        seen = message.model_copy(update={"epoch": SPECTATOR_EPOCH})
        for watcher in tuple(self._watchers):
            watcher.send(seen)

    def send_chunk(self, ready: ReadyChunk[EncodedChunk]) -> None:
        for listener in self._listeners():
            listener.send_chunk(ready)

    def end(self, code: int, *, last_words: SessionClosedMessage, reason: str, discard: bool) -> None:
        """Say the last words and close every socket."""
        for listener in self._listeners():
            listener.send(last_words)
            listener.close(code, reason, discard=discard)
        self.owner = None
        self._watchers.clear()

    def _listeners(self) -> tuple[Listener, ...]:
        return (*(() if self.owner is None else (self.owner,)), *self._watchers)

    # ------------------------------------------------------------ to the owner

    def send(self, message: ServerMessage) -> None:
        if self.owner is not None:
            self.owner.send(message)

    def send_error(self, error: ServerError) -> None:
        self._metrics.errors.labels(error.code).inc()
        self.send(error_message(error))

    def send_dropped(self, event_ids: tuple[int, ...], reason: DropReason) -> None:
        """Answer events for the second time; without a socket the answers wait for the next one."""
        self._metrics.events.labels(f"dropped_{reason}").inc(len(event_ids))
        for event_id in event_ids:
            message = EventDropped(event_id=event_id, reason=reason)
            if self.owner is None:
                self._missed.append(message)
            else:
                self.owner.send(message)

    def send_missed(self) -> None:
        """Give a new socket the answers that waited for it."""
        while self._missed:
            self.send(self._missed.popleft())

    def close_owner(self, code: int, reason: str, *, discard: bool = False) -> None:
        if self.owner is not None:
            self.owner.close(code, reason, discard=discard)


def error_message(error: ServerError) -> ErrorMessage:
    """Build the `error` message of an error."""
    return ErrorMessage(
        code=error.code,
        message=error.message,
        field=error.field,
        retryable=error.kind.retryable,
        fatal=error.kind.fatal,
        event_id=error.event_id,
        request_id=error.request_id,
    )


def state_message(session: Session[EncodedChunk], reason: str | None = None) -> SessionStateMessage:
    """Build the `session.state` message of a session."""
    return SessionStateMessage(
        session_id=session.session_id,
        state=session.state,
        epoch=session.epoch,
        run=session.run,
        start_image=session.start_image,
        reason=reason,
    )
