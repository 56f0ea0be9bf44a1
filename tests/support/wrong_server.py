"""A server that breaks one rule: a proxy in front of a right one that changes, swallows or adds frames."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

Text = Callable[[dict[str, Any]], dict[str, Any] | None]
Binary = Callable[[dict[str, Any], bytes], bytes | None]


def unchanged(message: dict[str, Any]) -> dict[str, Any] | None:
    return message


def pack(header: dict[str, Any], payload: bytes, *, length: str = ">I") -> bytes:
    """Build a binary frame from any header."""
    text = json.dumps(header).encode()
    return struct.pack(length, len(text)) + text + payload


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to frames on their way to the client, None swallows one. `close_code` replaces the server's.

    With `reports` every chunk is reported as shown on behalf of the client.
    """

    text: Text = unchanged
    binary: Binary = pack
    close_code: int | None = None
    reports: bool = False


@asynccontextmanager
async def wrong_server(world: str, fault: Fault) -> AsyncIterator[str]:
    """Run the proxy and give its WebSocket URL."""

    async def handle(client: ServerConnection) -> None:
        assert client.request is not None
        sent = client.request.headers.get("Authorization")
        headers = {} if sent is None else {"Authorization": sent}
        async with connect(world, additional_headers=headers, compression=None, max_size=None, proxy=None) as server:
            forward = asyncio.create_task(_forward(client, server))
            try:
                await _back(server, client, fault)
            except ConnectionClosed:
                await _close(server, client, fault)
            finally:
                forward.cancel()
                await asyncio.gather(forward, return_exceptions=True)

    async with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as listener:
        port = next(iter(listener.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/v1/world"


async def _forward(client: ServerConnection, server: ClientConnection) -> None:
    try:
        async for frame in client:
            await server.send(frame)
        # A client that left without a closing handshake leaves so on the other side too.
        if client.close_code == 1006:
            server.transport.abort()
        else:
            await server.close()
    except ConnectionClosed:
        server.transport.abort()


async def _back(server: ClientConnection, client: ServerConnection, fault: Fault) -> None:
    while True:
        frame = await server.recv()
        if isinstance(frame, str):
            changed = fault.text(json.loads(frame))
            if changed is not None:
                await client.send(json.dumps(changed))
            continue
        (length,) = struct.unpack_from(">I", frame)
        header = json.loads(frame[4 : 4 + length])
        if fault.reports and header["kind"] == "media":
            report = {name: header[name] for name in ("epoch", "run", "chunk_index")}
            await server.send(json.dumps({"type": "playback", "buffered_ms": 0, **report}))
        packed = fault.binary(dict(header), frame[4 + length :])
        if packed is not None:
            await client.send(packed)


async def _close(server: ClientConnection, client: ServerConnection, fault: Fault) -> None:
    code = server.close_code or 1011
    await client.close(fault.close_code or (1011 if code == 1006 else code))
