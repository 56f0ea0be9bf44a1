"""Start images: from client pixels to what the VAE encodes.

Shape suffixes: 3 colours (R, G, B), H height, W width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def prepare_image(image_HW3: npt.NDArray[np.uint8], height: int, width: int) -> Tensor:
    """Resize a client's image to `height` x `width` and map it to [-1, 1], float32 [3, height, width] on the CPU.

    Bicubic straight to the target size, without antialiasing, crop or padding, so the aspect ratio may change and
    values may overshoot the range a little (LingBot-World v2 official code, wan/image2video.py).

    Raises:
        ValueError: if the image isn't uint8 [height, width, 3].
    """
    if image_HW3.dtype != np.uint8 or image_HW3.ndim != 3 or image_HW3.shape[2] != 3 or 0 in image_HW3.shape:
        raise ValueError(f"image: expected uint8 [height, width, 3], got {image_HW3.dtype} {list(image_HW3.shape)}")
    pixels_3HW = torch.from_numpy(np.ascontiguousarray(image_HW3.transpose(2, 0, 1)))
    return resize_unit_image(pixels_3HW.float() / 255, height, width)


def resize_unit_image(image_3HW: Tensor, height: int, width: int) -> Tensor:
    """Map an image in [0, 1] to [-1, 1] and resize it as `prepare_image` does."""
    signed_3HW = (image_3HW - 0.5) / 0.5
    return F.interpolate(signed_3HW[None], size=(height, width), mode="bicubic", align_corners=False)[0]
