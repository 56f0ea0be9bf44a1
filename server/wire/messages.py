"""Every message of the `world` dialect, and the binary header of a chunk. The one source of the JSON Schemas.

pydantic lives in this folder and nowhere else. Text frames are one JSON object with a `type`; a binary frame is a
4-byte big-endian header length, that many bytes of UTF-8 JSON (`ChunkHeader`) and the payload (see `binary.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

PROTOCOL_VERSION = 1

MAX_SAFE_INTEGER = 2**53 - 1
"""Largest integer that a JSON client in JavaScript keeps exactly."""

EventId = Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER, strict=True)]
Seed = Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER, strict=True)]


class WireModel(BaseModel):
    """Strict base of all messages: unknown fields, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamFormat(StrEnum):
    """What the payload of a media chunk is."""

    FMP4 = "fmp4"
    H264 = "h264"
    JPEG = "jpeg"
    RGB24 = "rgb24"
    LATENT = "latent"


class Pacing(StrEnum):
    """What lets the next chunk start: the client's `playback` reports, a virtual viewer, or nothing."""

    PLAYBACK = "playback"
    CLOCK = "clock"
    FREE = "free"


class SessionState(StrEnum):
    """States of a session as clients see them. `parked`: no socket, waiting for a resume."""

    ACTIVE = "active"
    PAUSED = "paused"
    PARKED = "parked"
    FAILED = "failed"
    RESETTING = "resetting"
    CLOSING = "closing"
    CLOSED = "closed"
    CLEANUP_FAILED = "cleanup_failed"


class DropReason(StrEnum):
    """Why a queued event will never be applied."""

    FAILED = "failed"
    RESET = "reset"
    CLOSED = "closed"


# ---------------------------------------------------------------- client -> server


class ImageBase64(WireModel):
    """A start image inside the message: PNG, JPEG or WebP, base64."""

    base64: str


class ImageUpload(WireModel):
    """A start image sent before with `POST /v1/uploads`."""

    upload_id: str


class ImageName(WireModel):
    """A start image that the server offers (`session.started.start_images`, `/v1/info`)."""

    name: str


ImageReference = ImageBase64 | ImageUpload | ImageName


class SessionStart(WireModel):
    """Start a new session. `event_base` is the smallest event id the client will use (default 0)."""

    type: Literal["session.start"]
    protocol: int
    model: str | None = None
    prompt: str
    image: ImageReference
    seed: Seed | None = None
    size: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")] | None = None
    format: Annotated[StreamFormat, Field(strict=False)] = StreamFormat.FMP4
    pacing: Annotated[Pacing, Field(strict=False)] = Pacing.PLAYBACK
    event_base: EventId = 0


class SessionResume(WireModel):
    """Take a session up again on a new socket. `last_chunk_index` is the last chunk that arrived whole, -1 for none.

    `run` says which run that chunk belongs to; it may be left out by clients that never reset while disconnected.
    """

    type: Literal["session.start"]
    protocol: int
    resume_token: str
    last_chunk_index: Annotated[int, Field(ge=-1)]
    run: Annotated[int, Field(ge=0)] | None = None


class SessionWatch(WireModel):
    """Watch a session without steering it: exactly one of `watch_token` and, for its owner, `session_id`."""

    type: Literal["session.watch"]
    protocol: int
    watch_token: str | None = None
    session_id: str | None = None


class ControlMessage(WireModel):
    """One control of one track; `data` is checked by the model's control parser."""

    track: str
    schema_: Annotated[str, Field(alias="schema")]
    data: dict[str, Any]


class SessionEvent(WireModel):
    """A prompt, controls, or both; applied together at a chunk boundary."""

    type: Literal["session.event"]
    event_id: EventId
    prompt: str | None = None
    controls: list[ControlMessage] | None = None


class SessionReset(WireModel):
    """Start the rollout again. What is not given: image and seed are kept, prompt and controls are cleared."""

    type: Literal["session.reset"]
    prompt: str | None = None
    image: ImageReference | None = None
    seed: Seed | None = None


class SessionPause(WireModel):
    type: Literal["session.pause"]


class SessionUnpause(WireModel):
    type: Literal["session.unpause"]


class SessionClose(WireModel):
    type: Literal["session.close"]


class Playback(WireModel):
    """What the viewer has seen: the last chunk whose first frame was shown, -1 at the start of a run."""

    type: Literal["playback"]
    epoch: Annotated[int, Field(ge=0)]
    run: Annotated[int, Field(ge=0)]
    chunk_index: Annotated[int, Field(ge=-1)]
    buffered_ms: Annotated[float, Field(ge=0)]


