"""Peers that vanish without a word: no pong, or nobody who reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from fastapi import FastAPI

from clients.python import WorldClient
from server.app import create_app
from server.config import SessionSection
from server.websocket_connection import BoundedWebSocket
from tests.support.server_client import NARROW_BYTES, WorldSocket, fake_config, narrow_socket, png, running
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


async def test_a_reader_over_a_slow_link_is_not_lost_in_the_middle_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pong stands behind a chunk, which takes several times as long as a pong may."""
    expire, expired = BoundedWebSocket.keepalive_timeout, []

    def note_and_expire(link: BoundedWebSocket) -> None:
        expired.append(link)
        expire(link)

    monkeypatch.setattr(BoundedWebSocket, "keepalive_timeout", note_and_expire)
    config = fake_config()
    app = create_app(config, worker=ScriptedWorker(model_info(width=96, height=96)))
    async with running(app, config, ws_ping_s=PING_S, send_buffer_bytes=NARROW_BYTES) as url:
        client = await WorldSocket.open(url, viewer=False, sock=narrow_socket(url))
        try:
            started = await client.start(pacing="free", format="rgb24")
            actor = app.state.context.table.find(started["session_id"], None)
            client.connection.transport.pause_reading()
            await until(lambda: len(expired) >= 2)
            client.connection.transport.resume_reading()
            for index in range(3):
                assert (await client.media()).header.chunk_index == index
            assert (actor.parked_at, actor.session.epoch) == (None, 1)
        finally:
            await client.drop()


async def test_a_peer_that_does_not_take_its_chunks_is_given_up() -> None:
    """Its chunks fit into no buffer, and yet who reads takes one in a small part of the time that it has."""
    config = fake_config(session=SessionSection(stall_timeout_s=0.5))
    app = create_app(config, worker=ScriptedWorker(model_info(width=96, height=96)))
    async with running(app, config, send_buffer_bytes=NARROW_BYTES) as url:
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
    client = await WorldSocket.open(url, viewer=False, max_queue=1, sock=narrow_socket(url))
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
