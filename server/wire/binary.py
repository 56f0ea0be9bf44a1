"""Binary frames of the `world` dialect, so that metadata and bytes never separate.

| header length, u32 BE | header: UTF-8 JSON (`ChunkHeader`) | payload |
"""

from __future__ import annotations

import struct

from pydantic import ValidationError

from server.wire.messages import ChunkHeader

_LENGTH = struct.Struct(">I")

MAX_HEADER_BYTES = 1024 * 1024


class BinaryFrameError(ValueError):
    """A binary frame is not what `pack_chunk` makes."""


def pack_chunk(header: ChunkHeader, payload: bytes | memoryview) -> bytes:
    """Build one binary frame. Fields that are None are left out of the header."""
    text = header.model_dump_json(exclude_none=True).encode()
    return b"".join((_LENGTH.pack(len(text)), text, payload))


def unpack_chunk(frame: bytes, *, ignore_unknown: bool = False) -> tuple[ChunkHeader, memoryview]:
    """Split a frame into its header and a view of its payload.

    `ignore_unknown`: a field of the header that this version does not know is no error, as clients have to see it.
    Raises `BinaryFrameError` for a truncated frame, an oversized header or a header that is no `ChunkHeader`.
    """
    if len(frame) < _LENGTH.size:
        raise BinaryFrameError(f"binary frame of {len(frame)} bytes: expected at least {_LENGTH.size}")
    (length,) = _LENGTH.unpack_from(frame)
    if length > MAX_HEADER_BYTES:
        raise BinaryFrameError(f"header of {length} bytes: expected at most {MAX_HEADER_BYTES}")
    end = _LENGTH.size + length
    if len(frame) < end:
        raise BinaryFrameError(f"binary frame of {len(frame)} bytes: its header alone needs {end}")
    try:
        header = ChunkHeader.model_validate_json(frame[_LENGTH.size : end], extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        raise BinaryFrameError(f"bad chunk header: {error.errors()[0]['msg']}") from error
    return header, memoryview(frame)[end:]
