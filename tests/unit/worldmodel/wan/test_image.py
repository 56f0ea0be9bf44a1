"""Start images and the official size rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from worldmodel.wan.image import prepare_image


def image(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_an_image_of_the_right_size_is_only_rescaled() -> None:
    pixels = image(16, 24)
    prepared = prepare_image(pixels, 16, 24)
    assert prepared.dtype == torch.float32
    expected = torch.from_numpy(pixels.transpose(2, 0, 1) / 127.5 - 1).float()
    torch.testing.assert_close(prepared, expected, atol=1e-6, rtol=0)


def test_a_flat_image_stays_flat_and_colours_keep_their_order() -> None:
    pixels = np.zeros((10, 7, 3), np.uint8) + np.array([0, 255, 51], np.uint8)
    prepared = prepare_image(pixels, 16, 32)
    assert prepared.shape == (3, 16, 32)
    torch.testing.assert_close(prepared.amax((1, 2)), torch.tensor([-1.0, 1.0, -0.6]))
    torch.testing.assert_close(prepared.amin((1, 2)), torch.tensor([-1.0, 1.0, -0.6]))


def test_nothing_is_cropped() -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, -4:] = 255
    prepared = prepare_image(pixels, 16, 16)
    assert prepared[:, :, -1].min() > 0.9
    assert prepared[:, :, 0].max() < -0.9


def test_shrinking_does_not_smooth() -> None:
    """Bicubic without antialiasing reads the pixels next to each sample point, however large the image is."""
    pixels = np.zeros((80, 80, 3), np.uint8)
    pixels[::10] = 255
    assert prepare_image(pixels, 8, 8).unique().numel() == 1


def test_views_with_negative_strides_are_accepted() -> None:
    pixels = image(6, 6)
    torch.testing.assert_close(prepare_image(pixels[::-1], 6, 6), prepare_image(pixels, 6, 6).flip(1))


@pytest.mark.parametrize(
    "wrong", [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8)]
)
def test_other_arrays_are_refused(wrong: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match=r"expected uint8 \[height, width, 3\], got"):
        prepare_image(wrong, 8, 8)


def test_an_empty_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got uint8 \[0, 4, 3\]"):
        prepare_image(np.zeros((0, 4, 3), np.uint8), 8, 8)
