"""Numbers of a checkpoint's config files, which nobody has checked: of their type, finite, within bounds. Torch-free.

Bounds are far above any published model. They keep a damaged config from taking the memory or the time that its
numbers ask for before it is refused.
"""

from __future__ import annotations

from worldmodel.json_checks import describe


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
