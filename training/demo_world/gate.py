"""One short walk of the served demo world and its true pictures, for the test of the whole server's picture quality.

    python -m training.demo_world.gate --out tests/golden/data/demo_world/walk.png

The walk stands still for two chunks, then follows `SCRIPT`. The true pictures lie in a file, so that the test needs no
compiler.
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
"""Media frames whose true pictures the file holds, from left to right."""


def true_pictures() -> served.Frames:
    """Render the true pictures, uint8 [pictures, height, width, 3]."""
    num_frames = served.FRAMES_PER_CHUNK * NUM_CHUNKS
    keys = np.zeros((num_frames, len(trajectories.KEYS)), bool)
    for frame, held in enumerate(SCRIPT):
        keys[served.FRAMES_PER_CHUNK * STILL_CHUNKS + frame, [trajectories.KEYS.index(key) for key in held]] = True
    x, z, heading = ship.STARTS[START]
    script = served.Script(
        start=(x, z),
        heading=math.radians(heading),
        style=scene.STYLES.index(START),
        keys_TK=keys,
        num_chunks=NUM_CHUNKS,
    )
    frames = served.draw(script, keys, np.full(num_frames, script.style))
    return frames[list(PICTURES)]


def read_pictures(file: Path) -> served.Frames:
    """Read the file that `main` writes."""
    strip = np.asarray(Image.open(file).convert("RGB"))
    return np.stack(np.split(strip, len(PICTURES), axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the true pictures of the quality test's walk.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(list(true_pictures()), axis=1)).save(out, optimize=True)


if __name__ == "__main__":
    main()
