"""JSON of untrusted files: bounded, one sentence for everything that can be wrong. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worldmodel.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_NAME_BYTES = 255
"""Longest name of a file on the usual file systems."""


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises `CheckpointError`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read ({error.strerror})") from error
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(str(file), f"is longer than the {MAX_JSON_BYTES} bytes that are read of a JSON file")
    return parse_json_object(content, str(file))


def parse_json_object(content: bytes, subject: str) -> dict[str, Any]:
    """Parse one JSON object without repeated keys. Raises `CheckpointError`."""
    try:
        parsed = json.loads(content, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(subject, f"is not valid JSON ({reason})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(subject, f"must hold a JSON object, found {type(parsed).__name__}")
    return parsed


def is_plain_name(name: str) -> bool:
    """Tell whether a text of a file may be the name of a file in the same folder, and leads nowhere else."""
    is_name = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return is_name and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands there twice")
        found[key] = value
    return found
