"""The controls that clients may send to LingBot-World v2: checked here and decoded here. Torch-free.

Four schemas on the track `camera`, one on the track `prompt`. `parse_control` runs in the server and gives canonical
JSON; `decode_control` runs in the worker and gives a frozen value. What a control does to the camera belongs to
`reducer.py`; `control_schemas.py` describes the same shapes to clients.

Axes are OpenCV's (x right, y down, z forward); poses are camera-to-world.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from worldmodel.errors import RequestRefused
from worldmodel.json_checks import JsonReader, nearest
from worldmodel.lingbot.config import (
    MAX_PIXELS,
    MAX_TRAJECTORY_POSES,
    MIN_FOCAL_PX,
    OFFICIAL_HEIGHT,
    OFFICIAL_WIDTH,
)
from worldmodel.messages import Control

CAMERA_TRACK = "camera"
ACTIONS_SCHEMA = "lingbot.camera_actions.v1"
TRAJECTORY_SCHEMA = "lingbot.camera_trajectory.v1"
FOLDER_SCHEMA = "lingbot.camera_folder.v1"
MOTION_SCHEMA = "lingbot.camera_motion.v1"

PROMPT_TRACK = "prompt"
TRANSITION_SCHEMA = "lingbot.prompt_transition.v1"

SCHEMAS: dict[str, tuple[str, ...]] = {
    CAMERA_TRACK: (ACTIONS_SCHEMA, TRAJECTORY_SCHEMA, FOLDER_SCHEMA, MOTION_SCHEMA),
    PROMPT_TRACK: (TRANSITION_SCHEMA,),
}
"""What each track takes."""

MAX_TRANSITIONS = 256
MAX_SCRIPT_LATENT_FRAMES = 4096
MAX_TRANSITION_CHUNKS = 256
MAX_COORDINATE = 1e6
MAX_CLIENT_TS_MS = 2.0**53
MAX_FOLDER_CHARS = 256
FOLDER_PATTERN = "^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
"""Names joined by slashes; none begins with a dot, so that none leads upwards."""

ROTATION_TOLERANCE = 1e-3
"""How far a rotation may be from orthonormal, and a quaternion from unit length, before it is refused."""

_READER = JsonReader(code="bad_control", root="data")

Row = tuple[float, ...]


class Action(StrEnum):
    """Keys, lower case. w/s forward and back, a/d left and right, j/l turn left and right, i/k look up and down."""

    W = "w"
    A = "a"
    S = "s"
    D = "d"
    I = "i"  # noqa: E741
    J = "j"
    K = "k"
    L = "l"


ACTION_ORDER: tuple[str, ...] = tuple(str(action) for action in Action)

Actions = tuple[Action, ...]
"""A set of held keys, each once, in the order of `Action`."""


class MotionMode(StrEnum):
    """TARGET: go to a pose. VELOCITY: repeat a relative pose in every latent frame until replaced."""

    TARGET = "target"
    VELOCITY = "velocity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Full snapshot of the held keys. `client_ts_ms` is the client's own clock, for logs only."""

    actions: Actions
    client_ts_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraActionsState:
    """Snapshots in the order in which they happened; the last one stays in force."""

    transitions: tuple[Transition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraScript:
    """Keys for the next `len(frames)` latent frames, then none."""

    frames: tuple[Actions, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraTrajectory:
    """Camera-to-world poses for the next `len(poses)` latent frames, then no motion.

    A pose is 16 numbers, row-major, rigid within `ROTATION_TOLERANCE`. The first pose is where the camera already is:
    only the differences between poses act. `intrinsics` holds no row (the model's default), one row, or one row a
    pose: fx, fy, cx, cy in pixels of an image of `intrinsics_size` (width, height).
    """

    poses: tuple[Row, ...]
    intrinsics: tuple[Row, ...]
    intrinsics_size: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraFolder:
    """The trajectory in the files of a folder, named by the parts of its path below the server's `camera_root`."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraMotion:
    """An SE(3) command: `translation` x, y, z and `rotation` as a quaternion x, y, z, w of unit length within
    tolerance.

    A target is a camera-to-world pose, with the run's first camera as the world; it is reached after
    `transition_chunks`. A velocity is the pose of the next latent frame seen from the last one.
    """

    mode: MotionMode
    translation: tuple[float, float, float]
    rotation: tuple[float, float, float, float]
    transition_chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTransition:
    """How many chunks the new prompt of the same chunk takes to come into force; without a new prompt nothing."""

    chunks: int


CameraControl = CameraActionsState | CameraScript | CameraTrajectory | CameraFolder | CameraMotion
AnyControl = CameraControl | PromptTransition


def parse_control(track: str, schema: str, data: object) -> bytes:
    """Check one control and return it as canonical JSON (UTF-8).

    Raises `RequestRefused` with code ``unknown_track``, ``unknown_schema`` or ``bad_control``; the `field` of the
    last is a path below `data` (None for `data` itself).
    """
    return json.dumps(_to_json(_read(track, schema, data)), separators=(",", ":"), allow_nan=False).encode()


def decode_control(control: Control) -> AnyControl:
    """Read a control that `parse_control` made; anything else raises `RequestRefused` as there."""
    try:
        data = json.loads(control.data)
    except ValueError as error:
        raise _READER.refusal("", "expected JSON") from error
    return _read(control.track, control.schema, data)


def _read(track: str, schema: str, data: object) -> AnyControl:
    if track not in SCHEMAS:
        raise RequestRefused(
            f"unknown track {track[:100]!r}: expected one of {', '.join(SCHEMAS)}", code="unknown_track", field="track"
        )
    for other, schemas in SCHEMAS.items():
        if schema in schemas and other != track:
            text = f"track {track!r}: expected {other!r}, to which the schema {schema} belongs"
            raise RequestRefused(text, code="unknown_schema", field="track")
    if schema not in SCHEMAS[track]:
        hint = nearest(schema, SCHEMAS[track]) or f": track {track} takes {', '.join(SCHEMAS[track])}"
        raise RequestRefused(f"unknown schema {schema[:100]!r}{hint}", code="unknown_schema", field="schema")
    match schema:
        case "lingbot.camera_actions.v1":
            return _read_actions(data)
        case "lingbot.camera_trajectory.v1":
            return _read_trajectory(data)
        case "lingbot.camera_folder.v1":
            return _read_folder(data)
        case "lingbot.camera_motion.v1":
            return _read_motion(data)
        case "lingbot.prompt_transition.v1":
            return _read_transition(data)
    raise AssertionError(f"schema {schema} is listed and not read")


# ---------------------------------------------------------------- reading


def _read_actions(data: object) -> CameraActionsState | CameraScript:
    fields = _READER.read_object(data, "", known=("mode", "transitions", "held", "frames"), required=("mode",))
    mode = _READER.read_choice(fields["mode"], "mode", ("state", "script"))
    if mode == "script":
        fields = _READER.read_object(data, "", known=("mode", "frames"), required=("frames",))
        frames = _READER.read_list(
            fields["frames"], "frames", minimum=1, maximum=MAX_SCRIPT_LATENT_FRAMES, of="lists of actions"
        )
        return CameraScript(frames=tuple(_keys(keys, f"frames[{index}]") for index, keys in enumerate(frames)))
    fields = _READER.read_object(data, "", known=("mode", "transitions", "held"))
    if ("held" in fields) == ("transitions" in fields):
        raise _READER.refusal("transitions", "expected exactly one of transitions and held")
    if "held" in fields:
        return CameraActionsState(transitions=(Transition(actions=_keys(fields["held"], "held")),))
    items = _READER.read_list(
        fields["transitions"], "transitions", minimum=1, maximum=MAX_TRANSITIONS, of="transitions"
    )
    return CameraActionsState(
        transitions=tuple(_transition(item, f"transitions[{index}]") for index, item in enumerate(items))
    )


def _transition(value: object, path: str) -> Transition:
    fields = _READER.read_object(value, path, known=("actions", "client_ts_ms"), required=("actions",))
    client_ts_ms = None
    if "client_ts_ms" in fields:
        client_ts_ms = _READER.read_number(
            fields["client_ts_ms"], f"{path}.client_ts_ms", minimum=0.0, maximum=MAX_CLIENT_TS_MS
        )
    return Transition(actions=_keys(fields["actions"], f"{path}.actions"), client_ts_ms=client_ts_ms)


def _keys(value: object, path: str) -> Actions:
    items = _READER.read_list(value, path, minimum=0, maximum=len(ACTION_ORDER), of="actions")
    seen: set[str] = set()
    for index, item in enumerate(items):
        action = _READER.read_choice(item, f"{path}[{index}]", ACTION_ORDER)
        if action in seen:
            raise _READER.refusal(f"{path}[{index}]", f"action {action!r} is given twice")
        seen.add(action)
    return tuple(action for action in Action if action in seen)


def _read_trajectory(data: object) -> CameraTrajectory:
    fields = _READER.read_object(data, "", known=("poses", "intrinsics", "intrinsics_size"), required=("poses",))
    items = _READER.read_list(fields["poses"], "poses", minimum=1, maximum=MAX_TRAJECTORY_POSES, of="4x4 matrices")
    poses = tuple(_pose(item, f"poses[{index}]") for index, item in enumerate(items))
    intrinsics: tuple[Row, ...] = ()
    size = (OFFICIAL_WIDTH, OFFICIAL_HEIGHT)
    if "intrinsics" in fields:
        rows = _READER.read_list(
            fields["intrinsics"], "intrinsics", minimum=1, maximum=MAX_TRAJECTORY_POSES, of="rows fx, fy, cx, cy"
        )
        if len(rows) not in (1, len(poses)):
            raise _READER.refusal("intrinsics", f"expected 1 row or one a pose ({len(poses)}), got {len(rows)}")
        intrinsics = tuple(_intrinsics_row(row, f"intrinsics[{index}]") for index, row in enumerate(rows))
    if "intrinsics_size" in fields:
        if not intrinsics:
            raise _READER.refusal("intrinsics_size", "expected together with intrinsics only")
        sides = _READER.read_list(
            fields["intrinsics_size"], "intrinsics_size", minimum=2, maximum=2, of="sides in pixels"
        )
        width, height = (
            _READER.read_integer(side, f"intrinsics_size[{index}]", minimum=1, maximum=int(MAX_PIXELS))
            for index, side in enumerate(sides)
        )
        size = (width, height)
    return CameraTrajectory(poses=poses, intrinsics=intrinsics, intrinsics_size=size)


def _numbers(value: object, path: str, count: int, of: str, limit: float = MAX_COORDINATE) -> Row:
    items = _READER.read_list(value, path, minimum=count, maximum=count, of=of)
    return tuple(
        _READER.read_number(item, f"{path}[{index}]", minimum=-limit, maximum=limit) for index, item in enumerate(items)
    )


def _intrinsics_row(value: object, path: str) -> Row:
    row = _numbers(value, path, 4, "numbers fx, fy, cx, cy", MAX_PIXELS)
    for index in range(2):
        _READER.read_number(row[index], f"{path}[{index}]", minimum=MIN_FOCAL_PX, maximum=MAX_PIXELS)
    return row


def _pose(value: object, path: str) -> Row:
    rows = [
        _numbers(row, f"{path}[{index}]", 4, "numbers")
        for index, row in enumerate(_READER.read_list(value, path, minimum=4, maximum=4, of="rows"))
    ]
    if any(abs(got - want) > 1e-6 for got, want in zip(rows[3], (0.0, 0.0, 0.0, 1.0), strict=True)):
        raise _READER.refusal(f"{path}[3]", f"expected the last row 0, 0, 0, 1, got {list(rows[3])}")
    _check_rotation(rows, path)
    return (*rows[0], *rows[1], *rows[2], 0.0, 0.0, 0.0, 1.0)


def _check_rotation(rows: list[Row], path: str) -> None:
    """Refuse a matrix whose rows are not orthonormal, or that mirrors."""
    a, b, c = (row[:3] for row in rows[:3])
    pairs = ((a, a, 1.0), (b, b, 1.0), (c, c, 1.0), (a, b, 0.0), (a, c, 0.0), (b, c, 0.0))
    error = max(abs(u[0] * v[0] + u[1] * v[1] + u[2] * v[2] - want) for u, v, want in pairs)
    if error > ROTATION_TOLERANCE:
        raise _READER.refusal(
            path, f"expected a rotation, rows orthonormal within {ROTATION_TOLERANCE:g}, got an error of {error:.3g}"
        )
    determinant = (
        a[0] * (b[1] * c[2] - b[2] * c[1]) - a[1] * (b[0] * c[2] - b[2] * c[0]) + a[2] * (b[0] * c[1] - b[1] * c[0])
    )
    if determinant < 0:
        raise _READER.refusal(path, "expected a rotation, got a mirrored one (determinant -1)")


def _read_folder(data: object) -> CameraFolder:
    folder = _READER.read_object(data, "", known=("folder",), required=("folder",))["folder"]
    if not isinstance(folder, str) or len(folder) > MAX_FOLDER_CHARS or not re.fullmatch(FOLDER_PATTERN[1:-1], folder):
        raise _READER.expected("folder", "names of letters, digits, ., _ and -, joined by /", folder)
    return CameraFolder(parts=tuple(folder.split("/")))


def _read_transition(data: object) -> PromptTransition:
    chunks = _READER.read_object(data, "", known=("chunks",), required=("chunks",))["chunks"]
    return PromptTransition(chunks=_READER.read_integer(chunks, "chunks", minimum=1, maximum=MAX_TRANSITION_CHUNKS))


def _read_motion(data: object) -> CameraMotion:
    keys = ("mode", "translation", "rotation", "transition_chunks")
    fields = _READER.read_object(data, "", known=keys, required=("mode", "translation", "rotation"))
    mode = MotionMode(_READER.read_choice(fields["mode"], "mode", [str(mode) for mode in MotionMode]))
    x, y, z = _numbers(fields["translation"], "translation", 3, "numbers x, y, z")
    qx, qy, qz, qw = _numbers(fields["rotation"], "rotation", 4, "numbers x, y, z, w", 2.0)
    length = math.hypot(qx, qy, qz, qw)
    if abs(length - 1.0) > ROTATION_TOLERANCE:
        raise _READER.refusal("rotation", f"expected a quaternion of length 1, got length {length:.6g}")
    most = MAX_TRANSITION_CHUNKS if mode is MotionMode.TARGET else 1
    chunks = _READER.read_integer(fields.get("transition_chunks", 1), "transition_chunks", minimum=1, maximum=most)
    return CameraMotion(
        mode=mode,
        translation=(x, y, z),
        rotation=(qx, qy, qz, qw),
        transition_chunks=chunks,
    )


# ---------------------------------------------------------------- writing


def _to_json(control: AnyControl) -> dict[str, Any]:
    match control:
        case CameraActionsState(transitions=transitions):
            return {"mode": "state", "transitions": [_transition_json(transition) for transition in transitions]}
        case CameraScript(frames=frames):
            return {"mode": "script", "frames": [list(actions) for actions in frames]}
        case CameraTrajectory(poses=poses, intrinsics=intrinsics, intrinsics_size=size):
            data: dict[str, Any] = {"poses": [[pose[row : row + 4] for row in range(0, 16, 4)] for pose in poses]}
            return data | ({"intrinsics": intrinsics, "intrinsics_size": size} if intrinsics else {})
        case CameraFolder(parts=parts):
            return {"folder": "/".join(parts)}
        case PromptTransition(chunks=chunks):
            return {"chunks": chunks}
        case CameraMotion():
            return {
                "mode": control.mode,
                "translation": control.translation,
                "rotation": control.rotation,
                "transition_chunks": control.transition_chunks,
            }


def _transition_json(transition: Transition) -> dict[str, Any]:
    time = {} if transition.client_ts_ms is None else {"client_ts_ms": transition.client_ts_ms}
    return {"actions": list(transition.actions)} | time
