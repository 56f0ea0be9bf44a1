"""WebSocket connections of which no frame is free: fragments and control frames are counted, as messages are elsewhere.

    message in N fragments   ─> at most `limits.max_fragments`; counts as N where the rate of messages is bounded
    ping, pong               ─> at most `limits.max_control_frames_per_second`
    text that is not UTF-8   ─> closed with 1007, as RFC 6455 has it
    no pong in time          ─> lost; while a frame is being written its pong stands behind it, and is waited for

uvicorn takes any number of both. A frame needs six bytes and costs as much as a small message, and the fragments of a
message that never ends are kept. It also closes a socket while bytes of the refused message arrive, on which the system
resets the connection, and the client never reads why.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame
from websockets.protocol import State

from server.connection_config import ConnectionConfig
from server.errors import CloseCode
from server.limits import NUM_FRAGMENTS, RateLimiter

DISCARD_S = 10.0
DISCARD_MESSAGES = 4
"""How long, and how many of the largest messages, a client that was refused may send on before the connection ends."""

QUIET_S = 0.5
"""How long it must have sent nothing for the connection to end earlier.

Ending our side at once would tell it as well, but `websockets` clients then fail in the middle of what they send.
"""


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Closes a socket that sends a message in too many fragments, or control frames too fast.

    What a refused client still sends is read and dropped, so that it comes to read the close frame.
    """

    def __init__(self, config: ConnectionConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._limits = config.limits
        self._message_bytes_key = config.message_bytes_key
        self._control_rate = RateLimiter(config.limits.max_control_frames_per_second)
        self._fragments_of_queued: deque[int] = deque()
        self._is_refused = False
        self._num_discarded_bytes = 0

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            return
        self._num_discarded_bytes += len(data)
        if self._num_discarded_bytes > DISCARD_MESSAGES * self.config.ws_max_size:
            self.transport.close()

    def handle_parser_exception(self) -> None:
        """Refuse what is no WebSocket frame, or a message that is too large, with the code it was found to deserve."""
        refusal = self.conn.close_sent
        assert refusal is not None
        reason = refusal.reason
        if isinstance(self.conn.parser_exc, PayloadTooBig):
            # The parser's own close frame, which waits to be sent, does not say which setting it is about.
            self.conn.data_to_send()
            self.conn.state = State.OPEN
            reason = f"a message has more than {self.config.ws_max_size} bytes ({self._message_bytes_key})"
        self._refuse(refusal.code, reason)

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

    def resume_writing(self) -> None:
        """Give the pong its time from now on: the system has taken the frame that a ping or its pong stood behind."""
        super().resume_writing()
        self._wait_for_pong_again()

    def keepalive_timeout(self) -> None:
        """Give the peer up, but not while it still takes a frame: how long that may last the endpoint says.

        uvicorn's `writable` is set unless more waits in the transport than the system takes at once.
        """
        if self.writable.is_set() or self.transport.is_closing():
            super().keepalive_timeout()
        else:
            self._wait_for_pong_again()

    def _wait_for_pong_again(self) -> None:
        if self.pong_timer is not None:
            assert self.ping_timeout is not None
            self.pong_timer.cancel()
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)

    def send_receive_event_to_app(self) -> None:
        num_fragments, num_queued = len(self.frames), self.queue.qsize()
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(b"".join(self.frames)):
            # uvicorn would close it too, with a traceback in the log.
            self._refuse(CloseCode.BAD_DATA, "a text frame is not UTF-8")
            return
        super().send_receive_event_to_app()
        if self.queue.qsize() > num_queued:
            self._fragments_of_queued.append(num_fragments)

    async def send(self, message: Any) -> None:
        """Send what the application says; an HTTP answer, once it is whole, is the end of the handshake too."""
        if self.transport.is_closing():
            # That the connection is lost is heard in the next turn; what is written until then asyncio warns of.
            await asyncio.sleep(0)
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            # Else uvicorn logs, as an error of the application, that a client it refused was never answered.
            self.handshake_complete = True

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
        """Send a close frame and read nothing more; the application hears of it as of any other end."""
        self._is_refused = True
        self.stop_keepalive()
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self.disconnected = True
        self.writable.set()
        if not self.handshake_complete:
            self.transport.close()
            return
        self._wait_until_quiet(self.loop.time() + DISCARD_S, -1)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _wait_until_quiet(self, until: float, num_discarded_bytes: int) -> None:
        """Close the connection once no more has come since it was looked at last, or its time is over."""
        if self._num_discarded_bytes == num_discarded_bytes or self.loop.time() >= until:
            self.transport.close()
            return
        # uvicorn leaves a connection alone that has such a timer, and cancels it when the connection is lost.
        self.close_timer = self.loop.call_later(QUIET_S, self._wait_until_quiet, until, self._num_discarded_bytes)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
