"""Every message between the server process and a worker process. Torch-free frozen dataclasses.

A frame on the socket is

    | header length u32 BE | payload length u64 BE | header: msgpack [type name, body] | payload: raw bytes |

Only `OpenSession`, `ResetSession` (start image), `Tick` (observation arrays) and `ChunkMedia` (frames, actions) carry a
payload. Encoding lives in `worldmodel/framing.py`; this file owns the vocabulary only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from worldmodel.offload_settings import OffloadSettings

SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)


class MediaFormat(StrEnum):
    """What a worker sends for a chunk.

    YUV420: uint8 [frames, height * 3 / 2, width], planes Y, U, V below each other, BT.709 limited range.
    RGB24:  uint8 [frames, height, width, 3].
    LATENT: float32 [channels, latent frames, latent height, latent width], normalised as the transformer made it.
    ACTIONS: float32 [rows, dims], in the robot's own units, one row per control step; robot models only.
    """

    YUV420 = "yuv420p"
    RGB24 = "rgb24"
    LATENT = "latent"
    ACTIONS = "actions"


class LoadStage(StrEnum):
    """Stages of start-up, in order, as shown in the terminal, on the page and in `/v1/info`."""

    SPAWN = "spawn"
    CHECKPOINT = "checkpoint"
    TRANSFORMER = "transformer"
    VAE = "vae"
    TEXT_ENCODER = "text_encoder"
    KV_POOL = "kv_pool"
    WARM_UP = "warm_up"
    READY = "ready"


# ---------------------------------------------------------------- values


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control of one track, opaque to everything but the model. `data` is canonical JSON (UTF-8)."""

    track: str
    schema: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """One accepted event as the model sees it; its prompt, if any, is reduced into `Tick.prompt`.

    `age_ms` is how long before the chunk boundary the event was accepted.
    """

    event_id: int
    controls: tuple[Control, ...]
    age_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEvent:
    """Where an event took effect: the latent frame (0-based, inside the chunk) that first shows it."""

    event_id: int
    latent_frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """Width and height in pixels of a raw RGB24 image that travels as the payload."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """One array in the payload of `ChunkMedia`; parts follow each other without padding."""

    format: MediaFormat
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPart:
    """One observation array in the payload of `Tick`; arrays follow each other without padding.

    `name` is the key of the robot request, such as ``observation/joint_position``. `dtype` is NumPy's short form with
    the byte order, such as ``<f4`` or ``|u1``; the bytes are in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInput:
    """One part of a robot's proprioceptive state: the request key and how many numbers it has."""

    name: str
    num_dims: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotInfo:
    """What a robot model takes and gives; None in `ModelInfo` for a world model.

    `cameras` and `states` are request keys. A camera array is uint8 [image_height, image_width, 3] or
    [frames, image_height, image_width, 3]; `max_request_frames` bounds the frames of one request. An action chunk is
    float32 [action_horizon, action_dims].
    """

    embodiment: str
    cameras: tuple[str, ...]
    states: tuple[StateInput, ...]
    image_height: int
    image_width: int
    max_request_frames: int
    action_space: str
    action_horizon: int
    action_dims: int
    needs_wrist_camera: bool
    num_external_cameras: int
    needs_stereo_camera: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """Milliseconds of one tick spent in the worker."""

    denoise_ms: float
    commit_ms: float
    decode_ms: float
    transfer_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Accounting of the KV storage and of the process, sent with every answer that can change it."""

    sessions: int
    total_pages: int
    free_pages: int
    rss_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a ready worker serves. Sizes in pixels, `*_frames` say which kind of frame they count."""

    model: str
    width: int
    height: int
    fps: int
    latent_frames_per_chunk: int
    first_chunk_media_frames: int
    chunk_media_frames: int
    sink_latent_frames: int
    window_latent_frames: int | None
    capacity_sessions: int
    total_pages: int
    kv_bytes_per_session: int
    device: str
    precision: str
    attention_backend: str
    checkpoint_digest: str
    parameters: int
    noise_layout: str
    sampler: str
    versions: dict[str, str] = field(default_factory=dict)
    robot: RobotInfo | None = None


