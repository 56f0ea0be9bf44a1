"""JSON Schemas of the controls of LingBot-World v2, as clients get them. Torch-free.

They describe what `controls.py` reads; a test sends both the same data.
"""

from __future__ import annotations

from typing import Any

from worldmodel.lingbot.config import MAX_PIXELS, MAX_TRAJECTORY_POSES, MIN_FOCAL_PX
from worldmodel.lingbot.controls import (
    ACTION_ORDER,
    ACTIONS_SCHEMA,
    FOLDER_PATTERN,
    FOLDER_SCHEMA,
    MAX_CLIENT_TS_MS,
    MAX_COORDINATE,
    MAX_FOLDER_CHARS,
    MAX_SCRIPT_LATENT_FRAMES,
    MAX_TRANSITION_CHUNKS,
    MAX_TRANSITIONS,
    MOTION_SCHEMA,
    TRAJECTORY_SCHEMA,
    TRANSITION_SCHEMA,
    MotionMode,
)


def control_schemas() -> dict[str, object]:
    """Return the JSON Schema of each control's `data`, keyed by schema name.

    Two rules are outside what a schema can say and are checked by the parser alone: rotations are orthonormal, and
    intrinsics have one row or as many as there are poses.
    """
    actions = {
        "type": "array",
        "items": {"enum": list(ACTION_ORDER)},
        "uniqueItems": True,
        "maxItems": len(ACTION_ORDER),
    }
    transition = _object({"actions": actions, "client_ts_ms": _number(0.0, MAX_CLIENT_TS_MS)}, required=("actions",))
    folder = {"type": "string", "pattern": FOLDER_PATTERN, "maxLength": MAX_FOLDER_CHARS}
    chunks = {"type": "integer", "minimum": 1, "maximum": MAX_TRANSITION_CHUNKS}
    return {
        ACTIONS_SCHEMA: {
            "title": "Camera keys",
            "oneOf": [
                _object({"mode": {"const": "state"}, "transitions": _array(transition, 1, MAX_TRANSITIONS)}),
                _object({"mode": {"const": "state"}, "held": actions}),
                _object({"mode": {"const": "script"}, "frames": _array(actions, 1, MAX_SCRIPT_LATENT_FRAMES)}),
            ],
        },
        TRAJECTORY_SCHEMA: _trajectory_schema(),
        FOLDER_SCHEMA: {"title": "Camera trajectory from files"} | _object({"folder": folder}),
        MOTION_SCHEMA: {
            "title": "Camera motion",
            "oneOf": [
                _motion_schema(MotionMode.TARGET, MAX_TRANSITION_CHUNKS),
                _motion_schema(MotionMode.VELOCITY, 1),
            ],
        },
        TRANSITION_SCHEMA: {"title": "Prompt transition"} | _object({"chunks": chunks}),
    }


def _trajectory_schema() -> dict[str, Any]:
    coordinate = _number(-MAX_COORDINATE, MAX_COORDINATE)
    focal, centre = _number(MIN_FOCAL_PX, MAX_PIXELS), _number(-MAX_PIXELS, MAX_PIXELS)
    row = {
        "type": "array",
        "prefixItems": [focal, focal, centre, centre],
        "minItems": 4,
        "maxItems": 4,
    }
    side = {"type": "integer", "minimum": 1, "maximum": int(MAX_PIXELS)}
    last_row = {"type": "array", "prefixItems": [_around(want) for want in (0, 0, 0, 1)], "minItems": 4, "maxItems": 4}
    pose = {
        "type": "array",
        "prefixItems": [*[_array(coordinate, 4, 4)] * 3, last_row],
        "minItems": 4,
        "maxItems": 4,
    }
    schema = _object(
        {
            "poses": _array(pose, 1, MAX_TRAJECTORY_POSES),
            "intrinsics": _array(row, 1, MAX_TRAJECTORY_POSES),
            "intrinsics_size": _array(side, 2, 2),
        },
        required=("poses",),
    )
    return {"title": "Camera trajectory"} | schema | {"dependentRequired": {"intrinsics_size": ["intrinsics"]}}


def _motion_schema(mode: MotionMode, max_chunks: int) -> dict[str, Any]:
    return _object(
        {
            "mode": {"const": str(mode)},
            "translation": _array(_number(-MAX_COORDINATE, MAX_COORDINATE), 3, 3),
            "rotation": _array(_number(-2.0, 2.0), 4, 4),
            "transition_chunks": {"type": "integer", "minimum": 1, "maximum": max_chunks},
        },
        required=("mode", "translation", "rotation"),
    )


def _object(properties: dict[str, Any], required: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def _array(items: dict[str, Any], minimum: int, maximum: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": minimum, "maxItems": maximum}


def _number(minimum: float, maximum: float) -> dict[str, Any]:
    return {"type": "number", "minimum": minimum, "maximum": maximum}


def _around(value: float) -> dict[str, Any]:
    return _number(value - 1e-6, value + 1e-6)
