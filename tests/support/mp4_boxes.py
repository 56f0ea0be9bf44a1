"""An MP4 reader for tests, written from ISO/IEC 14496-12 and 14496-15; shares nothing with our writer.

Reads what a player reads: the box tree, the decoder configuration, and the table of samples of each fragment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

CONTAINERS = frozenset({"moov", "trak", "mdia", "minf", "dinf", "stbl", "mvex", "moof", "traf"})


@dataclass(frozen=True)
class Box:
    kind: str
    start: int
    """Offset of the box in the file it was read from."""
    body: bytes
    children: tuple[Box, ...]

    def find(self, path: str) -> Box:
        """Return the only box at a path such as ``trak/mdia/mdhd``."""
        head, _, rest = path.partition("/")
        found = [child for child in self.children if child.kind == head]
        if len(found) != 1:
            raise AssertionError(f"expected one {head} in {self.kind}, got {len(found)}")
        return found[0].find(rest) if rest else found[0]

    @property
    def version(self) -> int:
        return self.body[0]

    @property
    def flags(self) -> int:
        return int.from_bytes(self.body[1:4], "big")


@dataclass(frozen=True)
class SampleRow:
    data: bytes
    duration: int
    flags: int

    @property
    def is_sync(self) -> bool:
        return not self.flags & 0x10000

    @property
    def depends_on_others(self) -> int:
        """1: depends on others, 2: does not."""
        return self.flags >> 24 & 3

    @property
    def nals(self) -> tuple[bytes, ...]:
        """NAL units, by 4-byte lengths that must add up exactly."""
        units, position = [], 0
        while position < len(self.data):
            (length,) = struct.unpack_from(">I", self.data, position)
            unit = self.data[position + 4 : position + 4 + length]
            if length == 0 or len(unit) != length:
                raise AssertionError(f"NAL unit of {length} bytes does not fit in its sample")
            units.append(unit)
            position += 4 + length
        return tuple(units)


@dataclass(frozen=True)
class Fragment:
    sequence_number: int
    decode_time: int
    samples: tuple[SampleRow, ...]

    @property
    def end_time(self) -> int:
        return self.decode_time + sum(sample.duration for sample in self.samples)


@dataclass(frozen=True)
class InitFacts:
    timescale: int
    width: int
    height: int
    codec: str
    sps: bytes
    pps: bytes
    chroma_fields: tuple[int, int, int] | None
    """Chroma format, luma and chroma bit depth; None if the profile has none in `avcC`."""
    colour: tuple[int, int, int, bool]
    """Primaries, transfer, matrix, full range."""


@dataclass(frozen=True)
class Mp4:
    init: InitFacts
    fragments: tuple[Fragment, ...]


def parse_boxes(data: bytes, offset: int = 0) -> tuple[Box, ...]:
    """Parse `data`, which must hold whole boxes; `offset` is where it lies in the file."""
    boxes, position = [], 0
    while position < len(data):
        if len(data) - position < 8:
            raise AssertionError(f"{len(data) - position} stray bytes at {offset + position}")
        size, name = struct.unpack_from(">I4s", data, position)
        if size < 8 or position + size > len(data):
            raise AssertionError(f"box {name!r} of {size} bytes at {offset + position} does not fit")
        body = data[position + 8 : position + size]
        kind = name.decode("ascii")
        children = parse_boxes(body, offset + position + 8) if kind in CONTAINERS else ()
        boxes.append(Box(kind, offset + position, body, children))
        position += size
    return tuple(boxes)


def parse_mp4(data: bytes) -> Mp4:
    """Parse `ftyp moov (moof mdat)*`; anything else in the file is an error."""
    boxes = parse_boxes(data)
    kinds = [box.kind for box in boxes]
    if kinds[:2] != ["ftyp", "moov"] or kinds[2:] != ["moof", "mdat"] * ((len(kinds) - 2) // 2):
        raise AssertionError(f"unexpected top level {kinds}")
    pairs = zip(boxes[2::2], boxes[3::2], strict=True)
    return Mp4(_init_facts(boxes[1]), tuple(_fragment(moof, mdat, data) for moof, mdat in pairs))


def parse_fragment(data: bytes) -> Fragment:
    """Parse one `moof mdat` pair on its own."""
    moof, mdat = parse_boxes(data)
    assert (moof.kind, mdat.kind) == ("moof", "mdat")
    return _fragment(moof, mdat, data)


def _init_facts(moov: Box) -> InitFacts:
    media = moov.find("trak/mdia")
    track_header = moov.find("trak/tkhd")
    assert track_header.version == 0
    (track_id,) = struct.unpack_from(">I", track_header.body, 12)
    (trex_track_id,) = struct.unpack_from(">I", moov.find("mvex/trex").body, 4)
    assert trex_track_id == track_id
    assert media.find("hdlr").body[8:12] == b"vide"
    assert media.find("minf/vmhd").flags == 1
    assert media.find("minf/dinf/dref").body[4:8] == b"\0\0\0\1"
    for kind in ("stts", "stsc", "stco"):
        assert struct.unpack_from(">I", media.find(f"minf/stbl/{kind}").body, 4) == (0,)
    (timescale,) = struct.unpack_from(">I", media.find("mdhd").body, 12)
    description = media.find("minf/stbl/stsd").body
    assert struct.unpack_from(">I", description, 4) == (1,)
    (entry,) = parse_boxes(description[8:])
    assert entry.kind == "avc1"
    width, height = struct.unpack_from(">2H", entry.body, 24)
    assert struct.unpack_from(">2I", track_header.body, 76) == (width << 16, height << 16)
    extra = {box.kind: box.body for box in parse_boxes(entry.body[78:])}
    colour = struct.unpack(">4s3HB", extra["colr"])
    assert colour[0] == b"nclx"
    sps, pps, chroma_fields = _decoder_configuration(extra["avcC"])
    return InitFacts(
        timescale=timescale,
        width=width,
        height=height,
        codec="avc1." + extra["avcC"][1:4].hex(),
        sps=sps,
        pps=pps,
        chroma_fields=chroma_fields,
        colour=(colour[1], colour[2], colour[3], bool(colour[4] & 0x80)),
    )


def _decoder_configuration(record: bytes) -> tuple[bytes, bytes, tuple[int, int, int] | None]:
    assert record[0] == 1
    assert record[4] == 0xFF, "NAL lengths must have 4 bytes"
    assert record[5] == 0xE1, "one SPS"
    sps_end = 8 + int.from_bytes(record[6:8], "big")
    sps = record[8:sps_end]
    assert record[1:4] == sps[1:4]
    assert record[sps_end] == 1, "one PPS"
    pps_end = sps_end + 3 + int.from_bytes(record[sps_end + 1 : sps_end + 3], "big")
    pps = record[sps_end + 3 : pps_end]
    rest = record[pps_end:]
    if record[1] not in (100, 110, 122, 144):
        assert rest == b""
        return sps, pps, None
    assert len(rest) == 4
    assert rest[3] == 0
    return sps, pps, (rest[0] & 3, 8 + (rest[1] & 7), 8 + (rest[2] & 7))


def _fragment(moof: Box, mdat: Box, data: bytes) -> Fragment:
    header = moof.find("traf/tfhd")
    assert header.flags == 0x020000, "offsets must count from moof"
    time = moof.find("traf/tfdt")
    assert time.version == 1
    run = moof.find("traf/trun")
    count, data_offset = struct.unpack_from(">Ii", run.body, 4)
    assert run.flags == 0x000701, "data offset, duration, size, flags"
    assert len(run.body) == 12 + 12 * count
    position = moof.start + data_offset
    assert position == mdat.start + 8
    samples = []
    for row in range(count):
        duration, size, flags = struct.unpack_from(">3I", run.body, 12 + 12 * row)
        samples.append(SampleRow(data[position : position + size], duration, flags))
        position += size
    assert position == mdat.start + 8 + len(mdat.body), "samples must fill mdat"
    (sequence_number,) = struct.unpack_from(">I", moof.find("mfhd").body, 4)
    (decode_time,) = struct.unpack_from(">Q", time.body, 4)
    return Fragment(sequence_number, decode_time, tuple(samples))
