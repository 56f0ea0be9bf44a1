"""The messages of the `robot` dialect: what a robot asks, and every form of answer as the bytes on the wire.

A request is one MessagePack map. `endpoint` "reset" begins a new episode; anything else, or none, asks for actions, as
both servers that robot clients are written for do it. Everything that is an array, or stands below `observation/`, is
part of the observation. What the model does not take of it may be anything that can be read, and has no effect, like
other keys (`seed`, `sampling_params`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from server.wire.robot_arrays import Array, WireValue, pack_message, unpack_message
from server.wire.robot_msgpack import MalformedMsgpack

OBSERVATION_PREFIX = "observation/"
MAX_ARRAYS = 64
MAX_SESSION_ID_CHARS = 128
MAX_STEP_ID = 2**53 - 1

RESET_DONE = "reset successful"
INTERNAL_ERROR = "Internal inference error"
"""What clients of both servers know as the text of a failure that is not theirs."""

Actions: TypeAlias = npt.NDArray[np.float32]


class RobotForm(StrEnum):
    """Which server's habits an address keeps.

    OFFICIAL: the order of keys of the RoboArena server; the answer to a reset and errors are text frames.
    OPENPI: the order of keys and the binary replies of vLLM-Omni's `/v1/realtime/robot/openpi`.
    """

    OFFICIAL = "official"
    OPENPI = "openpi"


class MalformedRequest(ValueError):
    """Report a request that can't be read; `field` is the key that is wrong, if it is one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """Ask for the actions that follow an observation. The arrays are views of the message.

    `run`: the run that the step is meant for; only a request with a step id has one.
    """

    session_id: str | None
    step_id: int | None
    run: int | None
    prompt: str
    arrays: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetRequest:
    """Begin a new episode."""

    session_id: str | None


RobotRequest = InferRequest | ResetRequest


def read_request(data: bytes | memoryview, taken: Collection[str] | None = None) -> RobotRequest:
    """Read one request. `taken`: names of the arrays that the model takes, None for all. Raises `MalformedRequest`."""
    try:
        value = unpack_message(data)
    except MalformedMsgpack as error:
        raise MalformedRequest(f"the request can't be read: {error}") from error
    if not isinstance(value, dict):
        raise MalformedRequest("expected a map, got another MessagePack value")
    session_id = read_session_id(value.pop("session_id", None))
    endpoint = value.pop("endpoint", None)
    if isinstance(endpoint, str) and endpoint == "reset":
        return ResetRequest(session_id=session_id)
    step_id = _read_count(value.pop("step_id", None), "step_id")
    return InferRequest(
        session_id=session_id,
        step_id=step_id,
        # Without a step id it is one of the keys that have no effect, whatever a client means by it.
        run=None if step_id is None else _read_count(value.pop("run", None), "run"),
        prompt=_read_text(value.pop("prompt", None), "prompt"),
        arrays=_read_arrays(value, taken),
    )


def read_session_id(value: object) -> str | None:
    """Return a client's own name for its session; None and the empty text are no name. Raises `MalformedRequest`."""
    if value is None or (isinstance(value, str) and not value):
        return None
    if not isinstance(value, str) or len(value) > MAX_SESSION_ID_CHARS or not value.isprintable():
        raise MalformedRequest(
            f"session_id: expected a text of at most {MAX_SESSION_ID_CHARS} printable characters", field="session_id"
        )
    return value


def read_observation(values: Mapping[str, object], taken: Collection[str] | None = None) -> dict[str, Array]:
    """Check arrays by key and turn bare numbers and lists of them into float64 arrays. Raises `MalformedRequest`.

    Only what is `taken` is looked at and returned; None takes all.
    """
    if len(values) > MAX_ARRAYS:
        raise MalformedRequest(f"the observation has {len(values)} arrays: expected at most {MAX_ARRAYS}")
    return {name: _read_array(value, name) for name, value in values.items() if taken is None or name in taken}


