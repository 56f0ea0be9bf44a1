"""True pictures for the tests of the whole server's picture quality, which need no compiler then.

    python -m training.demo_world.gate --out tests/golden/data/demo_world

`walk.png` is one short walk, which stands still for two chunks, then follows `SCRIPT`; `styles.png` is where it begins,
in every style.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from PIL import Image

from training.demo_world import scene, served, ship, trajectories

START = "day"
STILL_CHUNKS, NUM_CHUNKS = 2, 7
SCRIPT: tuple[tuple[str, ...], ...] = (
    *((), *[("w",)] * 3, *[("l",)] * 3, *[("w", "l")] * 2),
    *(("s", "i"), ("j", "k"), ("i",), ("s", "i"), ("a", "i"), ("d",)),
)
"""Keys of the latent frames after those of the still chunks: all eight. The window first drops a
chunk for the last one."""
PICTURES = (8, 20, 26, 32, 38, 44, 50, 56, 62, 68, 74, 80)
"""Media frames whose true pictures `walk.png` holds, from left to right."""


def walk_pictures() -> served.Frames:
    """Render the true pictures of the walk, uint8 [pictures, height, width, 3]."""
    num_frames = served.FRAMES_PER_CHUNK * NUM_CHUNKS
    keys = np.zeros((num_frames, len(trajectories.KEYS)), bool)
    for frame, held in enumerate(SCRIPT):
        keys[served.FRAMES_PER_CHUNK * STILL_CHUNKS + frame, [trajectories.KEYS.index(key) for key in held]] = True
    return _draw(scene.STYLES.index(START), keys)[list(PICTURES)]


def style_pictures() -> served.Frames:
    """Render the first picture in each style, in their order, uint8 [styles, height, width, 3]."""
    still = np.zeros((1, len(trajectories.KEYS)), bool)
    return np.concatenate([_draw(style, still) for style in range(len(scene.STYLES))])


def _draw(style: int, keys_TK: trajectories.Bools) -> served.Frames:
    x, z, heading = ship.STARTS[START]
    script = served.Script(
        start=(x, z), heading=math.radians(heading), style=style, keys_TK=keys_TK, num_chunks=NUM_CHUNKS
    )
    return served.draw(script, keys_TK, np.full(len(keys_TK), style))


def read_pictures(file: Path, num_pictures: int) -> served.Frames:
    """Read a file that `main` writes."""
    strip = np.asarray(Image.open(file).convert("RGB"))
    return np.stack(np.split(strip, num_pictures, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the true pictures of the quality tests.")
    parser.add_argument("--out", type=Path, required=True, help="folder for walk.png and styles.png")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, pictures in (("walk.png", walk_pictures()), ("styles.png", style_pictures())):
        Image.fromarray(np.concatenate(list(pictures), axis=1)).save(out / name, optimize=True)


if __name__ == "__main__":
    main()
