"""Bodies of the REST interface."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.wire.messages import (
    EventId,
    ImageReference,
    Pacing,
    Seed,
    SessionState,
    StartImage,
    StreamFormat,
    WireModel,
)


class CreateSession(WireModel):
    """Body of `POST /v1/sessions`: `session.start` without its envelope. The session starts parked."""

    protocol: int | None = None
    model: str | None = None
    prompt: str
    image: ImageReference
    seed: Seed | None = None
    size: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")] | None = None
    format: Annotated[StreamFormat, Field(strict=False)] = StreamFormat.FMP4
    pacing: Annotated[Pacing, Field(strict=False)] = Pacing.PLAYBACK
    event_base: EventId = 0


class ResetSessionBody(WireModel):
    """Body of `POST /v1/sessions/{id}/reset`; all fields as in `session.reset`."""

    prompt: str | None = None
    image: ImageReference | None = None
    seed: Seed | None = None


class SessionView(WireModel):
    """A session as its owner sees it over REST."""

    session_id: str
    state: SessionState
    epoch: int
    run: int
    num_chunks: int
    prompt: str
    seed: int
    format: StreamFormat
    pacing: Pacing
    age_s: float
    watchers: int
    recording: bool


class SessionCreated(SessionView):
    """Answer to `POST /v1/sessions`. Without a socket the session is closed after `resume_s`."""

    resume_token: str
    watch_token: str
    resume_s: float


class SessionList(WireModel):
    sessions: list[SessionView]


class UploadCreated(WireModel):
    """Answer to `POST /v1/uploads`; the size is that of the upright image."""

    upload_id: str
    width: int
    height: int


class LoadView(WireModel):
    """How far the model has loaded. `fraction` is that of the stage."""

    stage: str
    fraction: float
    percent: int
    detail: str


class ModelView(WireModel):
    """The model that is served, with effective values."""

    name: str
    title: str
    width: int
    height: int
    fps: int
    latent_frames_per_chunk: int
    first_chunk_media_frames: int
    chunk_media_frames: int
    sink_latent_frames: int
    window_latent_frames: int | None
    device: str
    precision: str
    attention_backend: str
    checkpoint_digest: str
    parameters: int
    noise_layout: str
    sampler: str


class CapacityView(WireModel):
    """Room in the worker, and who takes it."""

    sessions: int
    resident: int
    waiting: int
    total_pages: int
    free_pages: int
    kv_bytes_per_session: int


class MemoryView(WireModel):
    """Host memory of the worker now and of the server at its most; `device_bytes` is what the worker reserved."""

    worker_rss_bytes: int
    device_bytes: int
    server_peak_rss_bytes: int


class ServerInfo(WireModel):
    """Answer to `GET /v1/info`. `model`, `capacity` and `memory` are null until they are known.

    `reason`: why the server isn't ready, now. `error`: why the model can never be served.
    """

    name: str = "worldserve"
    version: str
    protocol: int
    status: str
    ready: bool
    reason: str | None
    error: str | None
    load: LoadView
    served_model: str
    width: int
    height: int
    fps: int
    model: ModelView | None
    capacity: CapacityView | None
    memory: MemoryView | None
    versions: dict[str, str]
    notice: str
    start_images: list[StartImage]
    begin_image: str | None
    prompts: list[str]


class LayoutThing(WireModel):
    """Something round on a map: metres, and a colour as `#rrggbb`."""

    label: str
    x: float
    z: float
    radius: Annotated[float, Field(gt=0)]
    colour: Annotated[str, Field(pattern=r"^#[0-9a-f]{6}$")]


class LayoutPaths(WireModel):
    """Paths along z at each `x`, and along x at each `z`, in metres."""

    width: Annotated[float, Field(gt=0)]
    x: list[float]
    z: list[float]


class LayoutStart(WireModel):
    """Where a start image is seen from; headings are 0 to the north and 90 to the east."""

    x: float
    z: float
    heading_deg: float


class WorldLayout(WireModel):
    """A checkpoint's `layout.json`: what lies where, in metres with x to the east and z to the north.

    The world repeats every `period` in both directions. A unit of a pose is `metres_per_unit`; `starts` go by the
    names of the start images.
    """

    period: Annotated[float, Field(gt=0)]
    metres_per_unit: Annotated[float, Field(gt=0)]
    objects: list[LayoutThing]
    areas: list[LayoutThing]
    paths: LayoutPaths
    starts: dict[str, LayoutStart]


class ErrorBody(WireModel):
    code: str
    message: str
    field: str | None = None


class RestError(WireModel):
    """Body of every answer that is an error."""

    error: ErrorBody
