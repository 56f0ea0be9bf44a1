"""Numpy arrays in both MessagePack forms; nothing that would need pickle, and nothing larger than its message."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from server.wire.robot_arrays import pack_message, read_array, unpack_message
from server.wire.robot_msgpack import MalformedMsgpack

ARRAYS = st.sampled_from(["?", "u1", "i1", "<u2", ">i2", "<u4", ">i4", "<i8", ">u8", "<f2", ">f4", "<f8"]).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


def openpi(array: np.ndarray[Any, Any], **changes: object) -> dict[bytes, object]:
    table = {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}
    return table | {key.encode(): value for key, value in changes.items()}


def packed_by_msgpack_numpy(value: np.ndarray[Any, Any] | np.generic) -> dict[bytes, object]:
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}


def unpack_one(table: object) -> Any:
    message = unpack_message(msgspec.msgpack.encode({"a": table}))
    assert isinstance(message, dict)
    return message["a"]


@given(ARRAYS)
def test_an_array_arrives_as_it_was_in_both_forms(array: np.ndarray[Any, Any]) -> None:
    text_keys = {key.decode(): value for key, value in openpi(array).items()}
    for table in (openpi(array), packed_by_msgpack_numpy(array), text_keys):
        read = unpack_one(table)
        assert read.shape == array.shape
        assert read.dtype == array.dtype.newbyteorder("=")
        assert read.dtype.isnative
        assert not read.flags.writeable
        np.testing.assert_array_equal(read, array)


@given(ARRAYS.filter(lambda array: array.dtype.isnative))
def test_what_we_write_we_read(array: np.ndarray[Any, Any]) -> None:
    read = unpack_message(pack_message({"a": [array]}))
    assert isinstance(read, dict)
    np.testing.assert_array_equal(read["a"][0], array)
    np.testing.assert_array_equal(unpack_message(pack_message(array)), array)


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-7), np.bool_(True), np.uint8(200)])
def test_scalars_are_arrays_without_dimensions(scalar: np.generic) -> None:
    for read in (unpack_message(pack_message(scalar)), unpack_one(packed_by_msgpack_numpy(scalar))):
        assert isinstance(read, np.ndarray)
        assert read.shape == ()
        assert read.dtype == scalar.dtype
        assert read[()] == scalar


def test_numpy_scalars_that_are_python_ones_are_packed_as_those() -> None:
    scalars = {"gain": np.float64(1.5), "prompt": np.str_("go")}
    assert pack_message(scalars) == pack_message({"gain": 1.5, "prompt": "go"})


def test_a_fortran_array_is_sent_in_c_order() -> None:
    array = np.asfortranarray(np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(unpack_message(pack_message(array)), array)


def test_plain_maps_and_lists_stay_what_they_are() -> None:
    message = {"prompt": "go", "numbers": [1, 2.5, None, True], "nd": 3, "below": {"type": "x"}}
    assert unpack_message(msgspec.msgpack.encode(message)) == message


IMAGE = np.zeros((2, 3), np.uint8)


@pytest.mark.parametrize("dtype", ["|O", "O", "object", "<c8", "V4", "<U4", "S3", "<M8[s]", "f4,f4", "<f16", "x" * 99])
def test_only_numbers_and_booleans_are_read(dtype: str) -> None:
    with pytest.raises(MalformedMsgpack, match=r"^a: dtype .* is not read"):
        unpack_one(openpi(IMAGE, dtype=dtype))


def test_a_pickle_is_never_loaded() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit('it was loaded')",)

    table = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": pickle.dumps(Bomb())}
    with pytest.raises(MalformedMsgpack, match="is not read"):
        unpack_one(table)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [2, 4]}, r"uint8 \[2, 4\] has 8 bytes, got 6"),
        ({"shape": [2**40, 2**40]}, "bytes, got 6"),
        ({"shape": [-2, -3]}, "sizes from 0"),
        ({"shape": [2, True]}, "sizes from 0"),
        ({"shape": [2, "3"]}, "sizes from 0"),
        ({"shape": [1] * 9}, "at most 8 sizes"),
        ({"shape": [0, 2**63], "data": b""}, "smaller sizes beside 0"),
        ({"shape": [0, 2**31, 2**31, 2**31], "data": b""}, "smaller sizes beside 0"),
        ({"shape": 6}, "expected a shape"),
        ({"data": "text"}, "expected binary data"),
        ({"dtype": 7}, "dtype 7 is not read"),
        ({"dtype": [["f0", "<f4"]]}, "is not read"),
    ],
)
def test_an_array_that_does_not_fit_its_bytes_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(MalformedMsgpack, match=reason):
        unpack_one(openpi(IMAGE, **changes))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({b"__ndarray__": True, b"data": b"", b"dtype": "<f4"}, "without 'shape'"),
        ({b"__npgeneric__": True, b"data": b"1", b"dtype": "<f4"}, "expected the number"),
        ({b"__npgeneric__": True, b"data": 1.5, b"dtype": "<i4"}, "1.5 is no int32"),
        ({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}, "300 is no uint8"),
        ({b"nd": False, b"type": "<f4", b"data": b"12"}, "expected the 4 bytes"),
        ({b"complex": True, b"data": "1+2j"}, "complex numbers are not read"),
        ({b"other": 1}, "binary, and this map is no array"),
    ],
)
def test_other_tables_with_binary_keys_are_refused(table: dict[bytes, object], reason: str) -> None:
    with pytest.raises(MalformedMsgpack, match=reason):
        unpack_one(table)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.complex64(1), object(), {1, 2}])
def test_what_has_no_form_is_not_written(value: object) -> None:
    with pytest.raises(TypeError):
        pack_message({"a": value})


def test_an_array_from_its_parts() -> None:
    np.testing.assert_array_equal(read_array("<f4", [2], memoryview(b"\0\0\0\0\0\0\x80?"), "a"), [0.0, 1.0])
