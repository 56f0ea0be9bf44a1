"""Peers that vanish without a word: no pong, or nobody who reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from fastapi import FastAPI

from clients.python import WorldClient
from server.app import create_app
from server.config import SessionSection
from tests.support.server_client import WorldSocket, fake_config, png, running
from tests.support.server_worker import ScriptedWorker, model_info

PING_S = 0.6
"""A pong has as long as this, also while other processes have the machine."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_peer_that_no_longer_answers_pings_is_noticed() -> None:
    """The connection stays open; the peer only stops reading, and with that answering."""
    config = fake_config()
    app = create_app(config, worker=ScriptedWorker())
    async with running(app, config, ws_ping_s=PING_S) as url:
        await vanish_and_come_back(app, url, pacing="playback")


async def test_a_reader_over_a_slow_link_is_not_lost_in_the_middle_of_a_chunk() -> None:
    """Its pong stands behind a chunk of 1 MB, which takes several times as long as a pong may."""
    config = fake_config()
    app = create_app(config, worker=ScriptedWorker(model_info(width=256, height=192)))
    async with running(app, config, ws_ping_s=0.3, send_buffer_bytes=32768) as url:
        client = await WorldSocket.open(url, ping_interval=None, sock=narrow_socket(url))
        slow = asyncio.create_task(read_slowly(client.connection.transport))
        try:
            started = await client.start(pacing="free", format="rgb24")
            actor = app.state.context.table.find(started["session_id"], None)
            for index in range(2):
                assert (await client.media()).header.chunk_index == index
            assert (actor.parked_at, actor.session.epoch) == (None, 1)
        finally:
            slow.cancel()
            await client.drop()


def narrow_socket(url: str) -> socket.socket:
    """Connect with a receive buffer so small that what is not read is not taken."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
    narrow.connect((host, int(port)))
    narrow.setblocking(False)
    return narrow


async def read_slowly(transport: asyncio.Transport) -> None:
    """Read for a moment, and not for a longer one, again and again."""
    while True:
        transport.pause_reading()
        await asyncio.sleep(0.03)
        transport.resume_reading()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_peer_that_does_not_take_its_chunks_is_given_up() -> None:
    config = fake_config(session=SessionSection(stall_timeout_s=0.3))
    app = create_app(config, worker=ScriptedWorker(model_info(width=256, height=256)))
    async with running(app, config) as url:
        await vanish_and_come_back(app, url, pacing="free", format="rgb24")


async def test_a_python_client_that_is_slower_than_the_model_keeps_its_link() -> None:
    config = fake_config()
    app = create_app(config, worker=ScriptedWorker())
    async with (
        running(app, config, ws_ping_s=PING_S) as url,
        WorldClient(url, prompt="a town", image=png(), pacing="free", max_buffered_chunks=4) as world,
    ):
        (actor,) = app.state.context.table.all()
        await until(lambda: actor.session.paused)
        await asyncio.sleep(2.5 * PING_S)
        for index in range(30):
            chunk = await world.next_chunk()
            assert chunk is not None
            assert (chunk.chunk_index, chunk.header.epoch) == (index, 1)


async def vanish_and_come_back(app: FastAPI, url: str, **fields: str) -> None:
    client = await WorldSocket.open(url, viewer=False, ping_interval=None, max_queue=1)
    try:
        started = await client.start(**fields)
        client.connection.transport.pause_reading()
        actor = app.state.context.table.find(started["session_id"], None)
        assert actor.parked_at is None
        await until(lambda: actor.parked_at is not None)
        async with await WorldSocket.open(url) as again:
            last = actor.session.next_chunk_index - 1
            assert (await again.resume(started["resume_token"], last))["epoch"] == 2
            assert (await again.media()).header.chunk_index == last + 1
    finally:
        await client.drop()


async def test_a_connection_that_never_starts_a_session_costs_no_place() -> None:
    config = fake_config()
    app = create_app(config, worker=ScriptedWorker())
    async with running(app, config) as url:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        with socket.create_connection((host, int(port))):
            async with await WorldSocket.open(url) as client:
                assert app.state.context.table.num_resident == 0
                await client.start()
