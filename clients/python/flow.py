"""Whether the server is to make chunks: not while the caller paused the session, nor while too many wait to be taken.

The socket is read all the time, because a reader that stands still answers no pings, and the server then parks its
session. So a client that falls behind says `session.pause`, and `session.unpause` once it has caught up by half.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from clients.python.buffer import ChunkBuffer
from clients.python.link import to_text
from server.wire.messages import SessionPause, SessionUnpause


class Flow:
    """The two reasons to pause, and the task that keeps one of them. `send` takes the text of a message."""

    def __init__(self, buffer: ChunkBuffer, send: Callable[[str], Awaitable[None]]) -> None:
        self._buffer = buffer
        self._send = send
        self._has_held = False
        self.is_held = False
        """Too many chunks wait to be taken."""
        self.is_paused = False
        """The caller wants a pause."""

    async def run(self) -> None:
        """Hold the server while the buffer is full, until cancelled."""
        while True:
            await self._buffer.full()
            self.is_held = self._has_held = True
            await self.say_again()
            await self._buffer.half_empty()
            self.is_held = False
            await self.say_again()

    async def say_again(self) -> None:
        """Say what is wanted, for example on a new link: what was said last may have been lost with the old one."""
        if not self._has_held:
            return
        if self.is_held or self.is_paused:
            await self._send(to_text(SessionPause, {"type": "session.pause"}))
        else:
            await self._send(to_text(SessionUnpause, {"type": "session.unpause"}))
