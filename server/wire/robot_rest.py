"""Bodies of the REST interface for robots, JSON form. The MessagePack form of a step is in `robot_messages.py`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from server.wire.messages import WireModel
from server.wire.robot_arrays import Array, read_array
from server.wire.robot_messages import MAX_ARRAYS, MAX_SESSION_ID_CHARS, MAX_STEP_ID, MalformedRequest, read_observation
from server.wire.robot_msgpack import MalformedMsgpack

REST_SESSION_ID = r"^[A-Za-z0-9_-][A-Za-z0-9_.:@-]*$"

StepId = Annotated[int, Field(ge=0, le=MAX_STEP_ID)]


class CreateRobotSession(WireModel):
    """Body of `POST /v1/robot/sessions`. Without `session_id` the server makes one; it is part of addresses."""

    session_id: Annotated[str, Field(max_length=MAX_SESSION_ID_CHARS, pattern=REST_SESSION_ID)] | None = None


class ArrayBody(WireModel):
    """An array in JSON: its type as numpy writes it (`|u1`, `<f4`), its shape, and its bytes in C order as base64."""

    dtype: Annotated[str, Field(max_length=4)]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    data: str


def _explain_as_one(value: object, read: ValidatorFunctionWrapHandler) -> object:
    """Name what a value may be in one sentence, where a union would be wrong in three ways at once."""
    try:
        return read(value)
    except ValidationError as error:
        text = "expected a number, a list of numbers, or an array as exactly dtype, shape and data"
        raise PydanticCustomError("bad_array", text) from error


Measured = Annotated[ArrayBody | list[float] | float, WrapValidator(_explain_as_one)]


class RobotStep(WireModel):
    """Body of `POST /v1/robot/sessions/{id}/step`. Step ids rise within a run; the last one may be sent again.

    `run` is optional: a step meant for another run than the current one is refused.
    """

    step_id: StepId
    run: Annotated[int, Field(ge=0)] | None = None
    prompt: str = ""
    observation: Annotated[dict[str, Measured], Field(max_length=MAX_ARRAYS)]


class RobotStepResult(WireModel):
    """The actions that follow an observation, one row per control step. Times in milliseconds."""

    session_id: str
    run: int
    step_id: int
    actions: list[list[float]]
    server_timing: dict[str, float]


class RobotSessionView(WireModel):
    """A robot's session. `last_step_id` is the last one answered in this run, null if none had an id."""

    session_id: str
    state: str
    run: int
    num_steps: int
    last_step_id: int | None
    waiting: int
    connected: bool
    age_s: float


class RobotSessionList(WireModel):
    sessions: list[RobotSessionView]


class RobotActivityView(WireModel):
    """What one robot does, with a name or without. Times in milliseconds, of its latest calls; null before the first.

    `key` stays the same while the session lives. `actions` are those of the last answer, one row per control step.
    """

    key: str
    session_id: str | None
    state: str
    run: int
    num_steps: int
    waiting: int
    connected: bool
    age_s: float
    quiet_s: float
    prompt: str
    last_ms: float | None
    median_ms: float | None
    p95_ms: float | None
    recent_ms: list[float]
    actions: list[list[float]] | None


class RobotActivity(WireModel):
    """What all robots of the caller do. `num_connections` counts everybody's, also those that have not asked yet."""

    num_connections: int
    robots: list[RobotActivityView]


class RobotStateInput(WireModel):
    name: str
    num_dims: int


class RobotDescription(WireModel):
    """What the served robot model takes and gives. `config` is the first message on a WebSocket."""

    model: str
    embodiment: str
    cameras: list[str]
    states: list[RobotStateInput]
    max_request_frames: int
    action_horizon: int
    action_dims: int
    config: dict[str, Any]


def read_step_arrays(step: RobotStep, taken: Collection[str] | None = None) -> dict[str, Array]:
    """Return the observation of a JSON step as arrays. Raises `MalformedRequest` naming the array.

    `taken`: names of the arrays that the model takes, None for all.
    """
    values: dict[str, object] = {}
    for name, value in step.observation.items():
        values[name] = _decode(value, name) if isinstance(value, ArrayBody) else value
    return read_observation(values, taken)


def _decode(body: ArrayBody, name: str) -> Array:
    try:
        data = base64.b64decode(body.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedRequest(f"{name}: data is not base64", field=name) from error
    try:
        return read_array(body.dtype, body.shape, memoryview(data), name)
    except MalformedMsgpack as error:
        raise MalformedRequest(str(error), field=name) from error
