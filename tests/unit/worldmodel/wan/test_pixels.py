"""Pixel conversion against a NumPy twin, exact colours, FFmpeg's memory layout and a float reference."""

from __future__ import annotations

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.wan.pixels import to_rgb24, to_yuv420


def rgb_twin(frames: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    unit = np.clip(frames / np.float32(2) + np.float32(0.5), np.float32(0), np.float32(1))
    return np.rint(unit * np.float32(255)).astype(np.uint8).transpose(1, 2, 3, 0)


def yuv_twin(rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert [T, H, W, 3] pixel by pixel of the rule, in int64."""
    red, green, blue = (rgb[..., colour].astype(np.int64) for colour in range(3))
    y = ((16 << 16) + (1 << 15) + 11966 * red + 40254 * green + 4064 * blue) >> 16
    sums = []
    for plane in (red, green, blue):
        num_frames, height, width = plane.shape
        sums.append(plane.reshape(num_frames, height // 2, 2, width // 2, 2).sum(axis=(2, 4)))
    r, g, b = sums
    u = ((128 << 18) + (1 << 17) - 6596 * r - 22188 * g + 28784 * b) >> 18
    v = ((128 << 18) + (1 << 17) + 28784 * r - 26145 * g - 2639 * b) >> 18
    flat = np.concatenate([plane.reshape(len(rgb), -1) for plane in (y, u, v)], axis=1)
    return flat.astype(np.uint8).reshape(len(rgb), rgb.shape[1] * 3 // 2, rgb.shape[2])


def random_frames(seed: int, num_frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(3, num_frames, height, width, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), num_frames=st.integers(1, 3), rows=st.integers(1, 5), columns=st.integers(1, 5))
def test_equals_the_numpy_twin_bit_for_bit(seed: int, num_frames: int, rows: int, columns: int) -> None:
    frames = random_frames(seed, num_frames, 2 * rows, 2 * columns)
    rgb = rgb_twin(frames.numpy())
    np.testing.assert_array_equal(to_rgb24(frames).numpy(), rgb)
    np.testing.assert_array_equal(to_yuv420(frames).numpy(), yuv_twin(rgb))


def test_every_level_survives_the_round_trip_through_floats() -> None:
    levels = torch.arange(256)
    frames = (levels / 255 * 2 - 1).view(1, 1, 16, 16).expand(3, 1, 16, 16)
    assert torch.equal(to_rgb24(frames)[0, :, :, 0].flatten().long(), levels)


def test_values_outside_the_range_are_clamped() -> None:
    frames = torch.tensor([-7.0, 7.0]).view(1, 1, 1, 2).expand(3, 1, 1, 2)
    assert to_rgb24(frames)[0, 0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize(
    ("rgb", "yuv"),
    [
        ((0, 0, 0), (16, 128, 128)),
        ((255, 255, 255), (235, 128, 128)),
        ((128, 128, 128), (126, 128, 128)),
        ((255, 0, 0), (63, 102, 240)),
        ((0, 255, 0), (173, 42, 26)),
        ((0, 0, 255), (32, 240, 118)),
    ],
)
def test_exact_colours(rgb: tuple[int, int, int], yuv: tuple[int, int, int]) -> None:
    frames = (torch.tensor(rgb) / 255 * 2 - 1).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    planes = to_yuv420(frames).flatten()
    assert planes[:16].unique().tolist() == [yuv[0]]
    assert planes[16:20].unique().tolist() == [yuv[1]]
    assert planes[20:].unique().tolist() == [yuv[2]]


def test_every_grey_has_neutral_chroma() -> None:
    frames = (torch.arange(256) / 255 * 2 - 1).repeat_interleave(4).view(1, 256, 2, 2).expand(3, 256, 2, 2)
    chroma = to_yuv420(frames).flatten(1)[:, 4:]
    assert chroma.unique().tolist() == [128]


def test_stays_within_one_level_of_the_exact_matrix() -> None:
    rgb = torch.randint(0, 256, (3, 1, 64, 64), generator=torch.Generator().manual_seed(5))
    red, green, blue = (rgb / 255).double()
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    planes = to_yuv420(rgb / 255 * 2 - 1).flatten()
    assert (planes[: 64 * 64] - (16 + 219 * y).flatten()).abs().max() < 0.51
    u = 128 + 224 * (blue - y) / 1.8556
    v = 128 + 224 * (red - y) / 1.5748
    for start, plane in ((64 * 64, u), (64 * 64 + 32 * 32, v)):
        mean = plane.view(32, 2, 32, 2).mean(dim=(1, 3)).flatten()
        assert (planes[start : start + 32 * 32] - mean).abs().max() < 0.51


def test_memory_is_laid_out_as_ffmpeg_yuv420p() -> None:
    planes = to_yuv420(random_frames(1, 1, 16, 32))
    assert planes.is_contiguous()
    frame = av.VideoFrame.from_ndarray(planes[0].numpy(), format="yuv420p")
    ours = planes.flatten().split([16 * 32, 8 * 16, 8 * 16])
    for expected, plane in zip(ours, frame.planes, strict=True):
        rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        np.testing.assert_array_equal(rows.flatten(), expected.numpy())


@pytest.mark.parametrize(("height", "width"), [(5, 4), (4, 5)])
def test_odd_sizes_are_refused(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"even height and width, got {height} x {width}"):
        to_yuv420(torch.zeros(3, 1, height, width))


def test_wrong_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[3, frames, height, width\], got \[1, 3, 4, 4\]"):
        to_rgb24(torch.zeros(1, 3, 4, 4))


def test_reduced_precision_is_converted_in_float32() -> None:
    frames = random_frames(2, 2, 8, 8).bfloat16()
    assert torch.equal(to_yuv420(frames), to_yuv420(frames.float()))
