"""The `world` dialect over real sockets: reset and close."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.start_images import ImageReader
from tests.support.server_client import image_field, png
from tests.support.server_scripted import Server, decode, serving
from tests.support.server_worker import ScriptedWorker, model_info


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


async def test_a_close_before_the_start_answers_what_was_held() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, waiting = await server.connect(), await server.connect()
        await first.start()
        await waiting.send("session.start", protocol=1, prompt="", image=image_field())
        await waiting.expect("session.queued")
        for event_id in (0, 1):
            await waiting.send("session.event", event_id=event_id, prompt="x")
        await waiting.send("session.close")
        for event_id in (0, 1):
            await waiting.error(code="not_started", event_id=event_id)
        assert await waiting.closed() == 1000
        await server.until(lambda: server.context.table.num_waiting == 0)


async def test_a_close_behind_a_held_reset_closes_the_session(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = asyncio.Event()
    read = ImageReader.read

    async def slow_read(*args: Any, **options: Any) -> Any:
        await may_read.wait()
        return await read(*args, **options)

    server.worker.hold()
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="", image=image_field())
    await server.until(lambda: server.context.table.num_resident == 1)
    monkeypatch.setattr(ImageReader, "read", slow_read)
    await socket.send("session.reset", image=image_field())
    await socket.send("session.event", event_id=3, prompt="x")
    await socket.send("ping", t=1)
    await socket.expect("pong")
    server.worker.release()
    await socket.expect("session.started")
    await socket.send("session.close")
    await socket.send("ping", t=2)
    await socket.expect("pong", t=2)
    may_read.set()
    await socket.expect("event.queued", event_id=3)
    await socket.expect("event.dropped", event_id=3)
    await socket.expect("session.closed", reason="client")
    assert await socket.closed() == 1000
    assert server.context.table.num_resident == 0
