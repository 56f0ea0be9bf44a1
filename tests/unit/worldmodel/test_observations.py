"""Observation arrays cross the worker socket unchanged, or are refused by name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from worldmodel.errors import RequestRefused
from worldmodel.messages import ArrayPart
from worldmodel.observations import DTYPES, describe_array, pack_arrays, unpack_arrays


def payload_of(parts: list[memoryview]) -> bytes:
    return b"".join(bytes(part) for part in parts)


any_array = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(np.dtype(dtype), arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0))
)


@settings(max_examples=60, deadline=None)
@given(arrays=st.dictionaries(st.text(min_size=1, max_size=20), any_array, max_size=4), transpose=st.booleans())
def test_arrays_survive_the_trip(arrays: dict[str, npt.NDArray[np.generic]], transpose: bool) -> None:
    if transpose:
        arrays = {name: array.T for name, array in arrays.items()}
    described, parts = pack_arrays(arrays)
    got = unpack_arrays(described, payload_of(parts))
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert got[name].tobytes() == array.tobytes()
        assert not got[name].flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.array(["a"]), np.array([None]), np.zeros(1, ">f4"), np.zeros(1, np.complex64), np.zeros(1, "M8[s]")],
    ids=["text", "object", "big endian", "complex", "date"],
)
def test_other_types_do_not_travel(array: npt.NDArray[np.generic]) -> None:
    with pytest.raises(RequestRefused, match="a/b: expected one of the types") as caught:
        describe_array("a/b", array)
    assert (caught.value.code, caught.value.field) == ("bad_arrays", "a/b")


def part(name: str = "x", dtype: str = "<f4", shape: tuple[int, ...] = (2,), num_bytes: int = 8) -> ArrayPart:
    return ArrayPart(name=name, dtype=dtype, shape=shape, num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("parts", "num_bytes", "problem"),
    [
        ((part(),), 7, "x: expected 8 bytes, got 7"),
        ((part(),), 9, "expected 8 bytes in all, got 9"),
        ((), 1, "expected 0 bytes in all, got 1"),
        ((part(), part()), 16, "x: expected each array once"),
        ((part(num_bytes=4),), 4, r"shape \[2\] of <f4 has 8 bytes, got 4"),
        ((part(dtype="|O"),), 8, "expected one of the types"),
        ((part(shape=(-1,), num_bytes=-4),), 0, "expected a shape"),
        ((part(shape=(1,) * 9, num_bytes=4),), 4, "at most 8 sizes"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(parts: tuple[ArrayPart, ...], num_bytes: int, problem: str) -> None:
    with pytest.raises(RequestRefused, match=problem):
        unpack_arrays(parts, bytes(num_bytes))
