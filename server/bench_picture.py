"""The start image of benchmarks where none is on offer: always the same, so that no data set is needed."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

PROMPT = "a quiet street between houses under a clear sky"


def synthetic_image(width: int, height: int) -> bytes:
    """Return a PNG of a street seen down its middle: sky, ground and house fronts in perspective, with some texture."""
    across, down = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
    depth = 1 / np.maximum(np.maximum(np.abs(across), np.abs(down)), 0.04)
    ground = down >= np.abs(across)
    houses = (np.abs(across) > np.abs(down)) & (np.abs(down) * depth < 1)
    windows = (np.floor(3 * depth) % 2 == 0) & (np.floor(6 * down * depth) % 2 == 0)
    picture = np.empty((height, width, 3))
    picture[:] = np.stack((150 + 40 * down, 185 + 30 * down, 235 + 10 * down), axis=-1)
    picture[ground] = (110, 108, 104)
    picture[ground & (np.floor(4 * depth) % 2 == 0) & (np.abs(across) * depth < 0.06)] = (228, 220, 190)
    picture[houses] = (172, 120, 92)
    picture[houses & windows] = (70, 82, 104)
    picture += np.random.default_rng(0).normal(0, 4, picture.shape)
    file = io.BytesIO()
    Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()
