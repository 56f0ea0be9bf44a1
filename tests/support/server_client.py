"""A small client of the `world` dialect for tests, and a server of one test's own: uvicorn on a loopback port."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from fastapi import FastAPI
from PIL import Image
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from server.config import ModelSection, ServerConfig
from server.serving import world_server
from server.wire.binary import unpack_chunk
from server.wire.messages import ChunkHeader

ANSWER_TIMEOUT_S = 30.0
"""Only there to end a test that hangs."""

EXPECT_TIMEOUT_S = 60.0
"""The same for a message that does not come while others do, such as chunks."""

PATIENT: dict[str, Any] = {
    "max_size": None,
    "proxy": None,
    "compression": None,
    "open_timeout": ANSWER_TIMEOUT_S,
    "ping_interval": None,
}
"""Options of a test's connection, which takes what comes and is not given up because the machine is busy."""

PING_S = 60.0
"""How often these servers ping, and how long a pong may take, unless that is what a test is about."""


def png(width: int = 32, height: int = 32, *, format: str = "PNG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height), "teal" if mode == "RGB" else 0).save(buffer, format=format)
    return buffer.getvalue()


def image_field(image: bytes | None = None) -> dict[str, str]:
    return {"base64": base64.b64encode(png() if image is None else image).decode()}


def fake_config(**sections: Any) -> ServerConfig:
    """A configuration of the fake model; its checkpoint is the demo's folder, for the start images."""
    model = sections.pop(
        "model",
        ModelSection(
            name="fake", checkpoint="package:worldmodel/data/demo_world", width=32, height=32, fps=12, precision="fp32"
        ),
    )
    return ServerConfig(model=model, **sections)


@dataclass(frozen=True)
class Chunk:
    """One binary frame."""

    header: ChunkHeader
    payload: bytes


Received = dict[str, Any] | Chunk


NARROW_BYTES = 32 * 1024
"""A buffer of the system that a chunk of pixels does not fit into."""


def narrow_socket(url: str) -> socket.socket:
    """Connect with a receive buffer so small that what is not read is not taken."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
    narrow.connect((host, int(port)))
    narrow.setblocking(False)
    return narrow


class WorldSocket:
    """Sends dicts, receives dicts and chunks, and keeps them. With `viewer` every chunk is reported as shown."""

    def __init__(self, connection: ClientConnection, *, viewer: bool) -> None:
        self.connection = connection
        self.viewer = viewer
        self.started: dict[str, Any] = {}
        self.chunks: list[Chunk] = []
        self.messages: list[dict[str, Any]] = []

    @classmethod
    async def open(cls, url: str, *, viewer: bool = True, **options: Any) -> Self:
        """Connect; `url` is the server's http URL."""
        world = url.replace("http://", "ws://") + "v1/world"
        return cls(await connect(world, **{**PATIENT, **options}), viewer=viewer)

    async def send(self, type: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": type, **fields}))

    async def start(self, **fields: Any) -> dict[str, Any]:
        """Start a session and return `session.started`; `session.queued` may come before."""
        await self.send("session.start", **{"protocol": 1, "prompt": "a town", "image": image_field(), **fields})
        self.started = await self.expect("session.started")
        return self.started

    async def resume(self, token: str, last_chunk_index: int, **fields: Any) -> dict[str, Any]:
        await self.send("session.start", protocol=1, resume_token=token, last_chunk_index=last_chunk_index, **fields)
        self.started = await self.expect("session.started")
        return self.started

    async def receive(self) -> Received:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            frame = await self.connection.recv()
        if isinstance(frame, bytes):
            header, payload = unpack_chunk(frame)
            chunk = Chunk(header=header, payload=bytes(payload))
            self.chunks.append(chunk)
            if self.viewer and header.kind == "media":
                await self.report(header)
            return chunk
        message: dict[str, Any] = json.loads(frame)
        self.messages.append(message)
        return message

    async def expect(self, type: str, **fields: Any) -> dict[str, Any]:
        """Receive until a message of this type with these fields; an unexpected error fails the test."""
        async with asyncio.timeout(EXPECT_TIMEOUT_S):
            while True:
                message = await self.receive()
                if isinstance(message, Chunk):
                    continue
                if message["type"] == type and all(message.get(name) == value for name, value in fields.items()):
                    return message
                assert message["type"] != "error", message

    async def error(self, **fields: Any) -> dict[str, Any]:
        return await self.expect("error", **fields)

    async def media(self) -> Chunk:
        """Receive the next media chunk."""
        while True:
            message = await self.receive()
            if isinstance(message, Chunk) and message.header.kind == "media":
                return message
            assert isinstance(message, Chunk) or message["type"] != "error", message

    async def report(self, header: ChunkHeader, *, buffered_ms: float = 100.0) -> None:
        # A socket that is closing is found out by the next receive.
        with suppress(ConnectionClosed):
            await self.send(
                "playback",
                epoch=header.epoch,
                run=header.run,
                chunk_index=header.chunk_index,
                buffered_ms=buffered_ms,
            )

    async def closed(self) -> int:
        """Receive until the server closes; returns the close code."""
        try:
            while True:
                await self.receive()
        except ConnectionClosed as error:
            return 1006 if error.rcvd is None else error.rcvd.code

    async def drop(self) -> None:
        """Lose the connection without a closing handshake."""
        self.connection.transport.abort()
        await self.connection.wait_closed()

    async def close(self) -> None:
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@asynccontextmanager
async def running(
    app: FastAPI, config: ServerConfig, *, ws_ping_s: float = PING_S, send_buffer_bytes: int | None = None
) -> AsyncIterator[str]:
    """Serve an application in this event loop and give its URL. `ws_ping_s` is both interval and time-out of pings.

    `send_buffer_bytes` bounds what the system takes of what a client does not read.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    server = world_server(app, config)
    server.config.ws_ping_interval = server.config.ws_ping_timeout = ws_ping_s
    started = asyncio.Event()
    startup = server.startup

    async def startup_and_tell(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = startup_and_tell  # type: ignore[method-assign]
    task = asyncio.create_task(server._serve([listener]))
    try:
        await started.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await task
        listener.close()
