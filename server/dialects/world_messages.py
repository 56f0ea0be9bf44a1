"""The `world` dialect on paper: text to checked messages, and chunks to binary frames. No state, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from server.chunks import ReadyChunk
from server.config import LimitsSection, ServerConfig
from server.errors import BadInput, ErrorCode, EventRefused
from server.limits import MAX_PATH_CHARS, BadPart, check_prompt, parse_json_object
from server.media.formats import EncodedChunk, InitSegment, MuxedChunk
from server.wire.binary import pack_chunk
from server.wire.messages import (
    PROTOCOL_VERSION,
    AppliedEventHeader,
    ChunkHeader,
    ChunkTimings,
    ClientMessage,
    ControlMessage,
    EventId,
    Limits,
    Ping,
    Playback,
    SessionClose,
    SessionEvent,
    SessionPause,
    SessionReset,
    SessionResume,
    SessionStart,
    SessionUnpause,
    SessionWatch,
    WireModel,
)
from worldmodel.catalog import ControlParser
from worldmodel.errors import RequestRefused
from worldmodel.messages import Control, SessionId

ModelT = TypeVar("ModelT", bound=WireModel)

_MODELS: dict[str, type[ClientMessage]] = {
    "session.start": SessionStart,
    "session.watch": SessionWatch,
    "session.event": SessionEvent,
    "session.reset": SessionReset,
    "session.pause": SessionPause,
    "session.unpause": SessionUnpause,
    "session.close": SessionClose,
    "playback": Playback,
    "ping": Ping,
}

_EXPECTED = {
    "none_required": "null",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
}
"""Kinds of errors of pydantic whose own words are about Python."""

_EVENT_ID: TypeAdapter[int] = TypeAdapter(EventId)

# ---------------------------------------------------------------- client -> server


def parse_client_message(text: str, limits: LimitsSection) -> ClientMessage:
    """Check one text frame. Raises `BadInput` that names the offending field, and the event if it was one."""
    if len(text) > limits.max_message_bytes:
        raise BadInput(
            ErrorCode.TOO_LARGE,
            f"the message has more than {limits.max_message_bytes} bytes (limits.max_message_bytes)",
        )
    try:
        fields = parse_json_object(text, max_depth=limits.max_json_depth, max_parts=limits.max_json_parts)
    except BadPart as error:
        error.event_id = _refused_event_id(error.document)
        raise
    try:
        return _read_message(fields, limits)
    except BadInput as error:
        error.event_id = _refused_event_id(fields)
        raise


def _read_message(fields: Mapping[str, object], limits: LimitsSection) -> ClientMessage:
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _MODELS:
        known = ", ".join(_MODELS)
        shown = repr(kind)[:80] if "type" in fields else "nothing"
        raise BadInput(ErrorCode.BAD_MESSAGE, f"type: expected one of {known}, got {shown}", field="type")
    model: type[ClientMessage] = _MODELS[kind]
    if kind in ("session.start", "session.watch"):
        check_protocol(fields.get("protocol"))
    if kind == "session.start" and "resume_token" in fields:
        model = SessionResume
        _check_resume_only(fields)
    message = validate(model, fields)
    check_prompts(message, limits)
    return message


def _check_resume_only(fields: Mapping[str, object]) -> None:
    """Refuse the fields of a new session beside a resume token, before what a resume lacks is complained about."""
    for name in fields:
        if name in SessionStart.model_fields and name not in SessionResume.model_fields:
            raise BadInput(ErrorCode.BAD_MESSAGE, f"{name}: not together with resume_token", field=name)


def _refused_event_id(document: object) -> int | None:
    """Return the id of an event that can't be read as a whole, None for another message or a bad id."""
    if not isinstance(document, dict) or document.get("type") != "session.event":
        return None
    try:
        return _EVENT_ID.validate_python(document.get("event_id"))
    except ValidationError:
        return None


def check_protocol(protocol: object) -> None:
    if protocol is not None and protocol != PROTOCOL_VERSION:
        raise BadInput(
            ErrorCode.BAD_PROTOCOL,
            f"protocol: this server speaks {PROTOCOL_VERSION}, got {repr(protocol)[:40]}",
            field="protocol",
        )


def check_prompts(message: object, limits: LimitsSection) -> None:
    """Bound the prompt of any message that has one."""
    if isinstance(message, SessionStart | SessionEvent | SessionReset) and message.prompt is not None:
        check_prompt(message.prompt, max_chars=limits.max_prompt_chars)


