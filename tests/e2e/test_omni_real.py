"""The `omni` dialect with everything in place: real processes, with the fake model and with tiny golden weights."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.support.omni_client import OmniSocket, camera, image_reference, velocity
from tests.support.server_client import WorldSocket, image_field
from tests.support.server_process import ServerProcess, running_command, server_process

TINY = """\
[model]
name = "lingbot_world_v2"
checkpoint = "package:worldmodel/data/demo_world"
width = 48
height = 32
fps = 12
precision = "fp32"

[server]
port = 0

[kvcache]
requested_sessions = 2

[worker]
cpu_threads = 1
"""

SCRIPT = [[["w"], ["w"], ["w", "l"]], [["a"], [], ["i"]], [[], ["j"], []]]
NUM_FRAMES = 9 + 12 + 12


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("fake"), capacity=1, chunk_ms=20.0) as it:
        yield it


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = tmp_path_factory.mktemp("tiny") / "tiny.toml"
    config.write_text(TINY, encoding="utf-8")
    with running_command("tests.support.tiny_world_server", str(config)) as it:
        it.until_ready()
        yield it


def frames_of(data: bytes) -> npt.NDArray[np.uint8]:
    with av.open(io.BytesIO(data), format="mp4") as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def slope() -> bytes:
    """Return a picture on which a moving camera can be seen."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").rotate(90).save(buffer, format="PNG")
    return buffer.getvalue()


async def omni_video(server: ServerProcess, **fields: Any) -> bytes:
    """Return a whole video, which ends by itself."""
    async with await OmniSocket.open(server.url) as socket:
        await socket.start(num_frames=NUM_FRAMES, seed=5, **fields)
        assert (await socket.expect("session.done"))["stopped"] is False
        assert await socket.closed() == 1000
        return b"".join(chunk.payload for chunk in socket.chunks)


async def world_video(server: ServerProcess, control: dict[str, Any]) -> bytes:
    """Return the same of the `world` dialect, with a control in the first chunk."""
    async with await WorldSocket.open(server.url) as socket:
        await socket.send("session.start", protocol=1, prompt="a town", image=image_field(), seed=5, pacing="free")
        await socket.send("session.event", event_id=0, controls=[control])
        await socket.expect("session.started")
        for _ in range(3):
            await socket.media()
        payload = b"".join(chunk.payload for chunk in socket.chunks)
        await socket.send("session.close")
        await socket.closed()
        return payload


async def test_a_script_gives_the_bytes_of_the_world_dialect(tiny: ServerProcess) -> None:
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


async def test_a_life_of_interactions_on_tiny_weights(tiny: ServerProcess) -> None:
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
    tiny.until_empty()


async def _until_started(socket: OmniSocket, event_id: str) -> None:
    while not any(event_id in chunk.started for chunk in socket.chunks):
        await socket.media()
        await socket.send("session.playback", position_seconds=60)


async def test_clients_take_turns_and_a_camera_moves_the_picture(fake: ServerProcess) -> None:
    async with await OmniSocket.open(fake.url) as first, await OmniSocket.open(fake.url) as second:
        start = {"num_frames": NUM_FRAMES, "seed": 5, "image_reference": image_reference(slope())}
        await first.start(**start)
        await second.send_start(**start)
        await second.interact(camera(velocity(0.3, 0.0, 0.0)), "right")
        await second.expect("session.queued", position=1)
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
    fake.until_empty()


async def test_what_orders_a_failure_fails_its_own_video_only(fake: ServerProcess) -> None:
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
    fake.until_empty()
