"""NAL units, parameter sets and the codec string."""

import pytest

from server.media import h264

SPS = bytes.fromhex("67640015acd9")
PPS = bytes.fromhex("68ebe3cb")
IDR = bytes.fromhex("658884")
SETTINGS_SEI = bytes.fromhex("060510aa")
RECOVERY_SEI = bytes.fromhex("06060184")


@pytest.mark.parametrize("start_code", [b"\0\0\1", b"\0\0\0\1"])
def test_splits_at_start_codes_of_both_lengths(start_code: bytes) -> None:
    stream = b"".join(start_code + nal for nal in (SPS, PPS, IDR))
    assert h264.split_annex_b(stream) == (SPS, PPS, IDR)


@pytest.mark.parametrize("stream", [b"", b"\x65\x88", b"\x07\0\0\1\x65"])
def test_refuses_a_stream_without_a_start_code_at_its_head(stream: bytes) -> None:
    with pytest.raises(ValueError, match="begins with a start code"):
        h264.split_annex_b(stream)


def test_annex_b_round_trip() -> None:
    assert h264.split_annex_b(h264.to_annex_b((SPS, PPS))) == (SPS, PPS)


def test_length_prefix_counts_the_nal_unit_only() -> None:
    assert h264.to_length_prefixed((IDR, PPS)) == b"\0\0\0\x03" + IDR + b"\0\0\0\x04" + PPS


def test_codec_string_is_profile_constraints_level() -> None:
    assert h264.find_parameter_sets((SETTINGS_SEI, SPS, PPS)).codec == "avc1.640015"


@pytest.mark.parametrize("nals", [(SPS,), (PPS,), (SPS, SPS, PPS)])
def test_wants_one_of_each_parameter_set(nals: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="expected one SPS and one PPS"):
        h264.find_parameter_sets(nals)


def test_only_picture_data_belongs_in_samples() -> None:
    delimiter = b"\x09\xf0"
    nals = (delimiter, SPS, PPS, SETTINGS_SEI, RECOVERY_SEI, IDR)
    assert [nal for nal in nals if h264.is_picture_data(nal)] == [RECOVERY_SEI, IDR]
