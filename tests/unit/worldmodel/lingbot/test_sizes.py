"""The official choice of a picture size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel.lingbot.sizes import official_size


@pytest.mark.parametrize(
    ("image_size", "expected"),
    [
        ((720, 1280), (464, 832)),
        ((1080, 1920), (464, 832)),
        ((1000, 1500), (512, 768)),
        ((480, 832), (464, 832)),  # the rounding trap
        ((832, 480), (832, 480)),
        ((512, 512), (624, 624)),
    ],
)
def test_official_size(image_size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert official_size(*image_size) == expected


@given(height=st.integers(16, 5000), width=st.integers(16, 5000))
def test_official_size_divides_by_16_and_stays_within_the_area(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > 1500:
        return
    chosen = official_size(height, width)
    assert chosen[0] % 16 == chosen[1] % 16 == 0
    assert chosen[0] * chosen[1] <= 480 * 832


@pytest.mark.parametrize("size", [(0, 5), (1, 100_000)])
def test_degenerate_sizes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="image size: "):
        official_size(*size)


def test_a_larger_area_keeps_the_same_rule() -> None:
    assert official_size(720, 1280, max_area=720 * 1280) == (720, 1280)
    assert official_size(704, 1280, max_area=704 * 1280) == (704, 1280)
    assert official_size(900, 1600, max_area=704 * 1280) == (704, 1264)
