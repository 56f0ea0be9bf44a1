"""Checks of the settings that every model has, for the models' own `check_settings`. Torch-free."""

from __future__ import annotations

from collections.abc import Collection

from worldmodel.errors import RequestRefused

BAD_SETTINGS = "bad_settings"


def check_sides(width: int, height: int, *, step_px: int) -> None:
    """Raise `RequestRefused` for a side that is no multiple of `step_px`."""
    for name, side_px in (("width", width), ("height", height)):
        if side_px < step_px or side_px % step_px:
            raise RequestRefused(
                f"{name}: expected a multiple of {step_px} pixels, got {side_px}", code=BAD_SETTINGS, field=name
            )


def check_precision(precision: str, known: Collection[str]) -> None:
    """Raise `RequestRefused` for a precision that the model does not have."""
    if precision not in known:
        raise RequestRefused(
            f"precision: unknown {precision!r}: expected one of {', '.join(known)}",
            code=BAD_SETTINGS,
            field="precision",
        )
