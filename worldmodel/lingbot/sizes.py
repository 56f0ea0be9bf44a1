"""The official choice of a picture size. Torch-free."""

from __future__ import annotations

import math

TOKEN_SIDE_PX = 16
"""Side of one token in pixels: 8 of the VAE times 2 of a patch. Both sides of a picture are multiples of it."""


def official_size(image_height: int, image_width: int, *, max_area: int = 480 * 832) -> tuple[int, int]:
    """Choose the (height, width) that keeps an image's aspect ratio within `max_area` pixels, divisible by 16.

    Float64 in the order of LingBot-World v2 official code, wan/image2video.py. The rounding belongs to the rule: an
    image of 480x832 gives 464x832, because its height evaluates to 479.99999999999994 before the division.
    """
    if min(image_height, image_width) < 1:
        raise ValueError(f"image size: expected at least 1x1, got {image_height}x{image_width}")
    aspect = image_height / image_width
    height = TOKEN_SIDE_PX * math.floor(math.floor(math.sqrt(max_area * aspect) / 8) / 2)
    width = TOKEN_SIDE_PX * math.floor(math.floor(math.sqrt(max_area / aspect) / 8) / 2)
    if min(height, width) < TOKEN_SIDE_PX:
        raise ValueError(f"image size: {image_height}x{image_width} is too narrow for an area of {max_area} pixels")
    return height, width
