"""Camera pictures as the network was trained on them: cropped, resized, tiled into one, scaled to [-1, 1].

Shapes: T frames, H and W pixels, 3 colours, C = 3. Everything is exact: the views are whole numbers at every step.
Source: DreamZero official code, its video transforms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from worldmodel.dreamzero.embodiments import Tiling

Pixels = npt.NDArray[np.uint8]

CROP = 0.95
"""Part of height and width that is kept, around the centre."""


def transform_view(frames_THW3: Pixels, height: int, width: int) -> Pixels:
    """Crop the middle of every frame and resize it to `height` x `width`, with antialiasing; uint8 again.

    On one thread: a view takes two milliseconds, and where other programs use the cores too each operation that is
    shared out waits for a thread that has none, some ten milliseconds every time.
    """
    with _one_thread():
        return _transform_view(frames_THW3, height, width)


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _transform_view(frames_THW3: Pixels, height: int, width: int) -> Pixels:
    full_height, full_width = frames_THW3.shape[1:3]
    crop_height, crop_width = int(CROP * full_height), int(CROP * full_width)
    # Halves are rounded to even.
    top, left = round((full_height - crop_height) / 2), round((full_width - crop_width) / 2)
    cropped = frames_THW3[:, top : top + crop_height, left : left + crop_width]
    # One plane a colour, and in place: the same bits as with colours side by side, in two thirds of the time.
    planes_TCHW = np.ascontiguousarray(cropped.transpose(0, 3, 1, 2))
    unit_TCHW = torch.from_numpy(planes_TCHW).float().div_(255)
    resized_TCHW = functional.interpolate(
        unit_TCHW, size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )
    # Truncated, not rounded.
    levels: Pixels = resized_TCHW.mul_(255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return levels


def tile_views(views_THW3: Sequence[Pixels], tiling: Tiling) -> Pixels:
    """Join the views of one time into pictures of twice their height and width, [T, 2H, 2W, 3]."""
    num_frames, height, width, _ = views_THW3[0].shape
    picture = np.zeros((num_frames, 2 * height, 2 * width, 3), np.uint8)
    if tiling is Tiling.WRIST_TOP:
        left, right, wrist = views_THW3
        picture[:, :height] = np.repeat(wrist, 2, axis=2)
        picture[:, height:, :width] = left
        picture[:, height:, width:] = right
        return picture
    corners = ((0, 0), (1, 0), (0, 1))
    for view, (row, column) in zip(views_THW3, corners, strict=False):
        picture[:, row * height : (row + 1) * height, column * width : (column + 1) * width] = view
    return picture


def signed_pictures(pictures_THW3: Pixels, height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Map tiled pictures to [-1, 1], float32 [3, T, height, width]; another size is reached without antialias."""
    levels_TCHW = torch.from_numpy(pictures_THW3).to(device).permute(0, 3, 1, 2)
    signed_TCHW = (levels_TCHW.float() / 255 - 0.5) / 0.5
    if signed_TCHW.shape[-2:] != (height, width):
        signed_TCHW = functional.interpolate(signed_TCHW, size=(height, width), mode="bilinear", align_corners=False)
    return signed_TCHW.transpose(0, 1).contiguous()


def observation_clip(pictures_CTHW: Tensor) -> Tensor:
    """Return the 9 frames that are encoded for what the cameras saw since the last call.

    4 frames are shown twice each; 4 and 8 get a copy of the first in front; 9 stay. Raises ValueError for others.
    """
    num_frames = pictures_CTHW.shape[1]
    if num_frames == 9:
        return pictures_CTHW
    if num_frames == 4:
        pictures_CTHW = pictures_CTHW.repeat_interleave(2, dim=1)
    elif num_frames != 8:
        raise ValueError(f"an observation has 4, 8 or 9 frames, got {num_frames}")
    return torch.cat([pictures_CTHW[:, :1], pictures_CTHW], dim=1)


def start_picture(pictures_CTHW: Tensor) -> Tensor:
    """Return the frame that a new run begins with: the last of a clip of 4 or 9, else the first; [3, height, width]."""
    return pictures_CTHW[:, -1 if pictures_CTHW.shape[1] in (4, 9) else 0]
