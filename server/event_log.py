"""The event log of a session, `events.jsonl`: everything that `worldserve replay` needs to make its chunks again.

    line 1          LogStart   what the model was, and how the session began
    further lines   LogTick    one committed chunk and the events that steered it, in the order of the commits
                    LogReset   a new run begins; the ticks after it count from chunk 0

Events are written with the chunk that applied them, because that and not the clock decides what a chunk shows.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from server.chunks import CommittedChunk
from server.wire.messages import PROTOCOL_VERSION
from worldmodel.messages import Control, ControlEvent, ModelInfo, Tick

LOG_VERSION = 1

_IMAGE_SUFFIXES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpg"))


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all lines: what has its default is left out, and unknown fields are errors."""


class LoggedImage(_Line, frozen=True):
    """A start image: a file beside the log, and the SHA-256 of its bytes."""

    file: str
    sha256: str


class LogStart(_Line, frozen=True):
    """How a session began. `model_digest` names the weights; `build` the versions that computed it."""

    log: int
    protocol: int
    session_id: str
    created_at: str
    model: str
    model_digest: str
    model_options: msgspec.Raw
    width: int
    height: int
    fps: int
    noise_layout: str
    sampler: str
    precision: str
    device: str
    attention_backend: str
    build: dict[str, str]
    prompt: str
    seed: int
    image: LoggedImage


class LoggedControl(_Line, frozen=True):
    track: str
    schema: str
    data: msgspec.Raw


class LoggedEvent(_Line, frozen=True):
    """An event. How long before the chunk's start it came may decide where in the chunk it acts."""

    event_id: int
    controls: tuple[LoggedControl, ...] = ()
    age_ms: float = 0.0


class LogTick(_Line, frozen=True):
    """A committed chunk. `prompt` is the new prompt, if any event brought one."""

    run: int
    chunk_index: int
    events: tuple[LoggedEvent, ...]
    num_media_frames: int
    prompt: str | None = None


class LoggedReset(_Line, frozen=True):
    """How a run began. Without `image` the one before is kept."""

    prompt: str
    seed: int
    image: LoggedImage | None = None


class LogReset(_Line, frozen=True):
    run: int
    reset: LoggedReset


LogLine = LogStart | LogTick | LogReset

_KINDS: tuple[tuple[str, type[LogStart] | type[LogTick] | type[LogReset]], ...] = (
    ("log", LogStart),
    ("reset", LogReset),
    ("chunk_index", LogTick),
)


# ---------------------------------------------------------------- writing


def start_line(
    info: ModelInfo,
    *,
    session_id: str,
    created_at: str,
    model_options: bytes,
    version: str,
    prompt: str,
    seed: int,
    image: LoggedImage,
) -> LogStart:
    """Describe the start of a session. `model_options` is the JSON object that the worker was given."""
    return LogStart(
        log=LOG_VERSION,
        protocol=PROTOCOL_VERSION,
        session_id=session_id,
        created_at=created_at,
        model=info.model,
        model_digest=info.checkpoint_digest,
        model_options=msgspec.Raw(model_options),
        width=info.width,
        height=info.height,
        fps=info.fps,
        noise_layout=info.noise_layout,
        sampler=info.sampler,
        precision=info.precision,
        device=info.device,
        attention_backend=info.attention_backend,
        build={"worldserve": version, **info.versions},
        prompt=prompt,
        seed=seed,
        image=image,
    )


def tick_line(tick: Tick, chunk: CommittedChunk) -> LogTick:
    return LogTick(
        run=chunk.run,
        chunk_index=chunk.chunk_index,
        prompt=tick.prompt,
        num_media_frames=chunk.num_media_frames,
        events=tuple(
            LoggedEvent(
                event_id=event.event_id,
                controls=tuple(
                    LoggedControl(track=it.track, schema=it.schema, data=msgspec.Raw(it.data)) for it in event.controls
                ),
                age_ms=event.age_ms,
            )
            for event in tick.events
        ),
    )


def image_file_name(image: bytes, *, run: int) -> str:
    """Name the file that a run's start image is kept in."""
    suffix = next((suffix for magic, suffix in _IMAGE_SUFFIXES if image.startswith(magic)), "webp")
    return f"image-{run}.{suffix}"


def image_digest(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()


def encode_line(line: LogLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


# ---------------------------------------------------------------- reading


def decode_line(text: bytes) -> LogLine:
    """Read one line of a log. Raises `ValueError` that says what is wrong with it."""
    fields = decode_object(text)
    for key, kind in _KINDS:
        if key in fields:
            line = msgspec.json.decode(text, type=kind)
            if isinstance(line, LogStart) and line.log != LOG_VERSION:
                raise ValueError(f"log: expected version {LOG_VERSION}, got {line.log}")
            return line
    raise ValueError(f"expected a line with one of {', '.join(key for key, _ in _KINDS)}, got {sorted(fields)}")


def decode_object(text: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises `ValueError`."""
    value = msgspec.json.decode(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def control_events(tick: LogTick) -> tuple[ControlEvent, ...]:
    """Return a tick's events as the worker gets them."""
    return tuple(
        ControlEvent(
            event_id=event.event_id,
            controls=tuple(Control(track=it.track, schema=it.schema, data=bytes(it.data)) for it in event.controls),
            age_ms=event.age_ms,
        )
        for event in tick.events
    )
