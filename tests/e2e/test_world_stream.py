"""The `world` dialect over real sockets: the stream of chunks and what a slow reader does to it."""

from __future__ import annotations

import pytest

from tests.support.server_client import NARROW_BYTES, narrow_socket
from tests.support.server_scripted import Server, decode, serving
from tests.support.server_worker import ScriptedWorker, model_info

# ---------------------------------------------------------------- the stream


async def test_every_prefix_of_the_stream_plays_completely(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    assert (started["epoch"], started["run"], started["width"], started["height"]) == (1, 0, 32, 32)
    num_frames = 0
    for index in range(4):
        header = (await socket.media()).header
        assert (header.chunk_index, header.pts) == (index, num_frames * 1000)
        num_frames += header.num_frames
        assert decode(socket.chunks) == num_frames == 9 + 12 * index
    assert [chunk.header.kind for chunk in socket.chunks] == ["init", *["media"] * 4]
    init = socket.chunks[0].header
    assert init.chunk_index is None
    assert f'codecs="{init.codec}"' in started["mime"]


async def test_ticks_wait_for_the_viewer(server: Server) -> None:
    socket = await server.connect(viewer=False)
    session = server.session(await socket.start())
    first, second = await socket.media(), await socket.media()
    await socket.send("ping", t=1)
    await socket.expect("pong", t=1.0)
    assert len(session.ticks) == 2
    await socket.report(first.header)
    assert (await socket.media()).header.chunk_index == 2
    assert len(session.ticks) == 3
    await socket.report(second.header)
    await socket.media()


async def test_raw_pixels_come_with_their_shape(server: Server) -> None:
    socket = await server.connect()
    assert (await socket.start(format="rgb24"))["mime"] is None
    chunk = await socket.media()
    assert chunk.header.shape == [9, 32, 32, 3]
    assert len(chunk.payload) == 9 * 32 * 32 * 3


@pytest.mark.parametrize("format", ["h264", "jpeg"])
async def test_other_formats_tell_how_to_cut_their_payload(server: Server, format: str) -> None:
    socket = await server.connect()
    started = await socket.start(format=format, pacing="free")
    assert started["format"] == format
    chunk = await socket.media()
    assert chunk.header.sizes is not None
    assert len(chunk.header.sizes) == 9
    assert sum(chunk.header.sizes) == len(chunk.payload)


# ---------------------------------------------------------------- slow clients


async def test_a_slow_client_stops_its_own_ticks_only() -> None:
    # Chunks of which not one fits into what the operating system buffers.
    worker = ScriptedWorker(model_info(width=96, height=96))
    async with serving(worker, send_buffer_bytes=NARROW_BYTES) as server:
        slow = await server.connect(viewer=False, max_queue=1, sock=narrow_socket(server.url))
        started = await slow.start(pacing="free", format="rgb24")
        quick = await server.connect()
        await quick.start(pacing="free", format="h264")
        connection = slow.connection
        connection.transport.pause_reading()
        session = server.session(started)
        seen = -1
        while seen != len(session.ticks):
            seen = len(session.ticks)
            for _ in range(10):
                await quick.media()
        assert len(server.worker.served) - seen >= 10
        connection.transport.resume_reading()
        for index in range(seen + 3):
            assert (await slow.media()).header.chunk_index == index, "no committed chunk is dropped"
        await slow.drop()
