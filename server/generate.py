"""A whole clip from one job, over the same worker and the same ticks as a served session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.worker_client import CommittedTick, Worker
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
class GenerateStep:
    """What steers one chunk. `prompt=None` keeps the prompt in force."""

    events: tuple[ControlEvent, ...] = ()
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """A clip: one chunk per step. `image_rgb` is RGB24 of size `image`."""

    prompt: str
    seed: int
    image: ImageSize
    image_rgb: bytes
    steps: tuple[GenerateStep, ...]
    outputs: tuple[MediaFormat, ...] = (MediaFormat.YUV420,)


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
    frames: Sequence[Sequence[str]], info: ModelInfo, chunks: int, parse_control: ControlParser
) -> tuple[GenerateStep, ...]:
    """Spread the keys of latent frames over `chunks` chunks; frames that a short script lacks have no keys.

    Raises ValueError for a script that is longer than the clip, `RequestRefused` for keys the model does not know.
    """
    length = info.latent_frames_per_chunk
    if len(frames) > chunks * length:
        raise ValueError(f"keys: expected at most {chunks * length} latent frames, the whole clip, got {len(frames)}")
    steps = []
    for index in range(chunks):
        keys = [list(frame) for frame in frames[index * length : (index + 1) * length]]
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
    try:
        for index in range(len(job.steps)):
            result = await (upcoming or _start_tick(worker, job, index))
            media = result.media
            upcoming = _start_tick(worker, job, index + 1) if index + 1 < len(job.steps) else None
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


def _start_tick(worker: Worker, job: GenerateJob, index: int) -> asyncio.Task[CommittedTick]:
    step = job.steps[index]
    message = Tick(
        request_id=RequestId(f"generate-{index}"),
        session_id=_SESSION_ID,
        chunk_index=index,
        prompt=step.prompt,
        events=step.events,
    )
    return asyncio.create_task(worker.tick(message))
