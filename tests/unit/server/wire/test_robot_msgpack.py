"""MessagePack within bounds: equal to another reader for what is right, an error for everything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.wire.robot_msgpack import MalformedMsgpack, MsgpackLimits, unpack

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=20), inner, max_size=20),
    max_leaves=30,
)


def plain(value: Any) -> Any:
    """Turn views into bytes, as the other reader gives them."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


@given(VALUES)
def test_what_another_packer_wrote_is_read_the_same(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    read = plain(unpack(data, MsgpackLimits(max_depth=64)))
    assert read == msgspec.msgpack.decode(data)
    assert read == value


@given(VALUES, st.data())
def test_a_message_cut_anywhere_is_an_error(value: Any, data: st.DataObject) -> None:
    message = msgspec.msgpack.encode(value)
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(MalformedMsgpack, match="ends early"):
        unpack(message[:cut], MsgpackLimits(max_depth=64))


@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    try:
        value = plain(unpack(data))
    except MalformedMsgpack:
        return
    again = msgspec.msgpack.encode(value)
    assert plain(unpack(again)) == value or value != value or "nan" in repr(value)


def test_binary_keys_and_long_forms_are_read() -> None:
    long = {b"key": "x" * 70_000, "list": list(range(70)), "bytes": b"y" * 300, "half": 1.5}
    assert plain(unpack(msgspec.msgpack.encode(long))) == long
    assert unpack(b"\xca\x3f\xc0\x00\x00") == 1.5
    assert unpack(b"\xdd\x00\x00\x00\x01\x07") == [7]
    assert unpack(b"\xdf\x00\x00\x00\x01\xa1a\xff") == {"a": -1}


def test_binaries_are_read_only_views_of_the_message() -> None:
    data = bytearray(msgspec.msgpack.encode(b"abc"))
    view = unpack(data)
    assert isinstance(view, memoryview)
    assert view.readonly
    data[-1] = ord("d")
    assert bytes(view) == b"abd"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends early"),
        (b"\xc0\xc0", "1 bytes follow the message"),
        (b"\xc1", "0xc1"),
        (b"\xd4\x01\x00", "extension types are not read"),
        (b"\xc7\x01\x01\x00", "extension types are not read"),
        (b"\x81\x01\x01", "a key of type int"),
        (b"\x81\x80\x01", "a key of type dict"),
        (b"\x82\xa1a\x01\xa1a\x02", "'a' comes twice"),
        (b"\xa2\xff\xfe", "not UTF-8"),
        (b"\x91" * 20 + b"\xc0", "nested deeper than 8"),
        (b"\xdd\xff\xff\xff\xff" + b"\xc0" * 9, "4294967295 items can't fit"),
        (b"\xdf\x00\x00\x00\x05" + b"\xc0" * 9, "5 items can't fit"),
        (b"\xc6\xff\xff\xff\xff", "ends early"),
        (b"\x81\xda\x01\x2c" + b"k" * 300 + b"\xc0", "a key of 300 bytes"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedMsgpack, match=reason):
        unpack(data)


def test_a_small_message_cannot_ask_for_much_memory() -> None:
    many = b"\xdd\x00\x01\x86\xa0" + b"\x80" * 100_000
    with pytest.raises(MalformedMsgpack, match="more than 4096 values"):
        unpack(many)
    assert unpack(b"\x93\x01\x02\x03", MsgpackLimits(max_values=4)) == [1, 2, 3]
    with pytest.raises(MalformedMsgpack, match="more than 3 values"):
        unpack(b"\x93\x01\x02\x03", MsgpackLimits(max_values=3))