def validate(model: type[ModelT], fields: Mapping[str, object]) -> ModelT:
    """Check parsed JSON against a model. Raises `BadInput` for the first thing that is wrong with it."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _bad_message(error.errors(include_url=False), fields) from error


def _bad_message(errors: list[ErrorDetails], fields: Mapping[str, object]) -> BadInput:
    """Say what is wrong first; fields that nobody knows are mentioned last, they often are another field misspelt."""
    first = min(errors, key=lambda it: it["type"] == "extra_forbidden")
    path = first["loc"]
    if path[:1] == ("image",) and len(path) > 1:
        return _bad_image_reference(fields.get("image"))
    field = _field_name(path)
    code = ErrorCode.BAD_SIZE if field == "size" else ErrorCode.BAD_MESSAGE
    return BadInput(code, f"{field}: {_describe(first)}", field=field)


def _describe(error: ErrorDetails) -> str:
    match error["type"]:
        case "missing":
            return "this field is required"
        case "extra_forbidden":
            return "there is no such field"
        case "too_short" | "too_long":
            context = error["ctx"]
            bound = (
                f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
            )
            return f"expected {bound} items, got {context['actual_length']}"
        case kind if kind in _EXPECTED:
            return f"expected {_EXPECTED[kind]}, got {repr(error['input'])[:80]}"
        case _:
            return f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {repr(error['input'])[:80]}"


def _bad_image_reference(image: object) -> BadInput:
    """Explain a union of three shapes as one rule."""
    names = ("base64", "upload_id", "name")
    given = [name for name in names if name in image] if isinstance(image, dict) else []
    if isinstance(image, dict) and len(given) == 1:
        if not isinstance(image[given[0]], str):
            field = f"image.{given[0]}"
            return BadInput(ErrorCode.BAD_IMAGE, f"{field}: expected a string", field=field)
        other = next(name for name in image if name != given[0])
        field = f"image.{other}"[:MAX_PATH_CHARS]
        return BadInput(ErrorCode.BAD_IMAGE, f"{field}: there is no such field beside {given[0]}", field=field)
    return BadInput(ErrorCode.BAD_IMAGE, f"image: expected exactly one of {', '.join(names)}", field="image")


def _field_name(path: tuple[int | str, ...]) -> str:
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}"
    return name.lstrip(".") or "type"


def read_controls(controls: list[ControlMessage], parse: ControlParser, *, event_id: int) -> tuple[Control, ...]:
    """Have the model's parser check each control. Raises `EventRefused` whose field is a path in the message."""
    checked: list[Control] = []
    for index, control in enumerate(controls):
        try:
            data = parse(control.track, control.schema_, control.data)
        except RequestRefused as error:
            raise EventRefused(
                ErrorCode.BAD_CONTROL, error.message, field=_control_field(index, error.field), event_id=event_id
            ) from error
        checked.append(Control(track=control.track, schema=control.schema_, data=data))
    return tuple(checked)


def _control_field(index: int, field: str | None) -> str:
    """Place a path that is relative to `data`, or the name of a sibling of it, in the message."""
    if field is None:
        return f"controls[{index}]"
    if field in ("track", "schema", "data"):
        return f"controls[{index}].{field}"
    separator = "" if field.startswith("[") else "."
    return f"controls[{index}].data{separator}{field}"


# ---------------------------------------------------------------- server -> client


def limits_message(config: ServerConfig) -> Limits:
    return Limits(
        max_message_bytes=config.limits.max_message_bytes,
        max_pending_events=config.session.max_pending_events,
        max_prompt_chars=config.limits.max_prompt_chars,
        max_image_bytes=config.limits.max_image_bytes,
        max_image_pixels=config.limits.max_image_pixels,
        max_events_per_second=config.limits.max_events_per_second,
        max_messages_per_second=config.limits.max_messages_per_second,
        resume_s=config.session.resume_s,
        lead_chunks=config.session.lead_chunks,
        max_session_s=config.session.max_session_s,
        idle_s=config.session.idle_s,
    )


def init_frame(init: InitSegment, *, session_id: SessionId, epoch: int, run: int, timescale: int) -> bytes:
    """Build the binary frame of an init segment."""
    header = ChunkHeader(
        kind="init", session_id=session_id, epoch=epoch, run=run, timescale=timescale, codec=init.codec
    )
    return pack_chunk(header, init.payload)


def media_frame(ready: ReadyChunk[EncodedChunk], muxed: MuxedChunk, *, session_id: SessionId, epoch: int) -> bytes:
    """Build the binary frame of a chunk."""
    chunk = ready.chunk
    header = ChunkHeader(
        kind="media",
        session_id=session_id,
        epoch=epoch,
        run=chunk.run,
        chunk_index=chunk.chunk_index,
        request_id=chunk.request_id,
        applied=[
            AppliedEventHeader(event_id=it.event_id, latent_frame=it.latent_frame, wait_ms=round(it.wait_ms, 3))
            for it in chunk.applied
        ],
        num_frames=muxed.num_frames,
        pts=muxed.pts,
        timescale=muxed.timescale,
        keyframe=muxed.keyframe,
        pose=None if chunk.pose is None else list(chunk.pose),
        timings_ms=ChunkTimings(
            queue=round(chunk.queue_ms, 3),
            denoise=round(chunk.timings.denoise_ms, 3),
            commit=round(chunk.timings.commit_ms, 3),
            decode=round(chunk.timings.decode_ms, 3),
            transfer=round(ready.transfer_ms, 3),
            encode=round(ready.encode_ms, 3),
        ),
        shape=None if muxed.shape is None else list(muxed.shape),
        sizes=None if muxed.sizes is None else list(muxed.sizes),
    )
    return pack_chunk(header, muxed.payload)
