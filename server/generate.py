"""A whole clip from one job, over the same worker and the same ticks as a served session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.worker import CommittedTick, Worker
from worldmodel.catalog import ControlParser
from worldmodel.errors import WorkerUnavailable
from worldmodel.messages import (
    CloseSession,
    Control,
    ControlEvent,
    ImageSize,
    MediaFormat,
    ModelInfo,
    OpenSession,
    RequestId,
    ResetSession,
    SessionId,
    Tick,
    TickCommitted,
)

TRACK = "camera"
ACTIONS_SCHEMA = "lingbot.camera_actions.v1"

_SESSION_ID = SessionId("generate")

_DTYPES: dict[MediaFormat, npt.DTypeLike] = {
    MediaFormat.YUV420: np.uint8,
    MediaFormat.RGB24: np.uint8,
    MediaFormat.LATENT: np.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """Begin the rollout again. `image_rgb` is RGB24 of size `image`; both None keep the image."""

    prompt: str
    seed: int
    image: ImageSize | None = None
    image_rgb: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateStep:
    """What steers one chunk. `prompt=None` keeps the prompt in force; with `new_run` this is chunk 0 of a new run."""

    events: tuple[ControlEvent, ...] = ()
    prompt: str | None = None
    new_run: NewRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """A clip of one or more runs: one chunk per step. `image_rgb` is RGB24 of size `image`."""

    prompt: str
    seed: int
    image: ImageSize
    image_rgb: bytes
    steps: tuple[GenerateStep, ...]
    outputs: tuple[MediaFormat, ...] = (MediaFormat.YUV420,)

    @property
    def chunk_indices(self) -> tuple[int, ...]:
        """Index of each step's chunk in its run."""
        indices: list[int] = []
        for step in self.steps:
            indices.append(indices[-1] + 1 if indices and step.new_run is None else 0)
        return tuple(indices)

    def num_media_frames(self, info: ModelInfo) -> int:
        """Return how many media frames all steps give."""
        return sum(info.chunk_media_frames if index else info.first_chunk_media_frames for index in self.chunk_indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipChunk:
    """One chunk of a clip: its arrays, shaped as `MediaFormat` says, views of one buffer."""

    committed: TickCommitted
    media: dict[MediaFormat, npt.NDArray[np.generic]]


def num_chunks(info: ModelInfo, num_media_frames: int) -> int:
    """Return how many chunks give exactly this many media frames. Raises ValueError naming the nearest counts."""
    first, further = info.first_chunk_media_frames, info.chunk_media_frames
    chunks, rest = divmod(num_media_frames - first, further)
    if chunks < 0:
        raise ValueError(f"frames: expected at least {first}, the first chunk, got {num_media_frames}")
    if rest:
        below = first + chunks * further
        raise ValueError(
            f"frames: expected {first} + {further} k, for example {below} or {below + further}, got {num_media_frames}"
        )
    return chunks + 1


def script_steps(
    frames: Sequence[Sequence[str]], latent_frames_per_chunk: int, chunks: int, parse_control: ControlParser
) -> tuple[GenerateStep, ...]:
    """Spread the keys of latent frames over `chunks` chunks; frames that a short script lacks have no keys.

    Raises ValueError for a script that is longer than the clip, `RequestRefused` for keys the model does not know.
    """
    num_latent_frames = chunks * latent_frames_per_chunk
    if len(frames) > num_latent_frames:
        raise ValueError(f"keys: expected at most {num_latent_frames} latent frames, the whole clip, got {len(frames)}")
    steps = []
    for index in range(chunks):
        first = index * latent_frames_per_chunk
        keys = [list(frame) for frame in frames[first : first + latent_frames_per_chunk]]
        if not keys:
            steps.append(GenerateStep())
            continue
        data = parse_control(TRACK, ACTIONS_SCHEMA, {"mode": "script", "frames": keys})
        control = Control(track=TRACK, schema=ACTIONS_SCHEMA, data=data)
        steps.append(GenerateStep(events=(ControlEvent(event_id=index, controls=(control,)),)))
    return tuple(steps)


async def generate(worker: Worker, job: GenerateJob) -> AsyncGenerator[ClipChunk, None]:
    """Yield the chunks of a clip, the next one being made while the caller has the last. Close it with `aclosing`.

    The worker must be ready. Raises what `Worker` raises; the worker's session is closed in any case.
    """
    opening = OpenSession(
        request_id=RequestId("generate-open"),
        session_id=_SESSION_ID,
        prompt=job.prompt,
        seed=job.seed,
        image=job.image,
        outputs=job.outputs,
    )
    await worker.open_session(opening, job.image_rgb)
    upcoming: asyncio.Task[CommittedTick] | None = None
    indices = job.chunk_indices
    try:
        for index in range(len(indices)):
            result = await (upcoming or _start_step(worker, job, index, indices[index]))
            media = result.media
            following = index + 1
            upcoming = _start_step(worker, job, following, indices[following]) if following < len(indices) else None
            message, payload = await media
            arrays = {}
            for part in message.parts:
                array = np.frombuffer(payload[: part.num_bytes], _DTYPES[part.format]).reshape(part.shape)
                arrays[part.format] = array
                payload = payload[part.num_bytes :]
            yield ClipChunk(committed=result.committed, media=arrays)
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
        # A worker that is gone has no session left to close, and the caller hears of it anyway.
        with contextlib.suppress(WorkerUnavailable):
            await worker.close_session(CloseSession(request_id=RequestId("generate-close"), session_id=_SESSION_ID))


def _start_step(worker: Worker, job: GenerateJob, index: int, chunk_index: int) -> asyncio.Task[CommittedTick]:
    return asyncio.create_task(_run_step(worker, job, index, chunk_index))


async def _run_step(worker: Worker, job: GenerateJob, index: int, chunk_index: int) -> CommittedTick:
    step = job.steps[index]
    if step.new_run is not None:
        reset = ResetSession(
            request_id=RequestId(f"generate-{index}-reset"),
            session_id=_SESSION_ID,
            prompt=step.new_run.prompt,
            seed=step.new_run.seed,
            image=step.new_run.image,
        )
        await worker.reset_session(reset, step.new_run.image_rgb)
    message = Tick(
        request_id=RequestId(f"generate-{index}"),
        session_id=_SESSION_ID,
        chunk_index=chunk_index,
        prompt=step.prompt,
        events=step.events,
    )
    return await worker.tick(message)
