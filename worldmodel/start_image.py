"""Start images as they come to a worker: sizes in messages, RGB24 in payloads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worldmodel.errors import RequestRefused
from worldmodel.messages import ImageSize

Image = npt.NDArray[np.uint8]
"""RGB24 [height, width, 3]."""


def size_of(image: Image) -> ImageSize:
    return ImageSize(width=image.shape[1], height=image.shape[0])


def read_image(size: ImageSize, payload: memoryview) -> Image:
    """View a payload as RGB24 [height, width, 3]. Raises `RequestRefused` if its length does not fit its size."""
    expected = size.width * size.height * 3
    if size.width < 1 or size.height < 1 or len(payload) != expected:
        raise RequestRefused(
            f"image: expected {size.width} x {size.height} x 3 = {expected} bytes of RGB24, got {len(payload)}",
            code="bad_image",
            field="image",
        )
    return np.frombuffer(payload, np.uint8).reshape(size.height, size.width, 3)
