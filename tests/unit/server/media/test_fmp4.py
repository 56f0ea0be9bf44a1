"""The box writer against an independent reader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.media import fmp4
from server.media.h264 import ParameterSets
from tests.support.mp4_boxes import parse_fragment, parse_mp4

HIGH = ParameterSets(sps=bytes.fromhex("67640015acd9"), pps=bytes.fromhex("68ebe3cb"))
BASELINE = ParameterSets(sps=bytes.fromhex("6742c00bd9"), pps=bytes.fromhex("68cb83"))


def track(sets: ParameterSets = HIGH) -> fmp4.VideoTrack:
    return fmp4.VideoTrack(width=832, height=480, timescale=16000, parameter_sets=sets)


def sample(data: bytes, *, sync: bool) -> fmp4.Sample:
    return fmp4.Sample(data=data, duration=1000, sync=sync)


@pytest.mark.parametrize(
    ("sets", "codec", "chroma"), [(HIGH, "avc1.640015", (1, 8, 8)), (BASELINE, "avc1.42c00b", None)]
)
def test_init_segment_describes_the_stream(
    sets: ParameterSets, codec: str, chroma: tuple[int, int, int] | None
) -> None:
    init = parse_mp4(fmp4.init_segment(track(sets))).init
    assert (init.width, init.height, init.timescale) == (832, 480, 16000)
    assert (init.codec, init.sps, init.pps) == (codec, sets.sps, sets.pps)
    assert init.chroma_fields == chroma
    assert init.colour == (1, 1, 1, False)


@given(
    sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=40),
    decode_time=st.integers(0, 2**63),
    sequence_number=st.integers(1, 2**32 - 1),
    duration=st.integers(1, 2**31),
)
def test_a_fragment_says_what_went_in(sizes: list[int], decode_time: int, sequence_number: int, duration: int) -> None:
    samples = [
        fmp4.Sample(data=bytes([index]) * size, duration=duration, sync=index == 0) for index, size in enumerate(sizes)
    ]
    fragment = parse_fragment(
        fmp4.media_fragment(sequence_number=sequence_number, decode_time=decode_time, samples=samples)
    )
    assert fragment.sequence_number == sequence_number
    assert fragment.decode_time == decode_time
    assert [row.data for row in fragment.samples] == [one.data for one in samples]
    assert {row.duration for row in fragment.samples} == {duration}
    assert [row.is_sync for row in fragment.samples] == [one.sync for one in samples]
    assert [row.depends_on_others for row in fragment.samples] == [2] + [1] * (len(sizes) - 1)


def test_refuses_a_fragment_that_nobody_can_join() -> None:
    with pytest.raises(ValueError, match="must be a sync sample"):
        fmp4.media_fragment(sequence_number=1, decode_time=0, samples=[sample(b"x", sync=False)])


def test_refuses_an_empty_fragment() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fmp4.media_fragment(sequence_number=1, decode_time=0, samples=[])
