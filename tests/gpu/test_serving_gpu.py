"""A full device, a worker that dies, what chunks say of themselves, and the way of pixels to the host, on CUDA.

Run with `pytest -m gpu`; without a device these tests fail.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from server.package_files import bundled_config
from tests.support.demo_server import Start, Watched, demo_start_worker
from tests.support.fake_model import close_session, image, keys, open_session, reset_session, tick
from tests.support.server_process import ServerProcess, running_configuration
from worldmodel.errors import RequestRefused
from worldmodel.lingbot.adapter import create_adapter
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.media import DeviceMedia
from worldmodel.lingbot.reducer import CameraReducer
from worldmodel.messages import MediaFormat, StartWorker
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime
from worldmodel.wan.pixels import to_yuv420

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "cuda:0"
FITTING, REQUESTED = 2, 4
CHUNKS_PAST_THE_WINDOW = 8
SLACK_BYTES = 2 * 2**30
"""Left outside the budget, as a tenth of a device is: for kernels that are loaded when first used, and workspaces."""


def start() -> StartWorker:
    return demo_start_worker(DEVICE, "bf16", REQUESTED, graphs="auto")


def test_a_full_device_refuses_one_more_session_and_runs_the_others_past_their_windows() -> None:
    message = start()
    adapter = create_adapter(message, lambda *_: None)
    kv = replace(adapter.kv_spec(), requested_sessions=REQUESTED)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(DEVICE)
    # What is left to the worker holds two sessions, and not three.
    budget_bytes = (kv.required_bytes(FITTING) + kv.required_bytes(FITTING + 1)) // 2
    left_bytes = budget_bytes + SLACK_BYTES
    ballast = torch.empty(free_bytes - left_bytes, dtype=torch.uint8, device=DEVICE)
    cache = allocate_cache(kv, replace(message, gpu_memory_fraction=budget_bytes / left_bytes), adapter.attention())
    assert cache.capacity == FITTING
    runtime = Runtime(adapter, cache, device=DEVICE)
    runtime.warm_up(lambda *_: None)
    names = [f"s{number}" for number in range(FITTING)]
    for number, name in enumerate(names):
        runtime.open(open_session(name, seed=number, outputs=(MediaFormat.YUV420,)), image(number))
    with pytest.raises(RequestRefused) as refused:
        runtime.open(open_session("one-more", outputs=(MediaFormat.YUV420,)), image(9))
    assert refused.value.code == "capacity"
    for index in range(CHUNKS_PAST_THE_WINDOW):
        for name in names:
            chunk = runtime.tick(tick(name, index))
            assert (chunk.committed.session_id, chunk.committed.chunk_index) == (name, index)
            assert chunk.committed.num_media_frames == (9 if index == 0 else 12)
            chunk.to_host()
    runtime.close(close_session(names[0]))
    runtime.open(open_session("one-more", outputs=(MediaFormat.YUV420,)), image(9))
    runtime.tick(tick("one-more", 0)).to_host()
    del ballast


async def stream(server: ServerProcess, num_chunks: int) -> list[int]:
    """Return the indices of the first chunks of a session of its own."""
    begin = Start(image="day", prompt="a small town, day", seed=3)
    async with begin.client(socket_of(server), pacing="free") as world:
        watched = Watched(start=begin, world=world)
        await watched.take(num_chunks)
    return [chunk.chunk_index for chunk in watched.chunks]


def socket_of(server: ServerProcess) -> str:
    return server.url.replace("http", "ws", 1) + "v1/world"


def test_a_worker_that_is_killed_comes_back_with_its_device(tmp_path: Path) -> None:
    text = bundled_config("demo").read_text(encoding="utf-8")
    with running_configuration(tmp_path, text, "--worker.device", DEVICE) as server:
        assert asyncio.run(stream(server, 3)) == [0, 1, 2]
        worker = server.worker()
        worker.send_signal(signal.SIGKILL)
        server.until(lambda: server.get("readyz").status_code != 200, what="the death was noticed")
        server.until_ready()
        assert server.worker().pid != worker.pid
        assert server.info()["model"]["device"] == DEVICE
        assert asyncio.run(stream(server, 3)) == [0, 1, 2]


def controller() -> CameraReducer:
    message = start()
    options = LingBotOptions.from_json(message.model_options)
    return CameraReducer(options, message.width, message.height, fps=message.fps)


def test_every_chunk_says_exactly_what_it_is() -> None:
    """Across a prompt switch and a reset: index, events as they were given, frames, and the controller's pose."""
    message = replace(start(), requested_sessions=1)
    runtime, cameras = Runtime.load(message, lambda *_: None), controller()
    runtime.open(open_session("a", outputs=(MediaFormat.LATENT, MediaFormat.YUV420)), image())
    given = [("w",), ("w", "l"), (), ("d", "j"), ("i",)]
    for run in range(2):
        camera = cameras.initial()
        for index, held in enumerate(given):
            # Two events for one boundary, one for the next, none for the third.
            events = tuple(keys(10 * index + number, *held) for number in range((2 - index) % 3))
            plan = cameras.prepare(camera, events, 3)
            camera = plan.state
            prompt = "the town in night" if index == 2 else None
            chunk = runtime.tick(tick("a", index, *events, prompt=prompt))
            committed = chunk.committed
            assert (committed.session_id, committed.chunk_index) == ("a", index)
            assert committed.request_id == f"tick-a-{index}"
            assert committed.applied_event_ids == tuple(event.event_id for event in events)
            assert committed.applied == plan.applied
            assert committed.pose == plan.pose
            num_media_frames = 9 if index == 0 else 12
            media, _ = chunk.to_host()
            latent, yuv = media.parts
            assert (committed.num_media_frames, media.num_media_frames) == (num_media_frames, num_media_frames)
            assert (latent.shape[1], yuv.shape[0]) == (3, num_media_frames)
        if run == 0:
            runtime.reset(reset_session("a"), None)


