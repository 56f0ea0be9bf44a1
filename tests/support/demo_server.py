"""Steering a world of the demo server, and making the same chunks again without a server.

A `Watched` session remembers what it sent and which chunk applied it. `solo_latents` gives a worker of the test's own
the same events at the same chunks.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.python import Applied, Chunk, Receipt, WorldClient
from server.config import ServerConfig
from server.config_reading import load_config
from server.generate import GenerateJob, GenerateStep, generate
from server.package_files import bundled_config
from server.uploads import decode_image
from server.worker import Worker
from worldmodel import catalog
from worldmodel.messages import Control, ControlEvent, MediaFormat, StartWorker

CAMERA = "camera"
ACTIONS = "lingbot.camera_actions.v1"

Latents = npt.NDArray[np.float32]


def demo_config() -> ServerConfig:
    """Return what `worldserve demo` runs with."""
    return load_config(bundled_config("demo"), environment={})


def demo_start_worker(device: str, precision: str, requested_sessions: int, **options: object) -> StartWorker:
    """Return a first message to a worker of the demo world, with model options in place of the demo's."""
    config = demo_config()
    return StartWorker(
        model=config.model.name,
        checkpoint=str(config.checkpoint_path),
        width=config.model.width,
        height=config.model.height,
        fps=config.model.fps,
        device=device,
        precision=precision,
        requested_sessions=requested_sessions,
        model_options=catalog.options_parser(config.model.name)({**config.model.options, **options}),
    )


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a session of the demo world begins. `image` is a name that the demo offers."""

    image: str
    prompt: str
    seed: int

    def client(self, url: str, **options: Any) -> WorldClient:
        return WorldClient(url, image=self.image, prompt=self.prompt, seed=self.seed, **options)


@dataclass(kw_only=True)
class Watched:
    """A running session, what was sent to it by event id, and the chunks that came."""

    start: Start
    world: WorldClient
    sent: dict[int, tuple[str | None, dict[str, Any] | None]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)

    async def send(self, *, prompt: str | None = None, actions: dict[str, Any] | None = None) -> Receipt:
        controls = None if actions is None else [{"track": CAMERA, "schema": ACTIONS, "data": actions}]
        receipt = await self.world.send_event(prompt=prompt, controls=controls)
        self.sent[receipt.event_id] = (prompt, actions)
        return receipt

    async def hold(self, *keys: str) -> Receipt:
        return await self.send(actions={"mode": "state", "held": list(keys)})

    async def take(self, num_chunks: int) -> None:
        """Take more chunks."""
        wanted = len(self.chunks) + num_chunks
        async for chunk in self.world.chunks():
            self.chunks.append(chunk)
            if len(self.chunks) == wanted:
                return
        raise AssertionError(f"the session ended after {len(self.chunks)} chunks, {wanted} were expected")

    async def take_until(self, *, chunk_index: int, run: int = 0) -> None:
        """Take chunks up to this one; those of the run before it may still come first."""
        while not self.chunks or (self.chunks[-1].run, self.chunks[-1].chunk_index) < (run, chunk_index):
            await self.take(1)

    async def take_through(self, receipt: Receipt, num_more_chunks: int = 0) -> Applied:
        """Take chunks up to the one in which an event acts, and some more; returns where it acts.

        The client hears of that when the chunk arrives, while others may still wait here to be taken.
        """
        while not receipt.applied.done():
            await self.take(1)
        applied = await receipt.applied
        await self.take_until(run=applied.run, chunk_index=applied.chunk_index + num_more_chunks)
        return applied

    @property
    def applied(self) -> list[list[int]]:
        """Ids of the events of each chunk."""
        return [[event.event_id for event in chunk.header.applied] for chunk in self.chunks]

    def latents(self) -> Latents:
        """Return the latents of all chunks, joined along the frames."""
        return np.concatenate([chunk.latents() for chunk in self.chunks], axis=1)

    def steps(self) -> tuple[GenerateStep, ...]:
        """Return the same events at the same chunks."""
        return tuple(self._step(event_ids) for event_ids in self.applied)

    def _step(self, event_ids: list[int]) -> GenerateStep:
        parse = catalog.control_parser(demo_config().model.name)
        prompt, events = None, []
        for event_id in sorted(event_ids):
            new_prompt, actions = self.sent[event_id]
            prompt = prompt if new_prompt is None else new_prompt
            controls: tuple[Control, ...] = ()
            if actions is not None:
                controls = (Control(track=CAMERA, schema=ACTIONS, data=parse(CAMERA, ACTIONS, actions)),)
            events.append(ControlEvent(event_id=event_id, controls=controls))
        return GenerateStep(events=tuple(events), prompt=prompt)


async def solo_latents(worker: Worker, watched: Watched) -> Latents:
    """Make the chunks of a session again, as the only session of a worker, by `server.generate`."""
    await worker.wait_ready()
    config = demo_config()
    (offered,) = (each for each in config.model.start_images if each.name == watched.start.image)
    file = (config.checkpoint_path / offered.file).read_bytes()
    image = decode_image(file, limits=config.limits, field="image")
    job = GenerateJob(
        prompt=watched.start.prompt,
        seed=watched.start.seed,
        image=image.size,
        image_rgb=image.pixels,
        steps=watched.steps(),
        outputs=(MediaFormat.LATENT,),
    )
    latents = []
    async with aclosing(generate(worker, job)) as chunks:
        async for chunk in chunks:
            latents.append(chunk.media[MediaFormat.LATENT])
    return np.concatenate(latents, axis=1).astype(np.float32, copy=False)
