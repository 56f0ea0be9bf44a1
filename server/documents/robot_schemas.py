"""What robots send and get, as JSON Schemas of the decoded MessagePack. Arrays stand in the form of openpi.

The messages are no pydantic models (`server/wire/robot_messages.py`), so these are written by hand; a test sends the
real messages through them.
"""

from __future__ import annotations

from typing import Any

from server.wire.robot_messages import INTERNAL_ERROR, MAX_SESSION_ID_CHARS, MAX_STEP_ID, RESET_DONE

ARRAY_REF = {"$ref": "#/components/schemas/RobotArray"}

_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_STEP_ID}


def robot_schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas by the names that documents give them."""
    return {
        "RobotArray": _array(),
        "RobotConfig": _config(),
        "RobotInfer": _infer(),
        "RobotReset": _reset(),
        "RobotActions": {"description": "float32 [rows, dims], one row for each control step.", **ARRAY_REF},
        "RobotStepAnswer": _step_answer(),
        "RobotResetText": {"type": "string", "const": RESET_DONE},
        "RobotResetMap": _object({"status": {"const": RESET_DONE}}),
        "RobotErrorText": _error_text(),
        "RobotErrorMap": _object({"type": {"const": "error"}, "message": _error_text()}),
        "RobotUnsupported": _object(
            {"type": {"const": "error"}, "code": {"const": "unsupported"}, "message": {"type": "string"}}
        ),
    }


def _array() -> dict[str, Any]:
    return {
        "description": "An array of numbers or booleans, in C order. The keys are binary; the form of msgpack-numpy "
        "(`nd`, `type`, `kind`, `shape`, `data`) is read too.",
        **_object(
            {
                "__ndarray__": {"const": True},
                "data": {"type": "string", "format": "binary"},
                "dtype": {"type": "string", "pattern": r"^[<>|=]?(b1|[iu][1248]|f[248])$"},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 8},
            }
        ),
    }


def _config() -> dict[str, Any]:
    size = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    return _object(
        {
            "image_resolution": {"description": "Height and width.", **size},
            "needs_wrist_camera": {"type": "boolean"},
            "n_external_cameras": {"type": "integer", "minimum": 0},
            "needs_stereo_camera": {"type": "boolean"},
            "needs_session_id": {"type": "boolean"},
            "action_space": {"type": "string"},
        }
    )


def _infer() -> dict[str, Any]:
    number_or_list = [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]
    return {
        "description": "An observation. Other keys have no effect, unless they are arrays: these are part of it.",
        "type": "object",
        "properties": {
            "endpoint": {"type": "string", "not": {"const": "reset"}},
            "session_id": _session_id(),
            "prompt": {"type": ["string", "null"]},
            "step_id": _COUNT,
            "run": _COUNT,
        },
        "patternProperties": {"^observation/": {"anyOf": [ARRAY_REF, *number_or_list]}},
    }


def _reset() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"endpoint": {"const": "reset"}, "session_id": _session_id()},
        "required": ["endpoint"],
    }


def _step_answer() -> dict[str, Any]:
    times = {"type": "object", "additionalProperties": {"type": "number"}}
    return _object(
        {
            "actions": ARRAY_REF,
            "session_id": {"type": ["string", "null"]},
            "run": _COUNT,
            "step_id": _COUNT,
            "server_timing": {"description": "Milliseconds.", **times},
        }
    )


def _session_id() -> dict[str, Any]:
    return {"type": ["string", "null"], "maxLength": MAX_SESSION_ID_CHARS}


def _error_text() -> dict[str, Any]:
    return {"type": "string", "pattern": f"^([a-z_]+: .*|{INTERNAL_ERROR})$"}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
