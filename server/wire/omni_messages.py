"""Every message of the `omni` dialect: the message set of vLLM-Omni's `WS /v1/realtime/video`.

Names and shapes are those of vLLM-Omni 0.30 (docs/serving/streaming_video_output_api.md and
entrypoints/openai/protocol/videos.py there), so that its clients work unchanged. What we add to it is optional for a
client: keys in `data.actions`, `session.queued`, `mime`, `field` of an error, `dropped_event_ids`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr

from server.wire.messages import Seed, WireModel

MAX_EVENT_ID_CHARS = 128
SIZE_PATTERN = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"


def _whole(value: object) -> object:
    """Let 2.0 pass for 2, which JSON doesn't tell apart."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


NumPixels = Annotated[int, Field(ge=1, le=65536), BeforeValidator(_whole)]
NumFrames = Annotated[int, Field(ge=1, le=2**31), BeforeValidator(_whole)]
Fps = Annotated[int, Field(ge=1, le=1000), BeforeValidator(_whole)]
NumSteps = Annotated[int, Field(ge=1, le=200), BeforeValidator(_whole)]
WholeSeed = Annotated[Seed, BeforeValidator(_whole)]
Guidance = Annotated[float, Field(ge=0, le=20)]
TransitionChunks = Annotated[int, Field(ge=0), BeforeValidator(_whole)]


# ---------------------------------------------------------------- client -> server


class OpenModel(WireModel):
    """A part of `session.start`: unknown fields are for other models of vLLM-Omni and ignored, as there."""

    model_config = ConfigDict(extra="ignore")


class ImageReference(WireModel):
    """The start image: exactly one of `image_url`, a `data:` URL, and `file_id`, the id of an upload."""

    image_url: str | None = None
    file_id: str | None = None


class VideoParams(OpenModel):
    """The same as the fields of `session.start` with these names, which win."""

    width: NumPixels | None = None
    height: NumPixels | None = None
    num_frames: NumFrames | None = None
    fps: Fps | None = None


class OmniStart(OpenModel):
    """Start a world. Only `prompt` and `image_reference` must be there."""

    type: Literal["session.start"]
    prompt: str
    image_reference: ImageReference
    model: str | None = None
    format: Literal["m4s"] = "m4s"
    size: Annotated[str, Field(pattern=SIZE_PATTERN)] | None = None
    width: NumPixels | None = None
    height: NumPixels | None = None
    fps: Fps | None = None
    num_frames: NumFrames | None = None
    seconds: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")] | None = None
    video_params: VideoParams | None = None
    seed: WholeSeed | None = None
    streaming_buffer_seconds: Annotated[float, Field(gt=0)] | None = None
    extra_params: dict[str, Any] | None = None
    # Checked and without effect: the model samples in its one way, without guidance.
    user: str | None = None
    negative_prompt: str | None = None
    num_inference_steps: NumSteps | None = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    boundary_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    flow_shift: float | None = None
    # What would change the result and can't be had.
    generate_sound: Literal[False] = False
    enable_frame_interpolation: Literal[False] = False
    lora: None = None
    _from_sampling: frozenset[str] = PrivateAttr(default=frozenset())

    def came_from(self, names: frozenset[str]) -> None:
        """Note which fields stood in `sampling_params`, where an error has to name them."""
        self._from_sampling = names

    def place_of(self, field: str | None) -> str | None:
        """Return where a field, or a part of one, stood in what the client sent."""
        root = (field or "").partition(".")[0].partition("[")[0]
        return f"sampling_params.{field}" if root in self._from_sampling else field


class CameraData(WireModel):
    """SE(3): `translation` x, y, z and `rotation`, a quaternion x, y, z, w of any length; or `actions`, held keys."""

    translation: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    rotation: Annotated[list[float], Field(min_length=4, max_length=4)] | None = None
    actions: list[str] | None = None


class Camera(WireModel):
    """`target` (the default) goes to a pose, `velocity` repeats a step in every latent frame until replaced."""

    mode: Literal["target", "velocity"] | None = None
    data: CameraData


class MultiModalData(WireModel):
    camera: Camera | None = None


class InteractionEvent(WireModel):
    """A prompt, a camera command, or both; applied together."""

    prompt: str | None = None
    negative_prompt: None = None
    multi_modal_data: MultiModalData | None = None


class Interaction(WireModel):
    """`event_id` is made up where the client gives none."""

    event_id: Annotated[str, Field(min_length=1, max_length=MAX_EVENT_ID_CHARS)] | None = None
    event: InteractionEvent
    transition_chunks: TransitionChunks | None = None


class OmniInteraction(WireModel):
    type: Literal["session.interaction"]
    interaction: Interaction


class OmniPlayback(WireModel):
    """The viewer's playhead, for sessions that asked for `streaming_buffer_seconds`."""

    type: Literal["session.playback"]
    position_seconds: Annotated[float, Field(ge=0)]


class OmniStop(WireModel):
    type: Literal["session.stop"]


class OmniPing(WireModel):
    type: Literal["session.ping"]


# ---------------------------------------------------------------- server -> client


class OmniQueued(WireModel):
    """All places are taken; `position` counts from 1. `video.start` comes when it is this client's turn."""

    type: Literal["session.queued"] = "session.queued"
    position: int
    queued: int


class VideoConfig(WireModel):
    """What is in force. `num_frames` is left out where the video ends only with `session.stop`."""

    model: str
    prompt: str
    width: int
    height: int
    fps: int
    num_frames: int | None = None
    seed: int
    streaming_buffer_seconds: float | None = None


class VideoStart(WireModel):
    """Everything in `session.start` was right, and the world is open. `mime` is for Media Source Extensions."""

    type: Literal["video.start"] = "video.start"
    request_id: str
    format: Literal["m4s"] = "m4s"
    config: VideoConfig
    mime: str | None


class ChunkMetadata(WireModel):
    """Comes right before each binary frame. The first payload begins with the init segment.

    Events are named from the chunk in which they begin to the one in which they have come to their end.
    """

    type: Literal["video.chunk_metadata"] = "video.chunk_metadata"
    request_id: str
    kind: Literal["media"] = "media"
    transport_chunk_index: int
    generation_chunk_index: int
    num_frames: int
    byte_length: int
    started_event_ids: list[str]
    active_event_ids: list[str]
    completed_event_ids: list[str]


class InteractionQueued(WireModel):
    type: Literal["session.interaction.queued"] = "session.interaction.queued"
    request_id: str
    event_id: str


class SessionDone(WireModel):
    """The end. `dropped_event_ids` were queued and came too late for the last chunk."""

    type: Literal["session.done"] = "session.done"
    request_id: str | None
    chunks: int
    stopped: bool
    dropped_event_ids: list[str]


class OmniPong(WireModel):
    type: Literal["session.pong"] = "session.pong"


class OmniError(WireModel):
    """Something was refused or failed; `event_id` names the interaction, `field` what was wrong."""

    type: Literal["error"] = "error"
    code: str
    message: str
    field: str | None = None
    request_id: str | None = None
    event_id: str | None = None


OmniClientMessage = OmniStart | OmniInteraction | OmniPlayback | OmniStop | OmniPing
OmniServerMessage = OmniQueued | VideoStart | ChunkMetadata | InteractionQueued | SessionDone | OmniPong | OmniError
