"""Watch somebody else's session: `session.watch`, then chunks as they are made. Steers nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from clients.python.chunk import Chunk
from clients.python.errors import BadServerMessage, ConnectFailed, SessionLost
from clients.python.link import Link, LinkClosed, LinkSettings, to_text
from server.wire.messages import (
    PROTOCOL_VERSION,
    ErrorMessage,
    SessionClosedMessage,
    SessionState,
    SessionStateMessage,
    SessionWatch,
    SessionWatching,
)

logger = logging.getLogger(__name__)

REJOIN_DELAYS_S = (0.25, 1.0, 2.0, 4.0)
REJOINABLE_CLOSE_CODES = frozenset({1001, 1005, 1006, 1013})
"""The link broke, or this spectator was too slow; the session goes on."""


class Spectator:
    """A viewer of one session. Use it as an async context manager.

    Name the session by `watch_token`, which its owner has from `session.started`, or, with the owner's own token, by
    `session_id`. Who takes chunks slowly misses some, whole ones; `chunk_index` and `run` show which. A lost link is
    joined again after each of `rejoin_delays_s` in turn.

    Raises (on entering): `ConnectFailed`, or `Refused` if there is no such session; `ValueError` unless it is named in
    one of the two ways.
    """

    def __init__(
        self,
        url: str,
        *,
        watch_token: str | None = None,
        session_id: str | None = None,
        token: str | None = None,
        rejoin_delays_s: Sequence[float] = REJOIN_DELAYS_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if (watch_token is None) == (session_id is None):
            raise ValueError("watch_token: expected exactly one of watch_token and session_id")
        fields = {
            "type": "session.watch",
            "protocol": PROTOCOL_VERSION,
            "watch_token": watch_token,
            "session_id": session_id,
        }
        self._text = to_text(SessionWatch, fields)
        self._settings = LinkSettings(url=url, token=token)
        self._rejoin_delays_s = tuple(rejoin_delays_s)
        self._clock = clock
        self._sleep = sleep
        self._link: Link | None = None
        self._watching: SessionWatching | None = None
        self._state = SessionState.ACTIVE
        self._init = b""
        self._fatal: ErrorMessage | None = None

    async def __aenter__(self) -> Self:
        await self._join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._link is not None:
            await self._link.close()

    @property
    def session(self) -> SessionWatching:
        """What the server said when it was last joined."""
        if self._watching is None:
            raise RuntimeError("nothing is watched: use `async with Spectator(...)`")
        return self._watching

    @property
    def state(self) -> SessionState:
        """The session's state, as of the last chunk or message that was taken."""
        return self._state

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Iterate over the chunks; ends when the session is closed. Raises `SessionLost` or `BadServerMessage`."""
        while (chunk := await self.next_chunk()) is not None:
            yield chunk

    async def next_chunk(self) -> Chunk | None:
        """Take the next chunk, None when the session is closed. Raises as `chunks` does."""
        while self._link is not None and self._state is not SessionState.CLOSED:
            match await self._link.receive():
                case (header, payload):
                    if header.kind == "media":
                        return Chunk(
                            header=header,
                            payload=payload,
                            format=self.session.format,
                            fps=self.session.fps,
                            received_s=self._clock(),
                            init=self._init,
                        )
                    self._init = payload
                case SessionStateMessage(state=state):
                    self._state = state
                case SessionClosedMessage():
                    self._state = SessionState.CLOSED
                    return None
                case ErrorMessage() as error:
                    self._fatal = error if error.fatal else self._fatal
                    logger.warning("the server reports %s: %s", error.code, error.message)
                case LinkClosed() as closed:
                    await self._rejoin(closed)
                case message:
                    raise BadServerMessage(f"{message.type} to a spectator")
        return None

    async def _join(self) -> None:
        link = await Link.open(self._settings)
        self._watching = await link.watch(self._text)
        self._link, self._state = link, self._watching.state

    async def _rejoin(self, closed: LinkClosed) -> None:
        """Join once more. Raises `SessionLost`, or `Refused` if the session has ended in the meantime."""
        reason = self._fatal.message if self._fatal else closed.reason or "the link broke"
        self._link = None
        if closed.code in REJOINABLE_CLOSE_CODES:
            for delay_s in self._rejoin_delays_s:
                await self._sleep(delay_s)
                try:
                    return await self._join()
                except ConnectFailed as error:
                    logger.info("joining again failed: %s", error)
        raise SessionLost(f"the session cannot be watched any more: {reason}", close_code=closed.code)
