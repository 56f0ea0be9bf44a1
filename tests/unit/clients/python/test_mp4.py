"""Chunks as MP4 files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import pytest

from clients.python import (
    BadServerMessage,
    Chunk,
    Mp4Writer,
)
from clients.python.mp4 import retime
from tests.support.client_standin_server import FIRST_FRAMES, FPS, FRAMES, StandinServer
from tests.support.python_client import indices, take


async def test_an_mp4_holds_all_frames_also_across_a_resume(
    server: StandinServer, connect: Any, tmp_path: Path
) -> None:
    server.behaviour.cut_before_chunks = {2}
    async with connect() as world:
        assert await world.save_mp4(tmp_path / "walk.mp4", num_chunks=4) == 4
        assert world.session.epoch == 2
    with av.open(tmp_path / "walk.mp4") as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert times == pytest.approx([index / FPS for index in range(FIRST_FRAMES + 3 * FRAMES)])


async def test_a_recording_has_the_chunks_that_were_taken_meanwhile(connect: Any, tmp_path: Path) -> None:
    async with connect() as world:
        await take(world, 1)
        async with world.recording(tmp_path / "part.mp4") as writer:
            seen = await take(world, 2)
        await take(world, 1)
        assert writer.num_chunks == 2
    assert indices(seen) == [(0, 1), (0, 2)]
    with av.open(tmp_path / "part.mp4") as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert times == pytest.approx([index / FPS for index in range(2 * FRAMES)])


async def test_other_formats_are_not_written_to_mp4(connect: Any, tmp_path: Path) -> None:
    async with connect(format="jpeg") as world:
        with pytest.raises(ValueError, match="expected a session of format fmp4, this one has jpeg"):
            await world.save_mp4(tmp_path / "walk.mp4", num_chunks=1)


async def test_chunks_of_two_sessions_do_not_share_a_file(connect: Any, tmp_path: Path) -> None:
    async with connect() as world:
        (chunk,) = await take(world, 1)
    other = Chunk(
        header=chunk.header, payload=chunk.payload, format=chunk.format, fps=FPS, received_s=0.0, init=b"other"
    )
    with Mp4Writer(tmp_path / "two.mp4") as writer:
        writer.add(chunk)
        with pytest.raises(ValueError, match="another init segment"):
            writer.add(other)
        with pytest.raises(BadServerMessage, match="MP4 box moof"):
            retime(b"", decode_time=0, sequence_number=1)
