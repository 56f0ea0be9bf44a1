"""Binary frames survive the round trip, and what is no frame is one clear error."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.wire.binary import MAX_HEADER_BYTES, BinaryFrameError, pack_chunk, unpack_chunk
from server.wire.messages import ChunkHeader

HEADER = ChunkHeader(kind="media", session_id="s-1", epoch=1, run=0, chunk_index=4, timescale=12000, pts=9000)


@given(payload=st.binary(max_size=200), pose=st.none() | st.lists(st.floats(-1e6, 1e6), min_size=16, max_size=16))
@settings(max_examples=60, deadline=None)
def test_a_frame_comes_back(payload: bytes, pose: list[float] | None) -> None:
    header = HEADER.model_copy(update={"pose": pose})
    got, view = unpack_chunk(pack_chunk(header, payload))
    assert got == header
    assert bytes(view) == payload


def test_the_layout_is_length_header_payload() -> None:
    frame = pack_chunk(HEADER, memoryview(b"payload"))
    (length,) = struct.unpack(">I", frame[:4])
    header = json.loads(frame[4 : 4 + length])
    assert header["type"] == "chunk"
    assert "pose" not in header
    assert frame[4 + length :] == b"payload"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\x05{}",
        struct.pack(">I", MAX_HEADER_BYTES + 1) + b"x",
        b"\0\0\0\x02{}",
        b"\0\0\0\x02\xff\xff",
        b"\0\0\0\0",
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(BinaryFrameError):
        unpack_chunk(frame)


def test_a_reader_may_pass_over_what_it_does_not_know() -> None:
    text = json.dumps({**HEADER.model_dump(exclude_none=True), "later": {"a": 1}}).encode()
    frame = struct.pack(">I", len(text)) + text
    with pytest.raises(BinaryFrameError, match="Extra inputs"):
        unpack_chunk(frame)
    assert unpack_chunk(frame, ignore_unknown=True)[0] == HEADER
