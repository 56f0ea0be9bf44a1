"""What DreamZero accepts of the settings that every model has; what depends on a checkpoint comes later. Torch-free."""

from __future__ import annotations

from worldmodel.setting_checks import check_precision, check_sides
from worldmodel.wan.precision_names import Precision

PRECISIONS = (Precision.FP32.value, Precision.BF16.value, Precision.FP8.value)
"""Plans this model has; `bf16` is what its official code serves with."""

VIEWS_PER_SIDE = 2
"""A tiled picture has two views beside each other, and two above each other."""


def check_settings(*, width: int, height: int, precision: str) -> None:
    """Refuse pictures that are no two by two views, and other precisions. Raises `RequestRefused`."""
    check_sides(width, height, step_px=VIEWS_PER_SIDE)
    check_precision(precision, PRECISIONS)
