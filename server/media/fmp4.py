"""Fragmented MP4 with one H.264 track: the init segment, and one fragment per chunk. Pure functions over bytes.

Written by hand because a muxer library holds a chunk's last frame back until the next chunk comes. Layout (ISO/IEC
14496-12; `avcC` is ISO/IEC 14496-15 section 5.3.3):

    init segment                         fragment
    ftyp                                 moof
    moov                                 |- mfhd   sequence number, from 1
    |- mvhd                              `- traf
    |- trak                                 |- tfhd   offsets count from the start of moof
    |  |- tkhd                              |- tfdt   decode time of the first sample, 64 bit
    |  `- mdia                              `- trun   offset into mdat; duration, size, flags of each sample
    |     |- mdhd   timescale            mdat   the samples, one after the other
    |     |- hdlr   "vide"
    |     `- minf
    |        |- vmhd
    |        |- dinf > dref > url        (the samples are in this file)
    |        `- stbl
    |           |- stsd > avc1 > avcC, colr, pasp
    |           `- stts, stsc, stsz, stco   (empty: all samples are in fragments)
    `- mvex > trex

A box is | size u32 | type, 4 characters | content |; a full box's content begins | version u8 | flags u24 |.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from server.media.h264 import ParameterSets

TICKS_PER_FRAME = 1000
"""Duration of a frame; the timescale is `fps` times this, so that every frame has the same whole duration."""

TRACK_ID = 1

SYNC_SAMPLE_FLAGS = 0x02000000
"""Depends on no other sample (ISO/IEC 14496-12 section 8.8.3.1)."""

OTHER_SAMPLE_FLAGS = 0x01010000
"""Depends on others and is no sync sample."""

DEFAULT_BASE_IS_MOOF = 0x020000
TRUN_FLAGS = 0x000001 | 0x000100 | 0x000200 | 0x000400
"""Data offset present; duration, size and flags present for each sample."""

UNITY_MATRIX = struct.pack(">9I", 0x00010000, 0, 0, 0, 0x00010000, 0, 0, 0, 0x40000000)
LANGUAGE_UNDETERMINED = 0x55C4

PROFILES_WITH_CHROMA_FIELDS = frozenset({100, 110, 122, 144})
"""Profiles for which `avcC` ends with chroma format and bit depths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTrack:
    """What the init segment says of the stream. Sizes in pixels."""

    width: int
    height: int
    timescale: int
    parameter_sets: ParameterSets


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One access unit, length-prefixed, without parameter sets. `duration` counts in units of the timescale."""

    data: bytes
    duration: int
    sync: bool


def init_segment(track: VideoTrack) -> bytes:
    """Write `ftyp` and `moov`."""
    return _box("ftyp", b"iso6", _u32(0), b"iso6", b"iso5", b"avc1", b"mp41") + _box(
        "moov",
        _movie_header(track),
        _box("trak", _track_header(track), _media(track)),
        _box("mvex", _full_box("trex", 0, 0, struct.pack(">5I", TRACK_ID, 1, 0, 0, 0))),
    )


def media_fragment(*, sequence_number: int, decode_time: int, samples: Sequence[Sample]) -> bytes:
    """Write `moof` and `mdat` for one chunk whose first sample starts at `decode_time`, in units of the timescale."""
    if not samples:
        raise ValueError("a fragment needs at least one sample")
    if not samples[0].sync:
        raise ValueError("the first sample of a fragment must be a sync sample")
    # The offset has a fixed size, so a first pass with 0 gives the length of moof.
    moof_bytes = len(_movie_fragment(sequence_number, decode_time, samples, data_offset=0))
    moof = _movie_fragment(sequence_number, decode_time, samples, data_offset=moof_bytes + 8)
    return moof + _box("mdat", *(sample.data for sample in samples))


# ---------------------------------------------------------------- moov


def _movie_header(track: VideoTrack) -> bytes:
    # creation, modification, timescale, duration (0: unknown) | rate 1.0, volume 1.0, 10 reserved | matrix |
    # 24 reserved | next track id
    times = struct.pack(">4I", 0, 0, track.timescale, 0)
    rest = struct.pack(">IH10x", 0x00010000, 0x0100) + UNITY_MATRIX + bytes(24) + _u32(TRACK_ID + 1)
    return _full_box("mvhd", 0, 0, times, rest)


def _track_header(track: VideoTrack) -> bytes:
    # flags: enabled, in movie, in preview | creation, modification, id, reserved, duration | 8 reserved | layer, group,
    # volume, reserved | matrix | width and height as 16.16
    head = struct.pack(">5I8x4H", 0, 0, TRACK_ID, 0, 0, 0, 0, 0, 0)
    return _full_box("tkhd", 0, 7, head, UNITY_MATRIX, struct.pack(">2I", track.width << 16, track.height << 16))


def _media(track: VideoTrack) -> bytes:
    media_header = struct.pack(">4I2H", 0, 0, track.timescale, 0, LANGUAGE_UNDETERMINED, 0)
    return _box(
        "mdia",
        _full_box("mdhd", 0, 0, media_header),
        _full_box("hdlr", 0, 0, _u32(0), b"vide", bytes(12), b"VideoHandler\0"),
        _box(
            "minf",
            _full_box("vmhd", 0, 1, bytes(8)),
            _box("dinf", _full_box("dref", 0, 0, _u32(1), _full_box("url ", 0, 1))),
            _sample_table(track),
        ),
    )


def _sample_table(track: VideoTrack) -> bytes:
    return _box(
        "stbl",
        _full_box("stsd", 0, 0, _u32(1), _sample_entry(track)),
        _full_box("stts", 0, 0, _u32(0)),
        _full_box("stsc", 0, 0, _u32(0)),
        _full_box("stsz", 0, 0, _u32(0), _u32(0)),
        _full_box("stco", 0, 0, _u32(0)),
    )


def _sample_entry(track: VideoTrack) -> bytes:
    # 6 reserved, data reference | 16 reserved | width, height | 72 dpi twice | reserved | frames per sample | name |
    # depth, -1
    head = struct.pack(">6xH16x2H2IIH32sHh", 1, track.width, track.height, 0x480000, 0x480000, 0, 1, b"", 24, -1)
    # BT.709 primaries, transfer and matrix; full-range bit clear.
    colour = struct.pack(">4s3HB", b"nclx", 1, 1, 1, 0)
    return _box(
        "avc1",
        head,
        _box("avcC", _decoder_configuration(track.parameter_sets)),
        _box("colr", colour),
        _box("pasp", struct.pack(">2I", 1, 1)),
    )


def _decoder_configuration(sets: ParameterSets) -> bytes:
    profile, compatibility, level = sets.sps[1:4]
    # version | profile, compatibility, level | 6 bits set, length size 4 | 3 bits set, one SPS
    head = struct.pack(">6B", 1, profile, compatibility, level, 0xFC | 3, 0xE0 | 1)
    record = head + _sized(sets.sps) + b"\x01" + _sized(sets.pps)
    if profile in PROFILES_WITH_CHROMA_FIELDS:
        # reserved bits set, 4:2:0 | 8 bit luma | 8 bit chroma | no SPS extension
        record += struct.pack(">4B", 0xFC | 1, 0xF8, 0xF8, 0)
    return record


# ---------------------------------------------------------------- moof


def _movie_fragment(sequence_number: int, decode_time: int, samples: Sequence[Sample], *, data_offset: int) -> bytes:
    return _box(
        "moof",
        _full_box("mfhd", 0, 0, _u32(sequence_number)),
        _box(
            "traf",
            _full_box("tfhd", 0, DEFAULT_BASE_IS_MOOF, _u32(TRACK_ID)),
            _full_box("tfdt", 1, 0, decode_time.to_bytes(8, "big")),
            _track_run(samples, data_offset),
        ),
    )


def _track_run(samples: Sequence[Sample], data_offset: int) -> bytes:
    rows = b"".join(
        struct.pack(">3I", sample.duration, len(sample.data), SYNC_SAMPLE_FLAGS if sample.sync else OTHER_SAMPLE_FLAGS)
        for sample in samples
    )
    return _full_box("trun", 0, TRUN_FLAGS, struct.pack(">Ii", len(samples), data_offset), rows)


# ---------------------------------------------------------------- boxes


def _box(kind: str, *contents: bytes) -> bytes:
    size = 8 + sum(len(content) for content in contents)
    return b"".join((_u32(size), kind.encode("ascii"), *contents))


def _full_box(kind: str, version: int, flags: int, *contents: bytes) -> bytes:
    return _box(kind, _u32(version << 24 | flags), *contents)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _sized(nal: bytes) -> bytes:
    return len(nal).to_bytes(2, "big") + nal
