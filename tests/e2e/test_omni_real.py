"""The `omni` dialect with everything in place: real worker processes, the fake model and tiny golden weights."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from PIL import Image

from server.app import create_app, start_message
from server.config import KVCacheSection, ModelSection, ServerConfig, WorkerSection
from server.context import ServerContext
from server.worker_client import WorkerPolicy
from tests.support.held_worker import HeldWorker
from tests.support.omni_client import OmniSocket, camera, image_reference, velocity
from tests.support.server_client import WorldSocket, image_field, running

SCRIPT = [[["w"], ["w"], ["w", "l"]], [["a"], [], ["i"]], [[], ["j"], []]]
NUM_FRAMES = 9 + 12 + 12

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def serving(config: ServerConfig, *, module: str = "worldmodel.worker") -> AsyncIterator[Served]:
    """Run a server here and its worker, `python -m MODULE`, in a process of its own."""
    worker = HeldWorker(start_message(config), WorkerPolicy.from_config(config), module=module)
    app = create_app(config, worker=worker)
    async with running(app, config) as url:
        await worker.wait_ready()
        yield Served(url=url, context=app.state.context, worker=worker)


@dataclass(frozen=True)
class Served:
    url: str
    context: ServerContext
    worker: HeldWorker

    async def until_empty(self) -> None:
        """Wait until no session holds a place and all pages are free; the time-out only ends a test that hangs."""
        async with asyncio.timeout(20):
            while self.context.table.num_resident:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        memory = self.context.worker.memory
        assert memory is not None
        assert memory.free_pages == memory.total_pages


def config_of(name: str, *, width: int, height: int, sessions: int, options: dict[str, object]) -> ServerConfig:
    model = ModelSection(
        name=name,
        checkpoint="package:worldmodel/data/demo_world",
        width=width,
        height=height,
        fps=12,
        precision="fp32",
        options=options,
    )
    return ServerConfig(
        model=model, worker=WorkerSection(cpu_threads=1), kvcache=KVCacheSection(requested_sessions=sessions)
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fake() -> AsyncIterator[Served]:
    options: dict[str, object] = {"chunk_ms": 20.0, "prompt_commands": True}
    async with serving(config_of("fake", width=64, height=48, sessions=1, options=options)) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny() -> AsyncIterator[Served]:
    config = config_of("lingbot_world_v2", width=48, height=32, sessions=2, options={})
    async with serving(config, module="tests.support.tiny_world_worker") as it:
        yield it


def frames_of(data: bytes) -> npt.NDArray[np.uint8]:
    with av.open(io.BytesIO(data), format="mp4") as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def slope() -> bytes:
    """Return a picture on which a moving camera can be seen."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").rotate(90).save(buffer, format="PNG")
    return buffer.getvalue()


async def omni_video(server: Served, **fields: Any) -> bytes:
    """Return a whole video, which ends by itself."""
    async with await OmniSocket.open(server.url) as socket:
        await socket.start(num_frames=NUM_FRAMES, seed=5, **fields)
        assert (await socket.expect("session.done"))["stopped"] is False
        assert await socket.closed() == 1000
        return b"".join(chunk.payload for chunk in socket.chunks)


async def world_video(server: Served, control: dict[str, Any]) -> bytes:
    """Return the same of the `world` dialect, with a control in the first chunk."""
    async with await WorldSocket.open(server.url) as socket:
        start = {"prompt": "a town", "image": image_field(), "seed": 5, "pacing": "free"}
        await server.worker.start_with(socket, start, {"event_id": 0, "controls": [control]})
        await socket.expect("session.started")
        for _ in range(3):
            await socket.media()
        payload = b"".join(chunk.payload for chunk in socket.chunks)
        await socket.send("session.close")
        await socket.closed()
        return payload


