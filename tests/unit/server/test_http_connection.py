"""Connections whose requests do not come: closed in time, and no others."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from uvicorn.server import ServerState

from server.config import LimitsSection
from server.connection_config import ConnectionConfig
from server.http_connection import (
    BODY_RECHECK_S,
    MAX_IDLE_CONNECTIONS,
    READ_BYTES,
    REQUEST_HEAD_S,
    TimedHttpConnection,
)
from tests.support.virtual_time import run_virtual, settle
from tests.support.wires import Wire

REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
BODY_REQUEST = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n"
LIMITS = LimitsSection(body_timeout_s=20.0)


async def nothing(scope: object, receive: object, send: object) -> None:
    """An application that never answers."""
    await asyncio.Event().wait()


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers at once and reads no body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def load_config(app: Any = nothing) -> ConnectionConfig:
    config = ConnectionConfig(app, limits=LIMITS, ws="none", log_config=None)
    config.load()
    return config


def connect(app: Any = nothing, config: ConnectionConfig | None = None) -> tuple[TimedHttpConnection, Wire]:
    config = config or load_config(app)
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


def test_of_too_many_idle_connections_the_one_that_waits_longest_is_closed() -> None:
    async def main() -> None:
        config = load_config(answer)
        busy, busy_wire = connect(config=config)
        busy.data_received(BODY_REQUEST)
        answered, answered_wire = connect(config=config)
        wires = [connect(config=config)[1] for _ in range(MAX_IDLE_CONNECTIONS - 1)]
        answered.data_received(REQUEST)
        await settle()
        assert answered_wire.written
        assert not any(wire.is_closed for wire in (busy_wire, answered_wire, *wires))
        newest = connect(config=config)[1]
        assert [wire.is_closed for wire in (busy_wire, answered_wire, newest)] == [False] * 3
        assert [wire.is_closed for wire in wires] == [True] + [False] * (MAX_IDLE_CONNECTIONS - 2)
        assert len(config.idle_connections) == MAX_IDLE_CONNECTIONS

    run_virtual(main())


def test_a_body_that_goes_on_after_the_answer_closes_the_connection() -> None:
    async def main() -> None:
        connection, wire = connect(answer)
        connection.data_received(BODY_REQUEST)
        for _ in range(4):
            await asyncio.sleep(LIMITS.body_timeout_s / 5)
            connection.data_received(b"x")
        assert not wire.is_closed
        await asyncio.sleep(LIMITS.body_timeout_s / 5)
        assert wire.is_closed

    run_virtual(main())


def test_a_body_that_came_in_time_closes_nothing_and_the_next_has_its_own_time() -> None:
    async def main() -> None:
        connection, wire = connect(answer)
        for _ in range(5):
            connection.data_received(BODY_REQUEST)
            for _ in range(5):
                await asyncio.sleep(LIMITS.body_timeout_s / 6)
                connection.data_received(b"xx")
        await settle()
        assert not wire.is_closed
        assert wire.written.count(b"200 OK") == 5

    run_virtual(main())


def test_a_body_that_somebody_waits_for_is_left_to_who_answers() -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def answer_late(scope: Any, receive: Any, send: Any) -> None:
            await over.wait()
            await answer(scope, receive, send)

        connection, wire = connect(answer_late)
        connection.data_received(BODY_REQUEST)
        await asyncio.sleep(10 * LIMITS.body_timeout_s)
        assert not wire.is_closed
        over.set()
        await asyncio.sleep(BODY_RECHECK_S)
        assert wire.is_closed

    run_virtual(main())


async def test_little_is_read_at_once() -> None:
    loop, sizes, lost = asyncio.get_running_loop(), [], asyncio.Event()
    config = ConnectionConfig(nothing, limits=LIMITS, ws="none", log_config=None)
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
