"""RGB24 payloads of start images."""

from __future__ import annotations

import numpy as np
import pytest

from worldmodel.errors import RequestRefused
from worldmodel.messages import ImageSize
from worldmodel.start_image import read_image


def test_an_image_of_the_wrong_length_is_refused() -> None:
    size = ImageSize(width=4, height=2)
    np.testing.assert_array_equal(read_image(size, memoryview(bytes(range(24)))).ravel(), np.arange(24))
    with pytest.raises(RequestRefused, match="4 x 2 x 3 = 24 bytes of RGB24, got 23") as caught:
        read_image(size, memoryview(bytes(23)))
    assert caught.value.field == "image"
