"""HTTP connections whose requests have to come in time, and of which little is read at once, as the WebSockets too.

uvicorn waits for the first request, and for the rest of any, for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.connection_config import ConnectionConfig

REQUEST_HEAD_S = 10.0
"""How long the line and headers of a request may take from its first byte, the first one's from the connection on."""

READ_BYTES = 16 * 1024
"""Most that is read at once. All of it is parsed before anybody else has a turn, and a frame may have six bytes only.

asyncio would read 256 KiB: 43690 empty frames took 130 to 180 ms of CPU, and a request has several turns to wait for.
"""


MAX_IDLE_CONNECTIONS = 256
"""Connections without a request under way: before the first one, between two, or in a head that is not whole.

One more takes the place of the one that has been so for longest: a flood of connections that say nothing would take all
file descriptors, and nobody could even ask how the server is. Who means it sends its request at once.
"""

BODY_RECHECK_S = 1.0
"""How long after its time a body is looked at again whose request is still being answered."""


class TimedHttpConnection(H11Protocol):
    """Closes a connection that begins a request and does not end its headers, or was answered and sends on its body.

    A body that somebody waits for is bounded in `shared_bounds.py`, which answers first.
    """

    def __init__(self, config: ConnectionConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._body_timeout_s = config.limits.body_timeout_s
        self._idle = config.idle_connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Undocumented, and without effect on other event loops than asyncio's own.
        cast("Any", transport).max_size = READ_BYTES
        super().connection_made(cast("asyncio.Transport", transport))
        self._watch_head()
        self._note_idle()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_waiting = self.transport.get_protocol() is self and self.conn.their_state is h11.IDLE
        if not is_waiting:
            self._stop_watching()
            self._idle.pop(self, None)
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._watch_head()

    def handle_events(self) -> None:
        super().handle_events()
        is_sending = self.transport.get_protocol() is self and self.conn.their_state is h11.SEND_BODY
        if not is_sending:
            self._stop_watching_body()
        elif self._body_timer is None:
            self._watch_body(self._body_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._note_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._stop_watching()
        self._stop_watching_body()
        super().connection_lost(exc)

    def _note_idle(self) -> None:
        """Count from now as idle, and close who has been so for longest if those are too many."""
        self._idle.pop(self, None)
        self._idle[self] = None
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.close()

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(REQUEST_HEAD_S, self._head_expired)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_body(self, for_s: float) -> None:
        self._body_timer = self.loop.call_later(for_s, self._body_expired)

    def _stop_watching_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_expired(self) -> None:
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self._watch_body(BODY_RECHECK_S)

    def _head_expired(self) -> None:
        self._head_timer = None
        self.transport.close()
