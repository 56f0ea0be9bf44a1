"""Chunks between the reader and whoever takes them."""

from __future__ import annotations

import asyncio

import pytest

from clients.python.buffer import MOST_OF_LIMIT, ChunkBuffer, VirtualViewer


def test_a_viewer_waits_for_late_chunks_and_never_overlaps() -> None:
    viewer = VirtualViewer()
    assert [viewer.show(now_s, 1.0) for now_s in (10.0, 10.1, 10.2, 14.0)] == [10.0, 11.0, 12.0, 14.0]
    assert viewer.left_s(14.25) == pytest.approx(0.75)
    assert viewer.left_s(99.0) == 0.0


async def test_the_buffer_is_bounded_unless_someone_awaits_an_answer() -> None:
    buffer = ChunkBuffer(limit=1)
    for _ in range(MOST_OF_LIMIT):
        buffer.put(RuntimeError("first"))
    waiting = asyncio.create_task(buffer.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    with buffer.unbounded():
        await waiting
    for _ in range(MOST_OF_LIMIT):
        with pytest.raises(RuntimeError, match="first"):
            await buffer.take()
        await buffer.room()
    buffer.end()
    assert await buffer.take() is None
