"""A raw socket for checks: sends anything, and checks every frame that comes by the rules that always hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from clients.conformance.errors import CheckFailed, ConformanceError, require
from clients.conformance.stream import StreamRules, read_binary, read_text
from server.wire.messages import PROTOCOL_VERSION, ChunkHeader

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A binary frame."""

    header: ChunkHeader
    payload: bytes

    @property
    def chunk_index(self) -> int:
        assert self.header.chunk_index is not None
        return self.header.chunk_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that is checked. `world` is its WebSocket, `http` its other address without a slash at the end.

    `image` and `prompt` begin every session. `answer_s` is how long an answer may take, `quiet_s` how long nothing must
    come where nothing may, at least.
    """

    world: str
    http: str
    token: str | None
    image: dict[str, str]
    prompt: str
    answer_s: float
    quiet_s: float


class Socket:
    """One WebSocket. `viewer`: each chunk that comes is reported as shown, so that the next is made.

    `applied` has the events of every chunk that had some, also of chunks that were read over.
    """

    def __init__(self, connection: ClientConnection, target: Target, *, viewer: bool) -> None:
        self._connection = connection
        self.target = target
        self.viewer = viewer
        self.started: Message = {}
        self.applied: list[list[int]] = []
        self._rules: StreamRules | None = None
        self._longest_wait_s = 0.0
        self._waits_since_s: float | None = None
        self._next_chunk_index: int | None = 0

    @classmethod
    async def open(cls, target: Target, *, viewer: bool = True, token: str | None = None) -> Self:
        """Connect, with the target's token unless another is given. Raises `ConformanceError`."""
        token = target.token if token is None else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection = await connect(
                target.world,
                additional_headers=headers,
                compression=None,
                max_size=None,
                open_timeout=target.answer_s,
                proxy=None,
            )
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise ConformanceError(f"cannot connect to {target.world}: {error}") from error
        return cls(connection, target, viewer=viewer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave no session behind, so that a server with a single place can be checked."""
        if self.started.get("type") == "session.started":
            try:
                await self._connection.send('{"type": "session.close"}')
                async with asyncio.timeout(self.target.answer_s):
                    while True:
                        await self._connection.recv()
            except (ConnectionClosed, TimeoutError):
                self.started = {}
        await self._connection.close()

    # ------------------------------------------------------------ sending

    async def send(self, type: str, **fields: Any) -> None:
        await self.send_raw(json.dumps({"type": type, **fields}))

    async def send_raw(self, frame: str | bytes) -> None:
        try:
            await self._connection.send(frame)
        except ConnectionClosed as error:
            raise CheckFailed(f"the server closed the socket: {_closing(error)}") from error

    async def start(self, **fields: Any) -> Message:
        """Start a session and return `session.started`."""
        await self.send("session.start", **self.start_fields(**fields))
        return await self.expect("session.started")

    def start_fields(self, **fields: Any) -> Message:
        """Return what begins a session, without the type; None leaves a field out."""
        all_fields = {"protocol": PROTOCOL_VERSION, "prompt": self.target.prompt, "image": self.target.image, **fields}
        return {name: value for name, value in all_fields.items() if value is not None}

    async def resume(self, token: str, last_chunk_index: int) -> Message:
        """Take a session up and return `session.started`."""
        self._next_chunk_index = last_chunk_index + 1
        await self.send(
            "session.start", protocol=PROTOCOL_VERSION, resume_token=token, last_chunk_index=last_chunk_index
        )
        return await self.expect("session.started")

    async def report(self, header: ChunkHeader) -> None:
        await self.send(
            "playback", epoch=header.epoch, run=header.run, chunk_index=header.chunk_index, buffered_ms=100.0
        )

    # ------------------------------------------------------------ receiving

    async def receive(self) -> Message | Media:
        """Return the next frame. Raises `CheckFailed` if it breaks a rule, none comes, or the socket is closed."""
        async with self._within("nothing"):
            return await self._receive()

    @asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """Bound a wait as a whole, also while other frames keep coming."""
        try:
            async with asyncio.timeout(self.target.answer_s):
                yield
        except TimeoutError as error:
            raise CheckFailed(f"{what} came within {self.target.answer_s:g} s") from error

    async def _receive(self) -> Message | Media:
        try:
            frame = await self._connection.recv()
        except ConnectionClosed as error:
            raise CheckFailed(f"the server closed the socket: {_closing(error)}") from error
        if isinstance(frame, str):
            message = read_text(frame)
            self._note(message)
            return message
        header, payload = read_binary(frame)
        require(self._rules is not None, "a binary frame came before session.started")
        assert self._rules is not None
        self._rules.check(header, payload)
        media = Media(header=header, payload=payload)
        if header.kind == "media":
            self._note_wait()
        if header.applied:
            self.applied.append([event.event_id for event in header.applied])
        if self.viewer and header.kind == "media":
            await self._report_if_open(media)
        return media

    async def _report_if_open(self, media: Media) -> None:
        try:
            await self.report(media.header)
        except CheckFailed:
            # The socket is closing; the next receive says how.
            return

    def _note(self, message: Message) -> None:
        if message["type"] in ("session.started", "session.watching"):
            self.started = message
            self._waits_since_s = asyncio.get_running_loop().time()
            self._rules = StreamRules(message, next_chunk_index=self._next_chunk_index)

    def _note_wait(self) -> None:
        """Note how long this chunk was waited for."""
        now = asyncio.get_running_loop().time()
        if self._waits_since_s is not None:
            self._longest_wait_s = max(self._longest_wait_s, now - self._waits_since_s)
        self._waits_since_s = now

    @property
    def quiet_s(self) -> float:
        """How long nothing must come: twice as long as any chunk of this socket took, and at least as was told."""
        return min(self.target.answer_s, max(self.target.quiet_s, 2.0 * self._longest_wait_s))

    async def expect(self, type: str, **fields: Any) -> Message:
        """Receive until a message of this type and with these fields; an error of the server's fails the check."""
        shown = "".join(f" with {name} {value!r}" for name, value in fields.items())
        async with self._within(f"no {type}{shown}"):
            while True:
                frame = await self._receive()
                if isinstance(frame, Media):
                    continue
                if frame["type"] == type and all(frame.get(name) == value for name, value in fields.items()):
                    return frame
                if frame["type"] == "error":
                    raise CheckFailed(f"expected {type}, got the error {frame['code']}: {frame['message']}")

    async def expect_error(self, *codes: str, **fields: Any) -> Message:
        """Receive until an error, which must have one of the codes and these fields."""
        wanted = " or ".join(codes)
        async with self._within(f"no error {wanted}"):
            frame = await self._receive()
            while isinstance(frame, Media) or frame["type"] != "error":
                frame = await self._receive()
        code, text = frame["code"], frame["message"]
        require(code in codes, f"expected the error {wanted}, got {code}: {text}")
        for name, value in fields.items():
            require(frame.get(name) == value, f"{code}: {name} is {frame.get(name)!r}, expected {value!r}")
        require(bool(text), f"{code}: the message is empty")
        return frame

    async def media(self) -> Media:
        """Return the next media chunk; messages before it are read over."""
        async with self._within("no chunk"):
            while True:
                frame = await self._receive()
                if isinstance(frame, Media) and frame.header.kind == "media":
                    return frame
                if not isinstance(frame, Media) and frame["type"] == "error":
                    raise CheckFailed(f"expected a chunk, got the error {frame['code']}: {frame['message']}")

    async def alive(self) -> None:
        """Check that the socket still answers."""
        await self.send("ping", t=7)
        await self.expect("pong", t=7)

    async def no_media(self, *, why: str, num_late: int = 0) -> None:
        """Check that media chunks end: after at most `num_late` of them none comes for a while.

        How late those come does not matter, so that a server under load does not fail.
        """
        for num_chunks in range(num_late + 1):
            media = await self._next_media()
            if media is None:
                return
            text = f", {num_chunks + 1} of them" if num_late else ""
            require(num_chunks < num_late, f"chunk {media.chunk_index} came {why}{text}")

    async def _next_media(self) -> Media | None:
        """Return the next media chunk, None if none comes for a while; messages are read over."""
        try:
            async with asyncio.timeout(self.quiet_s):
                while True:
                    frame = await self._receive()
                    if isinstance(frame, Media) and frame.header.kind == "media":
                        return frame
        except TimeoutError:
            # The quiet is no part of the wait for the chunk after it.
            self._waits_since_s = asyncio.get_running_loop().time()
            return None

    async def closed(self) -> int:
        """Read until the server closes, and return its close code; 1006 if it did not say one."""
        try:
            async with asyncio.timeout(self.target.answer_s):
                while True:
                    frame = await self._connection.recv()
                    if isinstance(frame, str):
                        read_text(frame)
        except TimeoutError as error:
            raise CheckFailed(f"the server did not close the socket within {self.target.answer_s:g} s") from error
        except ConnectionClosed as error:
            self.started = {}
            return 1006 if error.rcvd is None else error.rcvd.code

    async def drop(self) -> None:
        """Lose the connection without a closing handshake."""
        self.started = {}
        self._connection.transport.abort()
        await self._connection.wait_closed()


def _closing(error: ConnectionClosed) -> str:
    return "without a word" if error.rcvd is None else f"{error.rcvd.code} {error.rcvd.reason}".rstrip()
