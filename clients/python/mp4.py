"""Writes chunks of format fmp4 to one MP4 file: the init segment, then each fragment, also across a resume."""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from clients.python.chunk import Chunk
from clients.python.errors import BadServerMessage
from server.wire.messages import StreamFormat

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")


class Mp4Writer:
    """An MP4 file that grows by chunks; whatever was written so far plays. Blocking.

    Time in a session starts at 0 with each resume; here it goes on, so decode times and sequence numbers are written
    anew.
    """

    def __init__(self, path: Path | str) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115
        self._init: bytes | None = None
        self._decode_time = 0
        self._num_chunks = 0

    @property
    def num_chunks(self) -> int:
        return self._num_chunks

    def add(self, chunk: Chunk) -> None:
        """Append a chunk. Raises `ValueError` for other formats and for another video than before."""
        if chunk.format is not StreamFormat.FMP4:
            raise ValueError(f"expected chunks of format {StreamFormat.FMP4}, got {chunk.format}")
        if self._init is None:
            self._init = chunk.init
            self._file.write(chunk.init)
        elif chunk.init != self._init:
            raise ValueError("expected chunks of one session, got another init segment")
        self._num_chunks += 1
        self._file.write(retime(chunk.payload, decode_time=self._decode_time, sequence_number=self._num_chunks))
        self._decode_time += chunk.header.num_frames * chunk.header.timescale // chunk.fps

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Mp4Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def retime(fragment: bytes, *, decode_time: int, sequence_number: int) -> bytes:
    """Give a fragment (moof + mdat) another place in time; everything else stays byte for byte.

    Source of the layout: ISO/IEC 14496-12, boxes mfhd and tfdt. Raises `BadServerMessage` if it is no such fragment.
    """
    data = bytearray(fragment)
    moof = _find(data, 0, len(data), b"moof")
    mfhd = _find(data, *moof, b"mfhd")
    tfdt = _find(data, *_find(data, *moof, b"traf"), b"tfdt")
    _U32.pack_into(data, mfhd[0] + 4, sequence_number)
    if data[tfdt[0]] == 1:
        _U64.pack_into(data, tfdt[0] + 4, decode_time)
    else:
        _U32.pack_into(data, tfdt[0] + 4, decode_time)
    return bytes(data)


def _find(data: bytearray, start: int, end: int, kind: bytes) -> tuple[int, int]:
    """Return the content range of the first box of a kind between two offsets."""
    while start + 8 <= end:
        (size,) = _U32.unpack_from(data, start)
        if size < 8 or start + size > end:
            raise BadServerMessage(f"MP4 box of {size} bytes at {start}: expected at most {end - start}")
        if data[start + 4 : start + 8] == kind:
            return start + 8, start + size
        start += size
    raise BadServerMessage(f"expected the MP4 box {kind.decode()}")