class Ping(WireModel):
    """`t` comes back unchanged in `pong`."""

    type: Literal["ping"]
    t: float


# ---------------------------------------------------------------- server -> client


class SessionQueued(WireModel):
    """The server is full; `position` counts from 1."""

    type: Literal["session.queued"] = "session.queued"
    position: int
    queued: int


class Limits(WireModel):
    """What this server accepts; each refusal names the limit."""

    max_message_bytes: int
    max_pending_events: int
    max_prompt_chars: int
    max_image_bytes: int
    max_image_pixels: int
    max_events_per_second: float
    max_messages_per_second: float
    resume_s: float
    lead_chunks: int
    max_session_s: float | None
    idle_s: float | None


class StartImage(WireModel):
    """A start image on offer; `url` is a path on this server."""

    name: str
    prompt: str
    url: str


class SessionStarted(WireModel):
    type: Literal["session.started"] = "session.started"
    protocol: int = PROTOCOL_VERSION
    session_id: str
    epoch: int
    run: int
    resume_token: str
    watch_token: str
    model: str
    width: int
    height: int
    fps: int
    latent_frames_per_chunk: int
    mime: str | None
    format: StreamFormat
    pacing: Pacing
    seed: int
    prompt: str
    start_image: str | None = None
    controls: dict[str, Any]
    limits: Limits
    start_images: list[StartImage]
    prompts: list[str]


class SessionWatching(WireModel):
    """Answer to `session.watch`; chunks follow from the next one on."""

    type: Literal["session.watching"] = "session.watching"
    protocol: int = PROTOCOL_VERSION
    session_id: str
    state: SessionState
    run: int
    start_image: str | None = None
    model: str
    width: int
    height: int
    fps: int
    latent_frames_per_chunk: int
    mime: str | None
    format: StreamFormat


class AppliedEventHeader(WireModel):
    """An event that acts in this chunk from `latent_frame` on; `wait_ms` is from acceptance to the chunk's start."""

    event_id: int
    latent_frame: int
    wait_ms: float


class ChunkTimings(WireModel):
    """Milliseconds of each stage of a chunk. `queue`: from runnable to sent to the worker."""

    queue: float
    denoise: float
    commit: float
    decode: float
    transfer: float
    encode: float


class ChunkHeader(WireModel):
    """JSON header of a binary frame. `kind: init` carries the init segment (fmp4 only) and has no chunk index."""

    type: Literal["chunk"] = "chunk"
    kind: Literal["init", "media"]
    session_id: str
    epoch: int
    run: int
    chunk_index: int | None = None
    request_id: str | None = None
    applied: list[AppliedEventHeader] = []
    num_frames: int = 0
    pts: int = 0
    timescale: int
    keyframe: bool = True
    pose: list[float] | None = None
    timings_ms: ChunkTimings | None = None
    codec: str | None = None
    shape: list[int] | None = None
    sizes: list[int] | None = None


class EventQueued(WireModel):
    type: Literal["event.queued"] = "event.queued"
    event_id: int


class EventDropped(WireModel):
    type: Literal["event.dropped"] = "event.dropped"
    event_id: int
    reason: DropReason


class SessionStateMessage(WireModel):
    """The session changed state, or a reset began run `run` from the image `start_image`."""

    type: Literal["session.state"] = "session.state"
    session_id: str
    state: SessionState
    epoch: int
    run: int
    start_image: str | None = None
    reason: str | None = None


class SessionClosedMessage(WireModel):
    type: Literal["session.closed"] = "session.closed"
    session_id: str
    reason: str


class Pong(WireModel):
    type: Literal["pong"] = "pong"
    t: float


class ErrorMessage(WireModel):
    """Something was refused or failed. `fatal`: this socket, or the session, is over."""

    type: Literal["error"] = "error"
    code: str
    message: str
    field: str | None = None
    retryable: bool = False
    fatal: bool = False
    event_id: int | None = None
    request_id: str | None = None


ClientMessage = (
    SessionStart
    | SessionResume
    | SessionWatch
    | SessionEvent
    | SessionReset
    | SessionPause
    | SessionUnpause
    | SessionClose
    | Playback
    | Ping
)
ServerMessage = (
    SessionQueued
    | SessionStarted
    | SessionWatching
    | EventQueued
    | EventDropped
    | SessionStateMessage
    | SessionClosedMessage
    | Pong
    | ErrorMessage
)

SERVER_MESSAGE: TypeAdapter[ServerMessage] = TypeAdapter(Annotated[ServerMessage, Field(discriminator="type")])
"""Parses any text frame of the server; for clients."""
