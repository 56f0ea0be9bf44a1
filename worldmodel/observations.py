"""Observation arrays of a tick: from NumPy arrays to the parts of a payload and back. Torch-free, both sides.

A part is described by its request key, type and shape (`ArrayPart`); the payload is the bytes of all parts in order.
Only plain numbers travel: no objects, no strings, no structures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from worldmodel.errors import RequestRefused
from worldmodel.messages import ArrayPart

DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
"""Types that an array may have, in NumPy's short form."""

MAX_DIMS = 8


def describe_array(name: str, array: npt.NDArray[np.generic]) -> ArrayPart:
    """Describe one array. Raises `RequestRefused` naming it for a type that does not travel."""
    part = ArrayPart(name=name, dtype=array.dtype.str, shape=array.shape, num_bytes=array.nbytes)
    _check_part(part)
    return part


def pack_arrays(arrays: Mapping[str, npt.NDArray[np.generic]]) -> tuple[tuple[ArrayPart, ...], list[memoryview]]:
    """Return the descriptions and the payload parts of a tick. Arrays in C order are not copied."""
    parts = tuple(describe_array(name, array) for name, array in arrays.items())
    return parts, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]


def unpack_arrays(parts: tuple[ArrayPart, ...], payload: memoryview | bytes) -> Mapping[str, npt.NDArray[np.generic]]:
    """View a payload as the arrays it holds, read-only. Raises `RequestRefused` naming the array that does not fit."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    view = memoryview(payload).toreadonly()
    position = 0
    for part in parts:
        _check_part(part)
        if part.name in arrays:
            raise _refusal(part.name, "expected each array once, got it twice")
        count = math.prod(part.shape)
        if position + part.num_bytes > len(view):
            raise _refusal(part.name, f"expected {part.num_bytes} bytes, got {len(view) - position}")
        data = view[position : position + part.num_bytes]
        arrays[part.name] = np.frombuffer(data, np.dtype(part.dtype), count).reshape(part.shape)
        position += part.num_bytes
    if position != len(view):
        raise RequestRefused(
            f"arrays: expected {position} bytes in all, got {len(view)}", code="bad_arrays", field="arrays"
        )
    return MappingProxyType(arrays)


def _check_part(part: ArrayPart) -> None:
    if part.dtype not in DTYPES:
        raise _refusal(part.name, f"expected one of the types {', '.join(DTYPES)}, got {part.dtype!r}")
    if len(part.shape) > MAX_DIMS or any(size < 0 for size in part.shape):
        raise _refusal(part.name, f"expected a shape of at most {MAX_DIMS} sizes from 0 up, got {list(part.shape)}")
    expected = math.prod(part.shape) * np.dtype(part.dtype).itemsize
    if part.num_bytes != expected:
        raise _refusal(
            part.name, f"shape {list(part.shape)} of {part.dtype} has {expected} bytes, got {part.num_bytes}"
        )


def _refusal(name: str, problem: str) -> RequestRefused:
    return RequestRefused(f"arrays: {name}: {problem}", code="bad_arrays", field=name)
