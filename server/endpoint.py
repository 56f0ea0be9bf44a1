"""One WebSocket: a reader task and a writer task, and the bounded queue between sessions and the socket.

    reader: receive ─> Dialog.on_text, on_binary waits while the client doesn't read what it was sent, or sends too fast
    writer: Outbox ─> send ─> drain              gives the socket up when one frame takes longer than the stall time-out

It knows frames, not messages; dialects do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from server.errors import CloseCode, ErrorCode, ServerError
from server.limits import NUM_FRAGMENTS, RateLimiter

MAX_QUEUED_FRAMES = 512
"""Frames that may wait for the socket before the reader stops. One event causes two; chunks are bounded by pacing."""

MAX_KEPT_FRAMES = 8 * MAX_QUEUED_FRAMES
"""Frames that may wait at all: others than the client itself can cause some, such as its own requests over REST."""

CHARS_PER_MESSAGE = 16 * 1024
"""A longer text counts as several messages where the rate of messages is bounded, as one in several fragments does."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFrame:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryFrame:
    """A frame that is built when its turn comes. `sent` is called once the socket took it."""

    build: Callable[[], bytes]
    sent: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseFrame:
    code: int
    reason: str


Frame = TextFrame | BinaryFrame | CloseFrame


class Outbox:
    """Frames on their way to one socket, in order. Nothing is accepted after a close."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._closed = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, frame: TextFrame | BinaryFrame) -> None:
        """Queue a frame. Who lets too many wait is closed."""
        if len(self._frames) >= MAX_KEPT_FRAMES:
            self.close(CloseCode.TRY_LATER, "too slow", discard=True)
        if not self._closed:
            self._frames.append(frame)
            self._changed.set()

    def close(self, code: int, reason: str, *, discard: bool = False) -> None:
        """Close the socket after everything queued; `discard` drops binary frames that wait."""
        if self._closed:
            return
        if discard:
            self._frames = deque(frame for frame in self._frames if not isinstance(frame, BinaryFrame))
        self._frames.append(CloseFrame(code=code, reason=reason))
        self._closed = True
        self._changed.set()

    async def get(self) -> Frame:
        while not self._frames:
            self._changed.clear()
            await self._changed.wait()
        frame = self._frames.popleft()
        self._changed.set()
        return frame

    async def wait_for_room(self) -> None:
        """Wait until the client has read enough of what it was sent."""
        while len(self._frames) >= MAX_QUEUED_FRAMES and not self._closed:
            self._changed.clear()
            await self._changed.wait()


class Dialog(Protocol):
    """The conversation on one socket."""

    async def on_text(self, text: str) -> None:
        """Handle a text frame. Raises `ServerError` to have it sent."""
        ...

    async def on_binary(self, data: bytes) -> None:
        """Handle a binary frame. Raises `ServerError` to have it sent."""
        ...

    def send_error(self, error: ServerError) -> None:
        """Send an error, and close the socket if that is what the error means."""
        ...

    def on_lost(self) -> None:
        """Clean up; the socket is gone, for whatever reason."""
        ...


class _SocketLost(Exception):
    """The peer is gone or takes nothing any more."""


async def serve_socket(
    websocket: WebSocket, dialog: Dialog, outbox: Outbox, *, stall_timeout_s: float, max_messages_per_second: float
) -> None:
    """Run an accepted socket until it is closed or lost."""
    try:
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(_write(websocket, outbox, stall_timeout_s))
            await _read(websocket, dialog, outbox, RateLimiter(max_messages_per_second))
            writer.cancel()
    except* _SocketLost:
        log.debug("socket lost")
    finally:
        dialog.on_lost()


async def _read(websocket: WebSocket, dialog: Dialog, outbox: Outbox, rate: RateLimiter) -> None:
    """Hand on what comes, no faster than `rate`.

    A receive doesn't wait while messages are there, and thousands come at once: the pause after each, even if it is no
    time, lets everybody else have a turn.
    """
    now = asyncio.get_running_loop().time
    while True:
        await outbox.wait_for_room()
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if outbox.closed:
            continue
        text = message.get("text")
        try:
            if text is None:
                await dialog.on_binary(message["bytes"])
            else:
                await dialog.on_text(text)
        except ServerError as error:
            dialog.send_error(error)
        except Exception:
            log.exception("a message broke its handler")
            dialog.send_error(ServerError(ErrorCode.INTERNAL, "the server failed to handle this message"))
        num_messages = message.get(NUM_FRAGMENTS, 1) + len(text or "") // CHARS_PER_MESSAGE
        await asyncio.sleep(rate.spend(now(), num_messages))


async def _write(websocket: WebSocket, outbox: Outbox, stall_timeout_s: float) -> None:
    try:
        while True:
            frame = await outbox.get()
            async with asyncio.timeout(stall_timeout_s):
                match frame:
                    case TextFrame():
                        await websocket.send_text(frame.text)
                    case BinaryFrame():
                        data = frame.build()
                        await websocket.send_bytes(data)
                        await _drain(websocket)
                        frame.sent(len(data))
                    case CloseFrame():
                        await websocket.close(frame.code, frame.reason)
                        return
    except (TimeoutError, WebSocketDisconnect) as error:
        raise _SocketLost from error


async def _drain(websocket: WebSocket) -> None:
    """Wait until the operating system has taken what was sent, so that a peer who doesn't read is noticed.

    A send returns once the data is in the server's own buffer, and waits only if an earlier one is still there. uvicorn
    waits for its buffer before it looks at a message, and writes nothing for one without data.
    """
    await websocket.send({"type": "websocket.send"})
