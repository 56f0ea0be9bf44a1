"""A robot model has no controls: it is steered by observations and prompts. Torch-free."""

from __future__ import annotations

from worldmodel.errors import RequestRefused


def parse_control(track: str, schema: str, data: object) -> bytes:
    """Refuse every control."""
    raise RequestRefused(f"schema {schema!r}: this model takes no controls", code="bad_control", field="schema")


def control_schemas() -> dict[str, object]:
    """Return no schema."""
    return {}
