"""Chunks as pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clients.python import (
    BadServerMessage,
    Chunk,
)
from tests.support.client_standin_server import FIRST_FRAMES, FPS, FRAMES, HEIGHT, WIDTH, StandinServer
from tests.support.python_client import take


@pytest.mark.parametrize("format", ["fmp4", "h264", "jpeg"])
async def test_chunks_decode_to_pictures(server: StandinServer, connect: Any, format: str) -> None:
    async with connect(format=format) as world:
        chunks = await take(world, 3)
    assert [chunk.frames().shape for chunk in chunks] == [(n, HEIGHT, WIDTH, 3) for n in (FIRST_FRAMES, FRAMES, FRAMES)]
    assert all(chunk.frames().dtype == np.uint8 for chunk in chunks)
    with pytest.raises(ValueError, match="use frames"):
        chunks[0].latents()


async def test_video_colours_are_bt709(server: StandinServer, connect: Any) -> None:
    """The stand-in's first picture has a known mean colour: Y about 126, Cb 128 + 50 sin 0, Cr 128 + 50 cos 0."""
    y, cb, cr = (126 - 16) / 219, 0.0, 50 / 224
    want = 255 * np.array([y + 1.5748 * cr, y - 0.1873 * cb - 0.4681 * cr, y + 1.8556 * cb])
    for format in ("fmp4", "jpeg"):
        async with connect(format=format) as world:
            (chunk,) = await take(world, 1)
        middle = chunk.frames()[0].reshape(-1, 3).mean(axis=0)
        assert np.abs(middle - want).max() < 12, format


async def test_raw_pictures_need_no_decoder(server: StandinServer, connect: Any) -> None:
    async with connect(format="rgb24") as world:
        (chunk,) = await take(world, 1)
    assert chunk.frames().shape == (FIRST_FRAMES, HEIGHT, WIDTH, 3)
    assert chunk.frames().tobytes() == chunk.payload


async def test_a_payload_that_is_no_video_is_a_bad_server_message(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        (chunk,) = await take(world, 1)
    for payload in (b"", chunk.payload[:200]):
        broken = Chunk(
            header=chunk.header, payload=payload, format=chunk.format, fps=FPS, received_s=0.0, init=chunk.init
        )
        with pytest.raises(BadServerMessage, match="chunk 0"):
            broken.frames()


async def test_frames_come_one_by_one_with_their_chunk(connect: Any) -> None:
    async with connect() as world:
        seen = []
        async for frame in world.frames():
            seen.append((frame.chunk.chunk_index, frame.index, frame.image.shape))
            if len(seen) == FIRST_FRAMES + 1:
                break
    want = [(0, index, (HEIGHT, WIDTH, 3)) for index in range(FIRST_FRAMES)]
    assert seen == [*want, (1, 0, (HEIGHT, WIDTH, 3))]
