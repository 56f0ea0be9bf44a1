"""H.264 byte streams: NAL units, parameter sets and the codec string. Knows nothing of encoders and containers.

An access unit is one coded frame. Two ways of writing it (ISO/IEC 14496-10 Annex B, ISO/IEC 14496-15 section 4.3):

    Annex B          | 00 00 00 01 | NAL | 00 00 00 01 | NAL | ...
    length-prefixed  | length u32  | NAL | length u32  | NAL | ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

START_CODE = b"\x00\x00\x00\x01"

USER_DATA_UNREGISTERED = 5
"""SEI payload type that encoders fill with their own settings."""


class NalType(IntEnum):
    """NAL unit types that we tell apart (ISO/IEC 14496-10 table 7-1)."""

    IDR_SLICE = 5
    SEI = 6
    SPS = 7
    PPS = 8
    ACCESS_UNIT_DELIMITER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSets:
    """The sequence and picture parameter set of a stream, as NAL units without start codes."""

    sps: bytes
    pps: bytes

    @property
    def codec(self) -> str:
        """Codec string `avc1.PPCCLL`: profile, constraint flags and level, from the SPS (RFC 6381 section 3.3)."""
        return f"avc1.{self.sps[1:4].hex()}"

    @property
    def annex_b(self) -> bytes:
        return to_annex_b((self.sps, self.pps))


def nal_type(nal: bytes) -> int:
    return nal[0] & 0x1F


def split_annex_b(stream: bytes) -> tuple[bytes, ...]:
    """Split an Annex B stream into NAL units without start codes.

    Emulation prevention keeps start codes out of NAL units, and no NAL unit ends in a zero byte, so the zeros before a
    start code are padding.
    """
    before, *nals = stream.split(START_CODE[1:])
    if before.strip(b"\x00") or not nals:
        raise ValueError(f"expected an Annex B stream that begins with a start code, got {stream[:8].hex(' ')!r}")
    return tuple(nal.rstrip(b"\x00") for nal in nals)


def find_parameter_sets(nals: Iterable[bytes]) -> ParameterSets:
    """Return the one SPS and the one PPS among `nals`. Raises `ValueError` if there isn't exactly one of each."""
    units = tuple(nals)
    all_sps = [nal for nal in units if nal_type(nal) == NalType.SPS]
    all_pps = [nal for nal in units if nal_type(nal) == NalType.PPS]
    if len(all_sps) != 1 or len(all_pps) != 1:
        raise ValueError(f"expected one SPS and one PPS, got {len(all_sps)} and {len(all_pps)}")
    return ParameterSets(sps=all_sps[0], pps=all_pps[0])


def is_picture_data(nal: bytes) -> bool:
    """Tell whether a sample needs this NAL unit: not parameter sets, delimiters and the encoder's own settings text."""
    match nal_type(nal):
        case NalType.SPS | NalType.PPS | NalType.ACCESS_UNIT_DELIMITER:
            return False
        case NalType.SEI:
            return nal[1] != USER_DATA_UNREGISTERED
        case _:
            return True


def to_annex_b(nals: Iterable[bytes]) -> bytes:
    return b"".join(START_CODE + nal for nal in nals)


def to_length_prefixed(nals: Iterable[bytes]) -> bytes:
    return b"".join(len(nal).to_bytes(4, "big") + nal for nal in nals)
