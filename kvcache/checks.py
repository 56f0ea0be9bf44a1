"""Checks of tensors that callers hand in. Does not import torch, so that light modules may use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise ValueError unless `tensor` has this shape and the dtype and device of `like`; nothing is cast silently."""
    if tuple(tensor.shape) != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name}: expected {shape} {like.dtype} on {like.device}, "
            f"got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )


def check_index(name: str, value: int, count: int) -> None:
    """Raise ValueError unless 0 <= value < count."""
    if not 0 <= value < count:
        raise ValueError(f"{name} must be 0..{count - 1}, got {value}")
