"""WebSocket connections of which no frame is free: fragments and control frames are counted, as messages are elsewhere.

    message in N fragments   ─> at most `limits.max_fragments`; counts as N where the rate of messages is bounded
    ping, pong               ─> at most `limits.max_control_frames_per_second`

uvicorn takes any number of both. A frame needs six bytes and costs as much as a small message, and the fragments of a
message that never ends are kept.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from server.connection_config import ConnectionConfig
from server.errors import CloseCode
from server.limits import NUM_FRAGMENTS, RateLimiter


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Closes a socket that sends a message in too many fragments, or control frames too fast."""

    def __init__(self, config: ConnectionConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._limits = config.limits
        self._control_rate = RateLimiter(config.limits.max_control_frames_per_second)
        self._fragments_of_queued: deque[int] = deque()
        self._is_refused = False

    # Frames that came with the refused one are still handed to these methods; uvicorn drops text and binary ones.

    def handle_cont(self, event: Frame) -> None:
        if self._is_refused:
            return
        if len(self.frames) >= self._limits.max_fragments:
            text = f"a message has more than {self._limits.max_fragments} fragments (limits.max_fragments)"
            self._refuse(CloseCode.TOO_LARGE, text)
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._may_control():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._may_control():
            super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        num_fragments, num_queued = len(self.frames), self.queue.qsize()
        super().send_receive_event_to_app()
        if self.queue.qsize() > num_queued:
            self._fragments_of_queued.append(num_fragments)

    async def receive(self) -> Any:
        """Return what comes next; a message says in how many fragments it came."""
        message = cast("dict[str, Any]", await super().receive())
        if message["type"] == "websocket.receive":
            message[NUM_FRAGMENTS] = self._fragments_of_queued.popleft()
        return message

    def _may_control(self) -> bool:
        if self._is_refused:
            return False
        if self._control_rate.take(self.loop.time()):
            return True
        most = self._limits.max_control_frames_per_second
        self._refuse(
            CloseCode.POLICY, f"more than {most:g} pings and pongs a second (limits.max_control_frames_per_second)"
        )
        return False

    def _refuse(self, code: int, reason: str) -> None:
        """Close the connection; the application hears of it as of any other end."""
        self._is_refused = True
        self.stop_keepalive()
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self.disconnected = True
        self.writable.set()
        self.transport.close()