# ---------------------------------------------------------------- server -> worker


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """First message to a worker: everything it needs to load. Nothing is read from files of ours or the environment.

    `model` is a name in `catalog.py`; `model_options` is a JSON object that only that model's `config.py` understands;
    `memory_bytes` is the KV budget on a CPU (on CUDA it is measured, times `gpu_memory_fraction`). `offload` says where
    weights are.
    """

    model: str
    checkpoint: str
    width: int
    height: int
    fps: int
    device: str = "cpu"
    cpu_threads: int = 1
    precision: str = "fp32"
    requested_sessions: int = 1
    gpu_memory_fraction: float = 0.9
    memory_bytes: int | None = None
    model_options: bytes = b"{}"
    offload: OffloadSettings = field(default_factory=OffloadSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Create worker state for a session. Payload: the start image as RGB24, `image` gives its size.

    `image` is None for a robot model, whose pictures come with every tick; a world model refuses that.
    """

    request_id: RequestId
    session_id: SessionId
    prompt: str
    seed: int
    image: ImageSize | None = None
    outputs: tuple[MediaFormat, ...] = (MediaFormat.YUV420,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Compute one chunk. `prompt` is the new prompt, or None to keep the one in force.

    Payload: `arrays`, one after the other; only robot models take any.
    """

    request_id: RequestId
    session_id: SessionId
    chunk_index: int
    prompt: str | None = None
    events: tuple[ControlEvent, ...] = ()
    arrays: tuple[ArrayPart, ...] = ()

    @property
    def event_ids(self) -> tuple[int, ...]:
        return tuple(event.event_id for event in self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetSession:
    """Start the rollout again at chunk 0. Payload: a new start image if `image` is given, else the old one is kept."""

    request_id: RequestId
    session_id: SessionId
    prompt: str = ""
    seed: int = 0
    image: ImageSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Free everything of a session. Closing an unknown session succeeds."""

    request_id: RequestId
    session_id: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """Leave the receive loop and exit with code 0."""


# ---------------------------------------------------------------- worker -> server


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of one load stage, `fraction` from 0 to 1."""

    stage: LoadStage
    fraction: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """The model is loaded and warmed up, and all pages are free."""

    info: ModelInfo
    memory: MemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """The model cannot be served; the worker exits after sending this."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    request_id: RequestId
    session_id: SessionId
    memory: MemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReset:
    request_id: RequestId
    session_id: SessionId
    memory: MemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    request_id: RequestId
    session_id: SessionId
    memory: MemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TickCommitted:
    """First answer to a tick. The identities must equal the tick's exactly, or the session must not commit.

    `pose` is the camera-to-world matrix (4x4, row-major, 16 numbers) after the chunk's last latent frame.
    """

    request_id: RequestId
    session_id: SessionId
    chunk_index: int
    applied_event_ids: tuple[int, ...]
    applied: tuple[AppliedEvent, ...]
    num_media_frames: int
    pose: tuple[float, ...] | None
    timings: StageTimings
    memory: MemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMedia:
    """Second answer to a tick. Payload: `parts`, one after the other."""

    request_id: RequestId
    session_id: SessionId
    chunk_index: int
    num_media_frames: int
    parts: tuple[MediaPart, ...]
    transfer_ms: float


class FailureOutcome(StrEnum):
    """What is left after a failed request."""

    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """Answer to a request that failed. The text is fit for clients; the traceback stays in the worker's log."""

    request_id: RequestId
    session_id: SessionId
    outcome: FailureOutcome
    code: str
    message: str
    memory: MemoryStats
    field: str | None = None
    transient: bool = False


ServerMessage = StartWorker | OpenSession | Tick | ResetSession | CloseSession | StopWorker
WorkerMessage = (
    LoadProgress
    | WorkerReady
    | WorkerFailed
    | SessionOpened
    | SessionReset
    | SessionClosed
    | TickCommitted
    | ChunkMedia
    | RequestFailed
)
