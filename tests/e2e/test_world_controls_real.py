"""Every way of steering LingBot-World over a real socket, each against the same request through `generate`.

The golden checkpoint is loaded by a real worker process, once for all tests. Session and clip run on it one after the
other, so that equal requests give equal bits. The camera folder is that of golden case 9, whose latents are known.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from server.app import create_app, start_message
from server.config import KVCacheSection, ModelSection, ServerConfig, SessionSection, WorkerSection
from server.generate import GenerateJob, GenerateStep, generate, script_steps
from server.key_script import parse_key_script
from server.uploads import decode_image
from server.worker_client import WorkerPolicy
from tests.support.held_worker import HeldWorker
from tests.support.lingbot_checkpoint import golden_prompt, write_case_files, write_golden_checkpoint
from tests.support.lingbot_golden import manifest, tensors
from tests.support.server_client import Chunk, WorldSocket, image_field, running
from worldmodel.catalog import clip_planner, control_parser
from worldmodel.clips import ClipWish
from worldmodel.messages import Control, ControlEvent, MediaFormat

MODEL = "lingbot_world_v2"
WORKER = "tests.support.golden_noise_worker"
SEED = 7
LATENTS = tensors("case9_end_to_end_official")["latents"]
CHUNK_FRAMES: int = manifest()["end_to_end"]["chunk"]
NUM_CHUNKS = LATENTS.shape[1] // CHUNK_FRAMES
GOLDEN_TOLERANCE = 1e-4
RESAMPLED_TOLERANCE = 1e-5
"""The command takes each pose by interpolation that hits it, a session by its index."""

pytestmark = pytest.mark.asyncio(loop_scope="module")

Array = npt.NDArray[np.generic]
Sent = dict[int, tuple[str | None, list[dict[str, Any]]]]
"""By event id, the prompt and the controls."""


@dataclass(frozen=True)
class Served:
    """A server of the golden model. `root` has the camera folders, among them `paths/case` with the start image."""

    url: str
    worker: HeldWorker
    config: ServerConfig
    root: Path

    @property
    def image_file(self) -> bytes:
        return (self.root / "paths" / "case" / "image.png").read_bytes()

    async def steer(self, sent: Sent, *, after_chunks: int = 0, format: str = "latent") -> Steered:
        """Run a session of four chunks or more, until all of what is sent after some chunks has been applied."""
        start = {"prompt": golden_prompt(), "image": image_field(self.image_file), "seed": SEED}
        chunks: list[Chunk] = []
        async with await WorldSocket.open(self.url) as socket:
            parts = [
                {"event_id": event_id, "prompt": prompt, "controls": controls or None}
                for event_id, (prompt, controls) in sent.items()
            ]
            events = [{key: it for key, it in each.items() if it is not None} for each in parts]
            at_once, later = ([], events) if after_chunks else (events, [])
            await self.worker.start_with(socket, {"format": format, **start}, *at_once)
            for _ in range(after_chunks):
                chunks.append(await socket.media())
            for event in later:
                await socket.send("session.event", **event)
            while len(chunks) < NUM_CHUNKS or any(event_id not in Steered(chunks).applied for event_id in sent):
                chunks.append(await socket.media())
            chunks.append(await socket.media())
            await socket.send("session.close")
            assert await socket.closed() == 1000
        return Steered(chunks)

    async def clip(self, steps: Sequence[GenerateStep], output: MediaFormat = MediaFormat.LATENT) -> list[Array]:
        """Make chunks as `worldserve generate` does, on the worker of the server."""
        image = decode_image(self.image_file, limits=self.config.limits, field="image")
        job = GenerateJob(
            prompt=golden_prompt(),
            seed=SEED,
            image=image.size,
            image_rgb=image.pixels,
            steps=tuple(steps),
            outputs=(output,),
        )
        async with aclosing(generate(self.worker, job)) as chunks:
            return [chunk.media[output].copy() async for chunk in chunks]


@dataclass(frozen=True)
class Steered:
    """The chunks of a session."""

    chunks: list[Chunk]

    @property
    def applied(self) -> dict[int, int]:
        """Return the chunk of every event."""
        return {event.event_id: chunk.header.chunk_index for chunk in self.chunks for event in chunk.header.applied}

    def steps(self, sent: Sent) -> list[GenerateStep]:
        """Return the same events at the same chunks."""
        steps = []
        for chunk in self.chunks:
            prompt, events = None, []
            for event_id in sorted(event.event_id for event in chunk.header.applied):
                new_prompt, controls = sent[event_id]
                prompt = new_prompt or prompt
                events.append(ControlEvent(event_id=event_id, controls=tuple(map(parsed, controls))))
            steps.append(GenerateStep(prompt=prompt, events=tuple(events)))
        return steps

    def latents(self) -> list[Array]:
        channels, _, *grid = LATENTS.shape
        return [
            np.frombuffer(chunk.payload, np.float32).reshape(channels, CHUNK_FRAMES, *grid) for chunk in self.chunks
        ]

    def poses(self) -> npt.NDArray[np.float64]:
        """Return the camera behind every chunk."""
        return np.array([chunk.header.pose for chunk in self.chunks], np.float64).reshape(-1, 4, 4)


def camera(schema: str, **data: Any) -> dict[str, Any]:
    return {"track": "camera", "schema": f"lingbot.{schema}.v1", "data": data}


def transition(num_chunks: int) -> dict[str, Any]:
    return {"track": "prompt", "schema": "lingbot.prompt_transition.v1", "data": {"chunks": num_chunks}}


def parsed(control: dict[str, Any]) -> Control:
    track, schema, data = control["track"], control["schema"], control["data"]
    return Control(track=track, schema=schema, data=control_parser(MODEL)(track, schema, data))


def assert_equal(got: Sequence[Array], want: Sequence[Array]) -> None:
    assert [chunk.shape for chunk in got] == [chunk.shape for chunk in want]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert np.array_equal(a, b), f"chunk {index}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder, setup = tmp_path_factory.mktemp("controls"), manifest()["end_to_end"]
    write_golden_checkpoint(folder / "checkpoint")
    root = folder / "root"
    write_case_files(root / "paths" / "case")
    shutil.copytree(root / "paths" / "case", folder / "outside")
    (root / "link").symlink_to(folder / "outside")
    options: dict[str, object] = {
        "sampler": "official",
        "camera_root": str(root),
    }
    model = ModelSection(
        name=MODEL,
        checkpoint=str(folder / "checkpoint"),
        width=setup["width"],
        height=setup["height"],
        precision="fp32",
        options=options,
    )
    config = ServerConfig(
        model=model,
        session=SessionSection(allow_latents=True),
        worker=WorkerSection(cpu_threads=1),
        kvcache=KVCacheSection(requested_sessions=1),
    )
    worker = HeldWorker(start_message(config), WorkerPolicy.from_config(config), module=WORKER)
    async with running(create_app(config, worker=worker), config) as url:
        await worker.wait_ready()
        yield Served(url=url, worker=worker, config=config, root=root)


async def test_a_camera_folder_gives_the_golden_latents_and_those_of_the_command(served: Served) -> None:
    sent: Sent = {0: (None, [camera("camera_folder", folder="paths/case")])}
    steered = await served.steer(sent)
    assert steered.applied == {0: 0}
    assert_equal(steered.latents(), await served.clip(steered.steps(sent)))
    found = np.concatenate(steered.latents()[:NUM_CHUNKS], axis=1)
    np.testing.assert_allclose(found, LATENTS.numpy(), atol=GOLDEN_TOLERANCE, rtol=0)
    image = decode_image(served.image_file, limits=served.config.limits, field="image")
    wish = ClipWish(
        checkpoint=served.config.model.checkpoint,
        options=served.config.model.options,
        width=served.config.model.width,
        height=served.config.model.height,
        image_width=image.size.width,
        image_height=image.size.height,
        num_media_frames=manifest()["end_to_end"]["frames"],
        camera_folder=served.root / "paths" / "case",
    )
    opening = GenerateStep(events=(ControlEvent(event_id=0, controls=clip_planner(MODEL)(wish).controls),))
    command = await served.clip([opening, *[GenerateStep()] * (NUM_CHUNKS - 1)])
    np.testing.assert_allclose(np.concatenate(command, axis=1), found, atol=RESAMPLED_TOLERANCE, rtol=0)


async def test_a_key_script_gives_the_latents_of_the_command(served: Served) -> None:
    keys = parse_key_script("w*4 wl*3 - i a*2 k")
    sent: Sent = {0: (None, [camera("camera_actions", mode="script", frames=keys)])}
    steered = await served.steer(sent)
    assert steered.applied == {0: 0}
    steps = script_steps(keys, CHUNK_FRAMES, len(steered.chunks), control_parser(MODEL))
    assert_equal(steered.latents(), await served.clip(steps))


async def test_a_target_and_a_velocity_lead_where_they_say(served: Served) -> None:
    target = camera("camera_motion", mode="target", translation=[0.2, 0.0, 0.4], rotation=[0, 0, 0, 1])
    target["data"]["transition_chunks"] = 2
    sent: Sent = {5: (None, [target])}
    steered = await served.steer(sent, after_chunks=1)
    first = steered.applied[5]
    ends = steered.poses()[first : first + 2, :3, 3]
    np.testing.assert_allclose(ends, [[0.1, 0.0, 0.2], [0.2, 0.0, 0.4]], atol=1e-6)
    assert_equal(steered.latents(), await served.clip(steered.steps(sent)))
    velocity = camera("camera_motion", mode="velocity", translation=[0.0, 0.0, 0.05], rotation=[0, 0, 0, 1])
    sent = {0: (None, [velocity])}
    steered = await served.steer(sent)
    depths = steered.poses()[:, 2, 3]
    np.testing.assert_allclose(depths, 0.05 * CHUNK_FRAMES * np.arange(1, len(depths) + 1), atol=1e-6)
    assert_equal(steered.latents(), await served.clip(steered.steps(sent)))


async def test_a_prompt_comes_over_the_chunks_that_it_was_given(served: Served) -> None:
    sent: Sent = {3: ("word7 word2", [transition(3), camera("camera_actions", mode="state", held=["w", "l"])])}
    steered = await served.steer(sent, after_chunks=1, format="rgb24")
    steps = steered.steps(sent)
    made = await served.clip(steps, MediaFormat.RGB24)
    pictures = [np.frombuffer(chunk.payload, np.uint8) for chunk in steered.chunks]
    assert_equal(pictures, [chunk.ravel() for chunk in made])
    control = camera("camera_actions", mode="state", held=["w", "l"])
    sudden = Steered(steered.chunks).steps({3: ("word7 word2", [control])})
    other = await served.clip(sudden, MediaFormat.RGB24)
    first = steered.applied[3]
    assert [np.array_equal(a, b) for a, b in zip(made[: first + 1], other, strict=False)] == [True] * first + [False]


@pytest.mark.parametrize("folder", ["nothing", "link", "paths", "../outside"])
async def test_a_folder_that_may_not_be_used_is_refused_and_the_world_goes_on(served: Served, folder: str) -> None:
    async with await WorldSocket.open(served.url) as socket:
        await socket.start(image=image_field(served.image_file), format="latent")
        await socket.media()
        await socket.send("session.event", event_id=0, controls=[camera("camera_folder", folder=folder)])
        refused = await socket.error()
        assert refused["code"] == "bad_control"
        assert "folder" in refused["message"]
        assert str(served.root) not in refused["message"]
        await socket.send("session.event", event_id=1, controls=[camera("camera_actions", mode="state", held=["w"])])
        while not any(event.event_id == 1 for event in socket.chunks[-1].header.applied):
            await socket.media()
        await socket.send("session.close")
        assert await socket.closed() == 1000
