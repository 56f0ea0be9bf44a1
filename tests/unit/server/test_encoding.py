"""The queue in front of a session's encoder: what it holds on to."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from server.chunks import CommittedChunk
from server.encoding import ChunkEncoder, EncodingDone, EncodingServices
from server.media.formats import RawStreamEncoder
from server.metrics import Metrics
from server.wire.messages import StreamFormat
from server.worker import CommittedTick
from tests.support.media_chunks import part_of
from worldmodel.messages import (
    ChunkMedia,
    MediaFormat,
    MemoryStats,
    RequestId,
    SessionId,
    StageTimings,
    TickCommitted,
)

MEMORY = MemoryStats(sessions=1, total_pages=1, free_pages=0)
TIMINGS = StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0)


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def committed(chunk_index: int) -> tuple[CommittedChunk, CommittedTick, weakref.ref[memoryview]]:
    """Return a chunk as the worker answers it, and a weak reference to its pixels."""
    request_id = RequestId(f"r-{chunk_index}")
    parts, payload = part_of(np.zeros((12, 2, 2, 3), np.uint8), MediaFormat.RGB24)
    pixels = memoryview(payload)
    media: asyncio.Future[tuple[ChunkMedia, memoryview]] = asyncio.get_running_loop().create_future()
    message = ChunkMedia(
        request_id=request_id,
        session_id=SessionId("s"),
        chunk_index=chunk_index,
        num_media_frames=12,
        parts=parts,
        transfer_ms=0.5,
    )
    media.set_result((message, pixels))
    answer = TickCommitted(
        request_id=request_id,
        session_id=SessionId("s"),
        chunk_index=chunk_index,
        applied_event_ids=(),
        applied=(),
        num_media_frames=12,
        pose=None,
        timings=TIMINGS,
        memory=MEMORY,
    )
    chunk = CommittedChunk(
        run=0,
        chunk_index=chunk_index,
        request_id=request_id,
        applied=(),
        num_media_frames=12,
        pose=None,
        timings=TIMINGS,
        queue_ms=0.0,
    )
    return chunk, CommittedTick(committed=answer, media=media), weakref.ref(pixels)


@pytest.mark.usefixtures("without_garbage_collection")
async def test_pixels_are_given_up_as_soon_as_they_are_encoded() -> None:
    """Neither the wait for the next chunk nor the end of the session keeps them, without help of the collector."""
    done: list[EncodingDone] = []
    lost: list[Exception] = []
    with ThreadPoolExecutor(1) as pool:
        encoder = ChunkEncoder(
            RawStreamEncoder(StreamFormat.RGB24, MediaFormat.RGB24, width=2, height=2, fps=12),
            EncodingServices(pool=pool, clock=asyncio.get_running_loop().time, metrics=Metrics()),
            on_ready=done.append,
            on_lost=lambda _, error: lost.append(error),
        )
        running = asyncio.create_task(encoder.run())
        references = []
        for chunk_index in range(2):
            chunk, answered, pixels = committed(chunk_index)
            encoder.put(chunk, answered)
            del chunk, answered
            await encoder.drain()
            # The pool's thread forgets its work a moment after the result is there; another job is behind that.
            await asyncio.get_running_loop().run_in_executor(pool, int)
            references.append(pixels)
            assert references[-1]() is None, f"chunk {chunk_index}"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert lost == []
    assert [it.chunk.chunk_index for it in done] == [0, 1]


async def test_a_bug_in_who_hears_of_a_loss_stops_neither_later_chunks_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[EncodingDone] = []

    def break_once(done_chunk: EncodingDone) -> None:
        done.append(done_chunk)
        if len(done) == 1:
            raise KeyError("a bug")

    def break_always(chunk: CommittedChunk, error: Exception) -> None:
        raise IndexError("a second bug")

    with ThreadPoolExecutor(1) as pool:
        encoder = ChunkEncoder(
            RawStreamEncoder(StreamFormat.RGB24, MediaFormat.RGB24, width=2, height=2, fps=12),
            EncodingServices(pool=pool, clock=asyncio.get_running_loop().time, metrics=Metrics()),
            on_ready=break_once,
            on_lost=break_always,
        )
        running = asyncio.create_task(encoder.run())
        for chunk_index, run in ((0, 0), (1, 0), (2, 1)):
            chunk, answered, _ = committed(chunk_index)
            encoder.put(replace(chunk, run=run), answered)
        async with asyncio.timeout(30):
            await encoder.drain()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [it.chunk.chunk_index for it in done] == [0, 2], "the second is lost with its run"
    assert caplog.text.count("IndexError: a second bug") == 2
