"""Values of a checkpoint's config files, which nobody has checked: of their type, finite, within bounds. Torch-free.

Bounds are far above any published model. They keep a damaged config from taking the memory or the time that its
numbers ask for before it is refused.
"""

from __future__ import annotations

from worldmodel.json_checks import describe

MAX_SHOWN_ITEMS = 4


def integer(value: object, name: str, *, maximum: int, minimum: int = 1) -> int:
    """Return an integer within closed bounds. Raises ValueError that begins with `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{name} must be an integer from {minimum} to {maximum}, got {describe(value)}")
    return value


def number(value: object, name: str, *, minimum: float, maximum: float) -> float:
    """Return a finite number within closed bounds. Raises ValueError that begins with `name`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ValueError(f"{name} must be a finite number from {minimum:g} to {maximum:g}, got {describe(value)}")
    return float(value)


def shown(value: object) -> str:
    """Name a value for an error text as `describe` does, but a short list by its items."""
    if isinstance(value, list | tuple) and len(value) <= MAX_SHOWN_ITEMS:
        return f"[{', '.join(map(describe, value))}]"
    return describe(value)


def fixed(value: object, name: str, expected: object) -> None:
    """Check a setting of which one value is implemented. Raises ValueError that begins with `name`."""
    if (list(value) if isinstance(value, tuple) else value) != expected:
        raise ValueError(f"{name} must be {shown(expected)}, got {shown(value)}")
