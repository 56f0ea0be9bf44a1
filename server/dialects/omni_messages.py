"""The `omni` dialect on paper: text to checked messages, interactions to prompts and controls. No state, no I/O.

session.start ──parse──> OmniStart ──plan_start──> StartPlan      what the world dialect's start would say, and the rest
session.interaction ──parse──> Interaction ──plan_interaction──> InteractionPlan
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from server.config import LimitsSection
from server.dialects.omni_events import Span
from server.dialects.world_messages import validate
from server.errors import BadInput, ErrorCode, ServerError
from server.limits import check_prompt, parse_json_object
from server.wire.messages import PROTOCOL_VERSION, ImageBase64, ImageUpload, Pacing, SessionStart
from server.wire.omni_messages import (
    MAX_EVENT_ID_CHARS,
    Camera,
    CameraData,
    Interaction,
    OmniClientMessage,
    OmniInteraction,
    OmniPing,
    OmniPlayback,
    OmniStart,
    OmniStop,
)
from worldmodel.catalog import ControlParser
from worldmodel.errors import RequestRefused
from worldmodel.messages import Control, ModelInfo

CAMERA_TRACK = "camera"
ACTIONS_SCHEMA = "lingbot.camera_actions.v1"
MOTION_SCHEMA = "lingbot.camera_motion.v1"
PROMPT_TRACK = "prompt"
TRANSITION_SCHEMA = "lingbot.prompt_transition.v1"

SCRIPT = "extra_params.camera_action_script"
PACE = "extra_params.pace_to_media_time"
EVENT = "interaction.event"
CAMERA = f"{EVENT}.multi_modal_data.camera"

SMALLEST_ROTATION = 1e-6
"""Quaternions shorter than this point nowhere."""

_MODELS: dict[str, type[OmniClientMessage]] = {
    "session.start": OmniStart,
    "session.interaction": OmniInteraction,
    "session.playback": OmniPlayback,
    "session.stop": OmniStop,
    "session.ping": OmniPing,
}


def parse_client_message(text: str, limits: LimitsSection) -> OmniClientMessage:
    """Check one text frame. Raises `BadInput` that names the offending field."""
    if len(text) > limits.max_message_bytes:
        raise BadInput(
            ErrorCode.TOO_LARGE,
            f"the message has more than {limits.max_message_bytes} bytes (limits.max_message_bytes)",
        )
    fields = parse_json_object(text, max_depth=limits.max_json_depth, max_parts=limits.max_json_parts)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _MODELS:
        shown = repr(kind)[:80] if "type" in fields else "nothing"
        raise _bad("type", f"expected one of {', '.join(_MODELS)}, got {shown}")
    if kind == "session.start":
        message: OmniClientMessage = _parse_start(fields)
    else:
        message = validate(_MODELS[kind], fields)
    match message:
        case OmniStart():
            check_prompt(message.prompt, max_chars=limits.max_prompt_chars)
        case OmniInteraction() if message.interaction.event.prompt is not None:
            field = f"{EVENT}.prompt"
            check_prompt(message.interaction.event.prompt, max_chars=limits.max_prompt_chars, field=field)
        case _:
            pass
    return message


def _parse_start(fields: Mapping[str, object]) -> OmniStart:
    """Read a start whose fields may stand in `sampling_params`, where those beside it win and others are extras."""
    sampling = fields.get("sampling_params")
    if sampling is None:
        return validate(OmniStart, fields)
    if not isinstance(sampling, dict):
        raise _bad("sampling_params", "expected an object")
    extra = fields.get("extra_params")
    extras = dict(extra) if isinstance(extra, dict) else {}
    moved = {name: value for name, value in sampling.items() if name in OmniStart.model_fields and name not in fields}
    extras |= {name: value for name, value in sampling.items() if name not in OmniStart.model_fields}
    merged = {**fields, **moved}
    if extra is None or isinstance(extra, dict):
        merged["extra_params"] = extras
    try:
        start = validate(OmniStart, merged)
    except BadInput as error:
        root = (error.field or "").partition(".")[0].partition("[")[0]
        if root in moved:
            raise _moved(error, f"sampling_params.{error.field}") from error
        raise
    start.came_from(frozenset(moved))
    return start


def find_event_id(text: str) -> str | None:
    """Return the event id of an interaction that is wrong otherwise, so that its error can name it."""
    try:
        message = json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        return None
    interaction = message.get("interaction") if isinstance(message, dict) else None
    event_id = interaction.get("event_id") if isinstance(interaction, dict) else None
    if not isinstance(event_id, str) or not 0 < len(event_id) <= MAX_EVENT_ID_CHARS:
        return None
    # Half of a surrogate pair can't be sent back.
    return None if any("\ud800" <= char <= "\udfff" for char in event_id) else event_id


# ---------------------------------------------------------------- session.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """What a start asks for. `max_chunks` and `num_frames` None: until told to stop. `script`: controls of chunk 0."""

    start: SessionStart
    max_chunks: int | None
    num_frames: int | None
    script: tuple[Control, ...]


def plan_start(
    message: OmniStart, info: ModelInfo, *, model: str, aliases: tuple[str, ...], parse_control: ControlParser
) -> StartPlan:
    """Check a start against the model that is served. Raises `BadInput` that names the field, where it stood.

    `model` is its name and `aliases` other names that clients may use.
    """
    try:
        return _plan_start(message, info, names=(model, *aliases), parse_control=parse_control)
    except BadInput as error:
        place = message.place_of(error.field)
        if place is not None and place != error.field:
            raise _moved(error, place) from error
        raise


def _plan_start(
    message: OmniStart, info: ModelInfo, *, names: tuple[str, ...], parse_control: ControlParser
) -> StartPlan:
    if message.model is not None and message.model not in names:
        text = f"model: this server has {', '.join(names)}, got {message.model[:64]!r}"
        raise BadInput(ErrorCode.UNKNOWN_MODEL, text, field="model")
    if not message.prompt.strip():
        raise _bad("prompt", "expected some text")
    _check_geometry(message, info)
    num_frames, max_chunks = _length(message, info)
    extras = message.extra_params or {}
    pace = extras.get("pace_to_media_time", False)
    if not isinstance(pace, bool):
        raise _bad(PACE, "expected true or false")
    if message.streaming_buffer_seconds is not None:
        pacing = Pacing.PLAYBACK
    elif pace or max_chunks is None:
        pacing = Pacing.CLOCK
    else:
        pacing = Pacing.FREE
    start = SessionStart(
        type="session.start",
        protocol=PROTOCOL_VERSION,
        prompt=message.prompt,
        image=_image(message),
        seed=message.seed,
        pacing=pacing,
    )
    script = _script(extras.get("camera_action_script"), info.latent_frames_per_chunk, parse_control)
    return StartPlan(start=start, max_chunks=max_chunks, num_frames=num_frames, script=script)


def translate_start_error(error: ServerError) -> ServerError:
    """Name the field as this dialect calls it."""
    names = {"image.base64": "image_reference.image_url", "image.upload_id": "image_reference.file_id"}
    return _moved(error, names[error.field]) if error.field in names else error


def _check_geometry(message: OmniStart, info: ModelInfo) -> None:
    """Compare every size and rate that counts: `size` before `width` and `height`, these before `video_params`."""
    params = message.video_params
    given: list[tuple[str, int | None, int]] = []
    if message.size is not None:
        size = f"{info.width}x{info.height}"
        if message.size != size:
            raise BadInput(ErrorCode.BAD_SIZE, f"size: this server makes {size}, got {message.size}", field="size")
    else:
        given += [("width", message.width, info.width), ("height", message.height, info.height)]
        if params is not None:
            given += [
                ("video_params.width", params.width if message.width is None else None, info.width),
                ("video_params.height", params.height if message.height is None else None, info.height),
            ]
    for field, value, served in given:
        if value is not None and value != served:
            text = f"{field}: this server makes {info.width}x{info.height}, got {value}"
            raise BadInput(ErrorCode.BAD_SIZE, text, field=field)
    inner_fps = None if params is None or message.fps is not None else params.fps
    for field, value in (("fps", message.fps), ("video_params.fps", inner_fps)):
        if value is not None and value != info.fps:
            raise _bad(field, f"this server makes {info.fps} frames a second, got {value}")


def _length(message: OmniStart, info: ModelInfo) -> tuple[int | None, int | None]:
    """Return media frames and chunks of the whole video."""
    first, later = info.first_chunk_media_frames, info.chunk_media_frames
    params = message.video_params
    field, num_frames = "num_frames", message.num_frames
    if num_frames is None and params is not None:
        field, num_frames = "video_params.num_frames", params.num_frames
    if num_frames is not None:
        num_later, rest = divmod(num_frames - first, later)
        if num_later < 0 or rest:
            below = max(first, num_frames - rest)
            near = f"{first}" if num_frames < first else f"{below} or {below + later}"
            raise _bad(field, f"expected {first} and a multiple of {later} more, such as {near}, got {num_frames}")
        return num_frames, 1 + num_later
    if message.seconds is None:
        return None, None
    # A length in seconds is a wish in round numbers; whole chunks are made until it is reached.
    num_later = math.ceil(max(0, int(message.seconds) * info.fps - first) / later)
    return first + num_later * later, 1 + num_later


def _image(message: OmniStart) -> ImageBase64 | ImageUpload:
    reference = message.image_reference
    if (reference.image_url is None) == (reference.file_id is None):
        raise BadInput(
            ErrorCode.BAD_IMAGE,
            "image_reference: expected exactly one of image_url, file_id",
            field="image_reference",
        )
    if reference.file_id is not None:
        return ImageUpload(upload_id=reference.file_id)
    url = reference.image_url or ""
    head, comma, body = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise BadInput(
            ErrorCode.BAD_IMAGE,
            "image_reference.image_url: expected data:image/...;base64,...; this server fetches nothing for a client, "
            f"got {url[:40]!r}",
            field="image_reference.image_url",
        )
    return ImageBase64(base64=body)


def _script(value: object, latent_frames_per_chunk: int, parse: ControlParser) -> tuple[Control, ...]:
    """Read keys for every latent frame of every chunk: a list per chunk of one list per latent frame."""
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        raise _bad(SCRIPT, "expected a list with an entry for each chunk")
    frames: list[object] = []
    for index, chunk in enumerate(value):
        if not isinstance(chunk, list) or len(chunk) != latent_frames_per_chunk:
            got = f"{len(chunk)}" if isinstance(chunk, list) else "something else"
            raise _bad(f"{SCRIPT}[{index}]", f"expected {latent_frames_per_chunk} lists of keys, got {got}")
        frames.extend(chunk)

    def name(field: str) -> str:
        number, bracket, rest = field.removeprefix("frames[").partition("]")
        if not bracket:
            return SCRIPT
        chunk, frame = divmod(int(number), latent_frames_per_chunk)
        return f"{SCRIPT}[{chunk}][{frame}]{rest}"

    data = {"mode": "script", "frames": frames}
    try:
        return (Control(track=CAMERA_TRACK, schema=ACTIONS_SCHEMA, data=parse(CAMERA_TRACK, ACTIONS_SCHEMA, data)),)
    except RequestRefused as error:
        raise _refused(error, name(error.field or "")) from error


# ---------------------------------------------------------------- session.interaction


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionPlan:
    """What an interaction does to a session, and for how long each part of it is at work."""

    prompt: str | None
    controls: tuple[Control, ...]
    spans: tuple[Span, ...]


def plan_interaction(interaction: Interaction, parse: ControlParser) -> InteractionPlan:
    """Turn an interaction into a prompt and controls. Raises `BadInput` that names the field."""
    event, chunks = interaction.event, interaction.transition_chunks
    camera = None if event.multi_modal_data is None else event.multi_modal_data.camera
    controls: list[Control] = []
    spans: list[Span] = []
    if event.prompt is not None:
        if not event.prompt.strip():
            raise _bad(f"{EVENT}.prompt", "expected some text")
        if chunks:
            controls.append(_control(parse, PROMPT_TRACK, TRANSITION_SCHEMA, {"chunks": chunks}))
        spans.append(Span(track=PROMPT_TRACK, num_chunks=chunks or 1))
    if camera is not None:
        control, span = _camera(camera, chunks, parse)
        controls.append(control)
        spans.append(span)
    if not spans:
        raise BadInput(
            ErrorCode.EMPTY_EVENT, f"{EVENT}: expected prompt, multi_modal_data.camera, or both", field=EVENT
        )
    return InteractionPlan(prompt=event.prompt, controls=tuple(controls), spans=tuple(spans))


def _camera(camera: Camera, transition_chunks: int | None, parse: ControlParser) -> tuple[Control, Span]:
    data = camera.data
    if data.actions is not None:
        return _keys(camera, data.actions, parse)
    if data.translation is None and data.rotation is None:
        raise _bad(f"{CAMERA}.data", "expected translation and rotation, or actions")
    motion: dict[str, object] = {
        "mode": camera.mode or "target",
        "translation": data.translation or [0.0, 0.0, 0.0],
        "rotation": _unit_quaternion(data),
    }
    num_chunks = None
    if motion["mode"] == "target":
        # The shortest way takes what is left of one chunk.
        num_chunks = 1 if transition_chunks is None else max(1, transition_chunks)
        motion["transition_chunks"] = num_chunks
    control = _control(parse, CAMERA_TRACK, MOTION_SCHEMA, motion)
    return control, Span(track=CAMERA_TRACK, num_chunks=num_chunks)


def _keys(camera: Camera, actions: list[str], parse: ControlParser) -> tuple[Control, Span]:
    """Hold keys until told otherwise; none is rest."""
    if camera.data.translation is not None or camera.data.rotation is not None:
        raise _bad(f"{CAMERA}.data.actions", "expected either actions or translation and rotation, got both")
    if camera.mode == "target":
        raise _bad(f"{CAMERA}.mode", "keys lead to no pose: expected velocity, or no mode, with actions")
    control = _control(parse, CAMERA_TRACK, ACTIONS_SCHEMA, {"mode": "state", "held": actions})
    return control, Span(track=CAMERA_TRACK, num_chunks=None if actions else 1)


def _unit_quaternion(data: CameraData) -> list[float]:
    if data.rotation is None:
        return [0.0, 0.0, 0.0, 1.0]
    length = math.hypot(*data.rotation)
    if not SMALLEST_ROTATION <= length < math.inf:
        got = f"{length:g}" if length < math.inf else "a longer one"
        text = f"expected a quaternion of a length from {SMALLEST_ROTATION:g} to {sys.float_info.max:.2g}, got {got}"
        raise _bad(f"{CAMERA}.data.rotation", text)
    return [value / length for value in data.rotation]


def _control(parse: ControlParser, track: str, schema: str, data: dict[str, object]) -> Control:
    try:
        return Control(track=track, schema=schema, data=parse(track, schema, data))
    except RequestRefused as error:
        raise _refused(error, _camera_field(track, error.field or "")) from error


def _camera_field(track: str, field: str) -> str:
    """Name a field of a control as it stands in the interaction."""
    if track == PROMPT_TRACK or field == "transition_chunks":
        return "interaction.transition_chunks"
    if field.startswith("held"):
        return f"{CAMERA}.data.actions{field.removeprefix('held')}"
    return f"{CAMERA}.data.{field}" if field else CAMERA


# ---------------------------------------------------------------- errors


def _bad(field: str, text: str) -> BadInput:
    return BadInput(ErrorCode.BAD_MESSAGE, f"{field}: {text}", field=field)


def _refused(error: RequestRefused, field: str) -> BadInput:
    """Pass on what a model's parser says under the name that this dialect has for the field."""
    text = error.message.removeprefix(f"{error.field}: ") if error.field else error.message
    return BadInput(ErrorCode.BAD_CONTROL, f"{field}: {text}", field=field)


def _moved(error: ServerError, field: str) -> BadInput:
    text = error.message if error.field is None else error.message.replace(error.field, field, 1)
    return BadInput(error.code, text, field=field)
