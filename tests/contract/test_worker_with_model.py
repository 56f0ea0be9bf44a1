"""The client, the worker process and the runtime together, with the deterministic test model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio

from server.generate import ClipChunk, GenerateJob, generate, num_chunks, script_steps
from server.key_script import parse_key_script
from server.worker import WorkerStatus
from server.worker_client import WorkerClient, WorkerPolicy
from tests.support.fake_model import close_session, image, load_fake, open_session, pixels, start_fake, tick
from worldmodel.catalog import control_parser
from worldmodel.errors import LoadFailed, RequestRefused, TickRolledBack, WorkerUnavailable
from worldmodel.messages import ImageSize, MediaFormat

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def ready(**options: object) -> AsyncIterator[WorkerClient]:
    policy = WorkerPolicy(restart_backoff_s=0.01, max_restart_backoff_s=0.01)
    client = WorkerClient(start_fake(**options), policy)  # type: ignore[arg-type]
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[WorkerClient]:
    """A worker for all tests that close their sessions."""
    async with ready() as client:
        yield client


def job(chunks: int, keys: str, client: WorkerClient) -> GenerateJob:
    assert client.info is not None
    return GenerateJob(
        prompt="a street",
        seed=1,
        image=ImageSize(width=40, height=24),
        image_rgb=image().tobytes(),
        steps=script_steps(parse_key_script(keys), client.info.latent_frames_per_chunk, chunks, control_parser("fake")),
        outputs=(MediaFormat.YUV420, MediaFormat.LATENT),
    )


async def clip(client: WorkerClient, work: GenerateJob) -> list[ClipChunk]:
    async with aclosing(generate(client, work)) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_served_chunk_equals_one_of_the_runtime_alone(shared: WorkerClient) -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    expected = [pixels(runtime, tick("a", index)) for index in range(3)]
    await shared.open_session(open_session("a"), image().tobytes())
    for index in range(3):
        result = await shared.tick(tick("a", index))
        _, payload = await result.media
        assert bytes(payload) == expected[index]
    await shared.close_session(close_session("a"))


async def test_a_worker_killed_in_mid_chunk_fails_its_tick_and_comes_back_empty() -> None:
    async with ready(prompt_commands=True) as client:
        await client.open_session(open_session("a"), image().tobytes())
        hanging = asyncio.create_task(client.tick(tick("a", 0, prompt="!hang")))
        await asyncio.sleep(0)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(WorkerUnavailable):
                await hanging
        await client.wait_ready()
        assert client.generation == 2
        with pytest.raises(RequestRefused, match="not open on this worker"):
            await client.tick(tick("a", 0))


async def test_a_rolled_back_chunk_can_be_run_again() -> None:
    async with ready(failures=[{"kind": "transient", "chunk_index": 1}]) as client:
        await client.open_session(open_session("a"), image().tobytes())
        await client.tick(tick("a", 0))
        with pytest.raises(TickRolledBack) as caught:
            await client.tick(tick("a", 1))
        assert caught.value.transient
        assert (await client.tick(tick("a", 1))).committed.chunk_index == 1
        assert client.memory is not None
        assert client.memory.sessions == 1


async def test_a_load_failure_is_told_in_one_sentence() -> None:
    client = WorkerClient(start_fake(load_error="the checkpoint lacks vae/config.json"))
    await client.start()
    with pytest.raises(LoadFailed, match=r"^the checkpoint lacks vae/config\.json$"):
        await client.wait_ready()
    await client.stop()
    assert client.status is WorkerStatus.FAILED


async def test_generate_gives_the_whole_clip_and_closes_its_session(shared: WorkerClient) -> None:
    assert shared.info is not None
    assert num_chunks(shared.info, 33) == 3
    chunks = await clip(shared, job(3, "w*4 l*2 -*2", shared))
    assert [chunk.committed.num_media_frames for chunk in chunks] == [9, 12, 12]
    assert [chunk.media[MediaFormat.YUV420].shape for chunk in chunks] == [(9, 24, 32), (12, 24, 32), (12, 24, 32)]
    assert chunks[1].media[MediaFormat.LATENT].shape == (16, 3, 2, 4)
    assert shared.memory is not None
    assert shared.memory.sessions == 0
    again = await clip(shared, job(3, "w*4 l*2 -*2", shared))
    for first, second in zip(chunks, again, strict=True):
        np.testing.assert_array_equal(first.media[MediaFormat.YUV420], second.media[MediaFormat.YUV420])
    other = await clip(shared, job(3, "w*4 j*2", shared))
    assert (other[1].media[MediaFormat.YUV420] != chunks[1].media[MediaFormat.YUV420]).any()


async def test_generate_left_early_closes_its_session(shared: WorkerClient) -> None:
    async with aclosing(generate(shared, job(4, "w", shared))) as chunks:
        async for _ in chunks:
            break
    assert shared.memory is not None
    assert shared.memory.sessions == 0


async def test_generate_passes_a_failure_on() -> None:
    async with ready(failures=[{"kind": "crash", "chunk_index": 2}]) as client:
        with pytest.raises(WorkerUnavailable):
            await clip(client, job(4, "w", client))


async def test_counts_that_make_no_whole_clip_are_refused(shared: WorkerClient) -> None:
    assert shared.info is not None
    with pytest.raises(ValueError, match=r"9 \+ 12 k, for example 21 or 33, got 22"):
        num_chunks(shared.info, 22)
    with pytest.raises(ValueError, match="at least 9"):
        num_chunks(shared.info, 8)
    with pytest.raises(ValueError, match="at most 6 latent frames, the whole clip, got 7"):
        script_steps([("w",)] * 7, shared.info.latent_frames_per_chunk, 2, control_parser("fake"))
