"""The `world` dialect over real sockets: reset and close."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.server_client import image_field, png
from tests.support.server_scripted import Server, decode, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as it:
        yield it


async def test_reset_begins_a_run_on_the_same_stream(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start(seed=5)
    await socket.media()
    await socket.send("session.pause")
    await socket.expect("session.state", state="paused")
    await socket.send("session.event", event_id=8, prompt="x")
    await socket.expect("event.queued")
    await socket.send("session.reset", prompt="night")
    assert (await socket.expect("event.dropped"))["reason"] == "reset"
    await socket.expect("session.state", state="resetting", run=0)
    await socket.expect("session.state", state="paused", run=1)
    await socket.send("session.unpause")
    while (chunk := await socket.media()).header.run == 0:
        pass
    assert (chunk.header.run, chunk.header.chunk_index, chunk.header.epoch) == (1, 0, 1)
    session = server.session(started)
    assert (session.prompt, session.seed, session.num_resets) == ("night", 5, 1)
    assert decode(socket.chunks) == sum(it.header.num_frames for it in socket.chunks)
    await socket.send("session.event", event_id=7, prompt="x")
    await socket.error(code="stale", event_id=7)


async def test_a_bad_image_leaves_the_session_as_it_was(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.send("session.reset", image=image_field(b"nothing"))
    await socket.error(code="bad_image", field="image.base64")
    await socket.media()
    assert server.session(started).num_resets == 0
    await socket.send("session.reset", image=image_field(png(64, 16)), seed=1)
    await socket.expect("session.state", state="active", run=1)


async def test_close_answers_everything_and_frees_the_place(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.send("session.pause")
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued")
    await socket.send("session.close")
    assert (await socket.expect("event.dropped"))["reason"] == "closed"
    assert (await socket.expect("session.closed"))["session_id"] == started["session_id"]
    assert await socket.closed() == 1000
    assert server.worker.sessions == {}
    assert server.context.table.num_resident == 0


async def test_chunks_committed_before_a_close_are_still_delivered(server: Server) -> None:
    socket = await server.connect()
    session = server.session(await socket.start())
    await socket.send("session.close")
    assert await socket.closed() == 1000
    media = [chunk for chunk in socket.chunks if chunk.header.kind == "media"]
    assert len(media) == len(session.ticks)