def _read_arrays(request: Mapping[str, WireValue], taken: Collection[str] | None) -> dict[str, Array]:
    values = {
        name: value
        for name, value in request.items()
        if isinstance(value, np.ndarray) or name.startswith(OBSERVATION_PREFIX)
    }
    return read_observation(values, taken)


def _read_array(value: object, name: str) -> Array:
    if not isinstance(value, np.ndarray):
        value = _read_numbers(value, name)
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise MalformedRequest(f"{name}: expected finite numbers, got NaN or infinity", field=name)
    return value


def _read_numbers(value: object, name: str) -> Array:
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise MalformedRequest(f"{name}: expected an array, a number or a list of numbers", field=name)
    try:
        array = np.array(value, np.float64)
    except OverflowError as error:
        raise MalformedRequest(f"{name}: a number is too large", field=name) from error
    array.flags.writeable = False
    return array


def _read_count(value: WireValue, field: str) -> int | None:
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        value = int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP_ID):
        return value
    raise MalformedRequest(f"{field}: expected an integer from 0 to {MAX_STEP_ID}", field=field)


def _read_text(value: WireValue, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise MalformedRequest(f"{field}: expected a text", field=field)


# ---------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotConfig:
    """What a robot must know before its first request. Image sizes in pixels."""

    image_height: int
    image_width: int
    needs_wrist_camera: bool
    num_external_cameras: int
    needs_stereo_camera: bool
    action_space: str


_CONFIG_KEYS: dict[RobotForm, tuple[str, ...]] = {
    RobotForm.OFFICIAL: (
        "image_resolution",
        "needs_wrist_camera",
        "n_external_cameras",
        "needs_stereo_camera",
        "needs_session_id",
        "action_space",
    ),
    RobotForm.OPENPI: (
        "image_resolution",
        "n_external_cameras",
        "needs_wrist_camera",
        "needs_stereo_camera",
        "needs_session_id",
        "action_space",
    ),
}


def config_map(config: RobotConfig, form: RobotForm = RobotForm.OFFICIAL) -> dict[str, object]:
    """Return the first message to a robot, its keys in the order of the form."""
    values: dict[str, object] = {
        "image_resolution": [config.image_height, config.image_width],
        "needs_wrist_camera": config.needs_wrist_camera,
        "n_external_cameras": config.num_external_cameras,
        "needs_stereo_camera": config.needs_stereo_camera,
        # Clients read this as "send one if you have one"; a connection without is served all the same.
        "needs_session_id": True,
        "action_space": config.action_space,
    }
    return {key: values[key] for key in _CONFIG_KEYS[form]}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """The answer to a request that has a step id. `actions` is float32 [rows, dims]; times in milliseconds."""

    session_id: str | None
    run: int
    step_id: int
    actions: Actions
    server_timing: Mapping[str, float]


def pack_actions(actions: Actions) -> bytes:
    """Return the answer to a request without a step id: the bare array, as both peers send it."""
    return pack_message(actions)


def pack_step_answer(answer: StepAnswer) -> bytes:
    return pack_message(
        {
            "actions": answer.actions,
            "session_id": answer.session_id,
            "run": answer.run,
            "step_id": answer.step_id,
            "server_timing": dict(answer.server_timing),
        }
    )


def reset_reply(form: RobotForm) -> str | bytes:
    """Return the answer to a reset: a text frame or a binary one."""
    return RESET_DONE if form is RobotForm.OFFICIAL else pack_message({"status": RESET_DONE})


def error_reply(form: RobotForm, code: str, message: str) -> str | bytes:
    """Return an error as a text frame or as a binary map of the two keys that clients know."""
    text = INTERNAL_ERROR if code == "internal" else f"{code}: {message}"
    return text if form is RobotForm.OFFICIAL else pack_message({"type": "error", "message": text})


def unsupported_reply(message: str) -> str:
    """Return what a client hears where no robot model is served: JSON text in both forms."""
    return json.dumps({"type": "error", "code": "unsupported", "message": message})


def row_lists(actions: Actions) -> Sequence[Sequence[float]]:
    """Return actions as plain lists for JSON."""
    rows: list[list[float]] = actions.tolist()
    return rows