async def watch_metadata(server: ServerProcess) -> None:
    begin = Start(image="day", prompt="a small town, day", seed=3)
    async with begin.client(socket_of(server), pacing="free") as world:
        watched = Watched(start=begin, world=world)
        epoch = world.session.epoch
        await watched.take(1)
        receipts = [await watched.hold("w")]
        receipts.append(await watched.send(prompt="the town in night"))
        where = [await watched.take_through(receipt, 1) for receipt in receipts]
        await world.reset(prompt="the town in night")
        receipts.append(await watched.hold("d"))
        where.append(await watched.take_through(receipts[-1], 1))
    assert {chunk.header.epoch for chunk in watched.chunks} == {epoch}
    runs = [chunk.run for chunk in watched.chunks]
    assert runs == sorted(runs)
    assert [applied.run for applied in where] == [0, 0, 1]
    steps, cameras = watched.steps(), controller()
    for run in (0, 1):
        camera = cameras.initial()
        of_run = [(chunk, step) for chunk, step in zip(watched.chunks, steps, strict=True) if chunk.run == run]
        assert [chunk.chunk_index for chunk, _ in of_run] == list(range(len(of_run)))
        for chunk, step in of_run:
            plan = cameras.prepare(camera, step.events, 3)
            camera = plan.state
            assert chunk.header.num_frames == (9 if chunk.chunk_index == 0 else 12)
            np.testing.assert_array_equal(chunk.header.pose, plan.pose)
    said = [(event, chunk.run, chunk.chunk_index) for chunk in watched.chunks for event in chunk.header.applied]
    assert [(event.event_id, run, index) for event, run, index in said] == [
        (receipt.event_id, applied.run, applied.chunk_index) for receipt, applied in zip(receipts, where, strict=True)
    ]
    assert all(applied.chunk_index > 0 for applied in where[:2])


def test_a_client_is_told_exactly_what_each_chunk_is(tmp_path: Path) -> None:
    """Run, epoch, index, frames, events and pose of every chunk that a socket brings, across a reset."""
    text = bundled_config("demo").read_text(encoding="utf-8")
    with running_configuration(tmp_path, text, "--worker.device", DEVICE) as server:
        asyncio.run(watch_metadata(server))


def test_pixels_made_on_the_device_arrive_as_those_made_on_the_host() -> None:
    """Pixels are made and copied as they are for a chunk; more work is queued before anybody waits for them."""
    frames_3THW = (torch.rand(3, 12, 96, 160, generator=torch.Generator().manual_seed(1)) * 2.2 - 1.1).half()
    latents = torch.zeros(16, 3, 12, 20, device=DEVICE)
    made_on_host = to_yuv420(frames_3THW).numpy()
    on_device = frames_3THW.to(DEVICE, copy=True)
    media = DeviceMedia((MediaFormat.YUV420,), latents, on_device)
    on_device.zero_()
    (pixels,) = media.to_host()
    np.testing.assert_array_equal(pixels.array, made_on_host)
