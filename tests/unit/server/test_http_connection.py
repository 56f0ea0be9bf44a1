"""Connections whose requests do not come: closed in time, and no others."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.http_connection import READ_BYTES, REQUEST_HEAD_S, TimedHttpConnection
from tests.support.virtual_time import run_virtual

REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that is only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol | None = None
        self.is_closed = False
        self.written = b""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def nothing(scope: object, receive: object, send: object) -> None:
    """An application that never answers."""
    await asyncio.Event().wait()


def connect() -> tuple[TimedHttpConnection, Wire]:
    config = uvicorn.Config(nothing, ws="none", log_config=None)
    config.load()
    connection = TimedHttpConnection(config, ServerState(), {}, _loop=asyncio.get_running_loop())
    wire = Wire()
    wire.set_protocol(connection)
    connection.connection_made(wire)
    return connection, wire


@pytest.mark.parametrize("parts", [[], [REQUEST[:1]], [REQUEST[:9], REQUEST[9:-2]]], ids=["none", "a byte", "half"])
def test_a_request_that_does_not_come_closes_the_connection(parts: list[bytes]) -> None:
    async def main() -> None:
        connection, wire = connect()
        for part in parts:
            connection.data_received(part)
            await asyncio.sleep(REQUEST_HEAD_S / 4)
        assert not wire.is_closed
        await asyncio.sleep(REQUEST_HEAD_S)
        assert wire.is_closed

    run_virtual(main())


def test_a_request_that_came_may_take_its_time_and_so_may_the_next_that_has_not_begun() -> None:
    async def main() -> None:
        connection, wire = connect()
        connection.data_received(REQUEST)
        await asyncio.sleep(10 * REQUEST_HEAD_S)
        assert not wire.is_closed
        (answering,) = connection.tasks
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)

    run_virtual(main())


async def test_little_is_read_at_once() -> None:
    loop, sizes, lost = asyncio.get_running_loop(), [], asyncio.Event()
    config = uvicorn.Config(nothing, ws="none", log_config=None)
    config.load()

    class Connection(TimedHttpConnection):
        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    here, there = socket.socketpair()
    await loop.connect_accepted_socket(lambda: Connection(config, ServerState(), {}), here)
    with there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * READ_BYTES)
        there.sendall(bytes(4 * READ_BYTES))
    await lost.wait()
    assert sum(sizes) == 4 * READ_BYTES
    assert max(sizes) <= READ_BYTES
