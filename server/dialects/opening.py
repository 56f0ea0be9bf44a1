"""How a socket of a world's client begins, in every dialect: accept, check, and wait for a start."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from starlette.websockets import WebSocket

from server.auth import accepted_subprotocol
from server.config import LimitsSection, ServerConfig
from server.context import ServerContext
from server.endpoint import Dialog, Outbox, serve_socket
from server.errors import BadInput, ErrorCode, NotAllowed, ServerError, Unavailable

MessageT = TypeVar("MessageT")

LARGE_TEXT_CHARS = 64 * 1024
"""Messages above this (images in base64) are parsed in a thread."""

_START = re.compile(r'"type"\s*:\s*"session\.(?:start|watch)"')


class Beginning(StrEnum):
    """How far a conversation is."""

    AWAITED = "awaited"
    UNDER_WAY = "under way"
    DONE = "done"


async def read_text(text: str, parse: Callable[[str, LimitsSection], MessageT], limits: LimitsSection) -> MessageT:
    """Parse a text frame. Raises what `parse` does."""
    if len(text) > LARGE_TEXT_CHARS:
        return await asyncio.to_thread(parse, text, limits)
    return parse(text, limits)


class HeldMessages(Generic[MessageT]):
    """What a client sends before its session has started, in order: together no longer than one message may be."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_messages = config.session.max_pending_events
        self._max_chars = config.limits.max_message_bytes
        self._num_chars = 0
        self._messages: deque[tuple[MessageT, int]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: MessageT, num_chars: int) -> None:
        """Keep a message that came as a text of this length. Raises `Unavailable` that names the limit."""
        if len(self._messages) >= self._max_messages:
            text = f"{self._max_messages} messages wait for the session to start (session.max_pending_events)"
            raise Unavailable(ErrorCode.QUEUE_FULL, text)
        if self._num_chars + num_chars > self._max_chars:
            text = (
                f"what waits for the session to start would be longer than {self._max_chars} bytes "
                "(limits.max_message_bytes)"
            )
            raise Unavailable(ErrorCode.QUEUE_FULL, text)
        self._put(message, num_chars)

    def put_last(self, message: MessageT, num_chars: int) -> None:
        """Keep a message whatever waits already, unless the same waits; for what is never refused and done once."""
        if all(waiting != message for waiting, _ in self._messages):
            self._put(message, num_chars)

    def take(self) -> MessageT:
        """Remove and return the oldest message."""
        message, num_chars = self._messages.popleft()
        self._num_chars -= num_chars
        return message

    def take_all(self) -> list[MessageT]:
        return [self.take() for _ in range(len(self))]

    def _put(self, message: MessageT, num_chars: int) -> None:
        self._messages.append((message, num_chars))
        self._num_chars += num_chars


class StartTimer:
    """Closes a socket if nothing has begun on it after a while, or after a start that failed."""

    def __init__(
        self, timeout_s: float, *, beginning: Callable[[], Beginning], send_error: Callable[[ServerError], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._beginning = beginning
        self._send_error = send_error
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expired)

    def stop(self) -> None:
        """Stop for good."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def start_over(self) -> None:
        """Give a client the whole time again whose start was refused. How many starts it may send, its rate bounds."""
        if self._timer is None or self._is_stopped or self._beginning() is not Beginning.AWAITED:
            return
        self._timer.cancel()
        self.start()

    def refused(self, text: str) -> None:
        """Note a refused message: if it was meant as a start, though it can't be read as one, the time begins anew."""
        if _START.search(text):
            self.start_over()

    def _expired(self) -> None:
        match self._beginning():
            case Beginning.AWAITED:
                text = f"no session.start came within {self._timeout_s:g} s (session.start_timeout_s)"
                self._send_error(BadInput(ErrorCode.START_TIMEOUT, text))
            case Beginning.UNDER_WAY:
                self.start()
            case Beginning.DONE:
                pass


class StartingDialog(Dialog, Protocol):
    """A conversation that begins with a client's start."""

    owner: str | None
    start_timer: StartTimer


async def serve_dialog(
    websocket: WebSocket, context: ServerContext, create: Callable[[ServerContext, Outbox], StartingDialog]
) -> None:
    """Serve one socket. Who may not be here is told so as a message, which a page can read, unlike an HTTP status."""
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(subprotocol=accepted_subprotocol(offered))
    outbox = Outbox()
    dialog = create(context, outbox)
    try:
        context.auth.check_origin(websocket.headers, scheme=websocket.url.scheme)
        dialog.owner = context.auth.authenticate(websocket.headers, offered)
    except NotAllowed as error:
        dialog.send_error(error)
    dialog.start_timer.start()
    await serve_accepted(websocket, context, dialog, outbox)


async def serve_accepted(websocket: WebSocket, context: ServerContext, dialog: Dialog, outbox: Outbox) -> None:
    """Serve an accepted socket until it is over, under the server's limits and counted among its connections."""
    context.metrics.connections.inc()
    try:
        await serve_socket(
            websocket,
            dialog,
            outbox,
            stall_timeout_s=context.config.session.stall_timeout_s,
            max_messages_per_second=context.config.limits.max_messages_per_second,
        )
    finally:
        context.metrics.connections.dec()
