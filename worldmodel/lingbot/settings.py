"""What LingBot-World v2 accepts of the settings that every model has. Torch-free."""

from __future__ import annotations

from worldmodel.lingbot.sizes import TOKEN_SIDE_PX
from worldmodel.setting_checks import check_precision, check_sides
from worldmodel.wan.precision_names import Precision


def check_settings(*, width: int, height: int, precision: str) -> None:
    """Refuse pictures of broken tokens and unknown precisions. Raises `RequestRefused` that names the setting."""
    check_sides(width, height, step_px=TOKEN_SIDE_PX)
    check_precision(precision, [each.value for each in Precision])