async def test_a_script_gives_the_bytes_of_the_world_dialect(tiny: Served) -> None:
    frames = [keys for chunk in SCRIPT for keys in chunk]
    script = {
        "track": "camera",
        "schema": "lingbot.camera_actions.v1",
        "data": {"mode": "script", "frames": frames},
    }
    expected = await world_video(tiny, script)
    assert await omni_video(tiny, extra_params={"camera_action_script": SCRIPT}) == expected
    assert await omni_video(tiny) != expected
    assert frames_of(expected).shape == (NUM_FRAMES, 32, 48, 3)


async def test_a_life_of_interactions_on_tiny_weights(tiny: Served) -> None:
    async with await OmniSocket.open(tiny.url) as socket:
        await socket.start(streaming_buffer_seconds=1.25)
        await socket.media()
        for event_id, event in (
            ("both", {"prompt": "rain", **camera(velocity(0.0, 0.0, 0.05))}),
            ("target", camera({"mode": "target", "data": {"translation": [0.2, 0.0, 0.4]}})),
            ("keys", camera({"data": {"actions": ["w", "l"]}})),
            ("rest", camera({"data": {"actions": []}})),
        ):
            await socket.interact(event, event_id, transition_chunks=2)
            await socket.expect("session.interaction.queued", event_id=event_id)
            await socket.send("session.playback", position_seconds=60)
            await _until_started(socket, event_id)
        await socket.connection.send(b"\x00")
        await socket.error(code="binary_not_allowed")
        await socket.interact(camera({"data": {"rotation": [0, 0, 0, 0]}}), "zero")
        zero = await socket.error(event_id="zero")
        assert zero["field"] == "interaction.event.multi_modal_data.camera.data.rotation"
        await socket.send("session.stop")
        done = await socket.expect("session.done", stopped=True)
        assert done["dropped_event_ids"] == []
        assert await socket.closed() == 1000
        assert socket.decode() == sum(chunk.metadata["num_frames"] for chunk in socket.chunks)
    await tiny.until_empty()


async def _until_started(socket: OmniSocket, event_id: str) -> None:
    while not any(event_id in chunk.started for chunk in socket.chunks):
        await socket.media()
        await socket.send("session.playback", position_seconds=60)


async def test_clients_take_turns_and_a_camera_moves_the_picture(fake: Served) -> None:
    async with await OmniSocket.open(fake.url) as first, await OmniSocket.open(fake.url) as second:
        start = {"num_frames": NUM_FRAMES, "seed": 5, "image_reference": image_reference(slope())}
        # Its third chunk waits until the second client is in the line.
        await first.start(**start, streaming_buffer_seconds=1.25)
        await second.send_start(**start)
        await second.interact(camera(velocity(0.3, 0.0, 0.0)), "right")
        await second.expect("session.queued", position=1)
        await first.media()
        await first.send("session.ping")
        await first.expect("session.pong")
        await first.send("session.playback", position_seconds=0)
        assert (await first.expect("session.done"))["chunks"] == 3
        await second.expect("video.start")
        await second.expect("session.interaction.queued", event_id="right")
        assert (await second.expect("session.done"))["chunks"] == 3
        assert second.chunks[0].started == ["right"]
        still, moved = (frames_of(b"".join(chunk.payload for chunk in it.chunks)) for it in (first, second))
    assert still.shape == moved.shape
    assert not np.array_equal(still, moved)
    again = await omni_video(fake, image_reference=image_reference(slope()))
    assert again == b"".join(chunk.payload for chunk in first.chunks)
    await fake.until_empty()


async def test_what_orders_a_failure_fails_its_own_video_only(fake: Served) -> None:
    async with await OmniSocket.open(fake.url) as socket:
        await socket.start()
        await socket.interact({"prompt": "!refuse"}, "refused")
        await socket.error(message="refused, as ordered")
        await socket.error(code="interaction_failed", event_id="refused")
        await socket.interact({"prompt": "!early"}, "failed")
        await socket.error(code="tick_failed")
        await socket.error(code="interaction_failed", event_id="failed")
        assert await socket.closed() == 1011
    await omni_video(fake)
    await fake.until_empty()
