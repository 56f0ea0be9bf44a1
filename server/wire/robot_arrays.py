"""Numpy arrays and scalars inside MessagePack, in the two forms that robot clients use. Nothing is ever unpickled.

    openpi (`openpi_client.msgpack_numpy`)
        array   `__ndarray__`: true, `data`: bytes, `dtype`, `shape`
        scalar  `__npgeneric__`: true, `data`: number, `dtype`
    msgpack-numpy
        array   `nd`: true, `type`, `kind`, `shape`, `data`: bytes
        scalar  `nd`: false, `type`, `data`: bytes

The keys are binary in what those packers write; text keys are understood too. Data is in C order. We write the openpi
form.
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from server.wire.robot_msgpack import MalformedMsgpack, MsgpackKey, MsgpackLimits, MsgpackValue, unpack

Array: TypeAlias = npt.NDArray[np.generic]
WireValue: TypeAlias = bool | int | float | str | memoryview | Array | list["WireValue"] | dict[str, "WireValue"] | None

MAX_DIMENSIONS = 8
MAX_EMPTY_SIZES = 2**31

# Numbers and booleans only: no structures, texts, dates, complex numbers or Python objects.
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")

_ENCODER = msgspec.msgpack.Encoder()


def unpack_message(data: bytes | memoryview, limits: MsgpackLimits | None = None) -> WireValue:
    """Return the value of a message with its arrays as read-only arrays over `data`, little-endian or native.

    Scalars of numpy are arrays without dimensions. Raises `MalformedMsgpack`.
    """
    return _convert(unpack(data, limits), "")


def pack_message(value: object) -> bytes:
    """Return the message of a value of plain Python types and numpy arrays, in the openpi form.

    Raises `TypeError` for anything else, and for arrays that are not of numbers or booleans.
    """
    return _ENCODER.encode(_plain(value))


def _convert(value: MsgpackValue, path: str) -> WireValue:
    if isinstance(value, list):
        return [_convert(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _has(value, "__ndarray__"):
        return read_array(_get(value, "dtype", path), _get(value, "shape", path), _get(value, "data", path), path)
    if _has(value, "__npgeneric__"):
        return _read_scalar(value, path)
    if _has(value, "nd") and _has(value, "type"):
        if _get(value, "nd", path):
            return read_array(_get(value, "type", path), _get(value, "shape", path), _get(value, "data", path), path)
        return _read_packed_scalar(value, path)
    if _has(value, "complex"):
        raise MalformedMsgpack(f"{path or 'the message'}: complex numbers are not read")
    return {_text_key(key, path): _convert(item, _below(path, key)) for key, item in value.items()}


def read_array(dtype_text: object, sizes: object, data: object, path: str) -> Array:
    """Return a read-only array over `data`. `path` is its name in errors. Raises `MalformedMsgpack`."""
    dtype = _read_dtype(dtype_text, path)
    shape = _read_shape(sizes, path)
    if not isinstance(data, memoryview):
        raise MalformedMsgpack(f"{path}: expected binary data of an array, got {type(data).__name__}")
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise MalformedMsgpack(f"{path}: an array of {dtype.name} {list(shape)} has {expected} bytes, got {len(data)}")
    return _native(np.frombuffer(data, dtype).reshape(shape))


def _read_scalar(table: dict[MsgpackKey, MsgpackValue], path: str) -> Array:
    dtype = _read_dtype(_get(table, "dtype", path), path)
    data = _get(table, "data", path)
    if not isinstance(data, bool | int | float):
        raise MalformedMsgpack(f"{path}: expected the number of a scalar, got {type(data).__name__}")
    if isinstance(data, float) and dtype.kind != "f":
        raise MalformedMsgpack(f"{path}: {data} is no {dtype.name}")
    try:
        scalar = np.array(data, dtype)
    except OverflowError as error:
        raise MalformedMsgpack(f"{path}: {data} is no {dtype.name}") from error
    return _native(scalar)


def _read_packed_scalar(table: dict[MsgpackKey, MsgpackValue], path: str) -> Array:
    dtype = _read_dtype(_get(table, "type", path), path)
    data = _get(table, "data", path)
    if not isinstance(data, memoryview) or len(data) != dtype.itemsize:
        raise MalformedMsgpack(f"{path}: expected the {dtype.itemsize} bytes of a scalar {dtype.name}")
    return _native(np.frombuffer(data, dtype).reshape(()))


def _native(array: Array) -> Array:
    """Return the array in the byte order that everything behind this file expects, read-only."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array.flags.writeable = False
    return array


def _read_dtype(value: object, path: str) -> np.dtype[Any]:
    text = _as_text(value)
    if text is None or not _DTYPE.fullmatch(text):
        shown = repr(value)[:60] if text is None else repr(text[:60])
        raise MalformedMsgpack(
            f"{path}: dtype {shown} is not read: expected integers, floats or booleans such as '<f4'"
        )
    return np.dtype(text)


def _read_shape(value: object, path: str) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else None
    if sizes is None or len(sizes) > MAX_DIMENSIONS:
        raise MalformedMsgpack(f"{path}: expected a shape of at most {MAX_DIMENSIONS} sizes")
    shape = tuple(size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size >= 0)
    if len(shape) != len(sizes):
        raise MalformedMsgpack(f"{path}: expected sizes from 0 in the shape, got {str(sizes)[:80]}")
    # Without elements the bytes bound nothing, but numpy still multiplies the other sizes.
    if 0 in shape and math.prod(size for size in shape if size) > MAX_EMPTY_SIZES:
        raise MalformedMsgpack(f"{path}: expected smaller sizes beside 0 in the shape, got {str(sizes)[:80]}")
    return shape


def _has(table: dict[MsgpackKey, MsgpackValue], name: str) -> bool:
    return name in table or name.encode() in table


def _get(table: dict[MsgpackKey, MsgpackValue], name: str, path: str) -> MsgpackValue:
    if not _has(table, name):
        raise MalformedMsgpack(f"{path or 'the message'}: an array without {name!r}")
    return table[name] if name in table else table[name.encode()]


def _as_text(value: object) -> str | None:
    if isinstance(value, memoryview):
        try:
            return str(value, "ascii")
        except UnicodeDecodeError:
            return None
    return value if isinstance(value, str) else None


def _text_key(key: MsgpackKey, path: str) -> str:
    if isinstance(key, str):
        return key
    raise MalformedMsgpack(f"{path or 'the message'}: the key {key!r} is binary, and this map is no array")


def _below(path: str, key: MsgpackKey) -> str:
    return f"{path}.{key!s}" if path else str(key)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": _dtype_text(value.dtype),
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        # A float64 and a str_ are Python's float and str too: openpi-client packs them as those.
        if isinstance(value, float | str | bytes):
            return value.item()
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": _dtype_text(value.dtype)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes | memoryview):
        return value
    raise TypeError(f"expected plain values and numpy arrays, got {type(value).__name__}")


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if not _DTYPE.fullmatch(dtype.str):
        raise TypeError(f"expected integers, floats or booleans, got dtype {dtype}")
    return dtype.str
