"""Walks through the demo world with the pictures they should show, rendered once and kept in a file.

Another machine can measure with them: rendering needs a C++ compiler, reading nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

LOOKED_AT = (1, 3, 6, 10, 20, 40)
"""Chunks, counted from 1, of which a walk has the true pictures."""
SEED = 4242

Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One session: its start image, its prompt, the keys of each latent frame, and the true pictures by chunk."""

    image: Frames
    prompt: str
    held: tuple[str, ...]
    truth: Mapping[int, Frames]


def render_walks(num_walks: int, num_chunks: int) -> list[Walk]:
    """Draw scripts that the training never did, and what they lead to."""
    from training.demo_world import scene, served, trajectories

    rng = np.random.default_rng(SEED)
    walks = []
    for _ in range(num_walks):
        num_frames = served.FRAMES_PER_CHUNK * num_chunks
        keys_TK = trajectories.sample_keys(rng, 1, num_frames)[0]
        # In chunk 0 the first latent frame is the start image, and does not move.
        keys_TK[0] = False
        start = trajectories.sample_starts(rng, 1)[0] * trajectories.METRES_PER_UNIT
        script = served.Script(
            start=(float(start[0]), float(start[1])),
            heading=float(trajectories.sample_headings(rng, 1)[0]),
            style=int(rng.integers(len(scene.STYLES))),
            keys_TK=keys_TK,
            num_chunks=num_chunks,
        )
        styles_T = np.full(num_frames, script.style)
        parts = {chunk: served.chunk_slice(chunk - 1) for chunk in LOOKED_AT if chunk <= num_chunks}
        walks.append(
            Walk(
                image=served.draw(script, keys_TK[:1], styles_T[:1])[0],
                prompt=served.prompt_of(script.style),
                held=tuple("".join(np.array(list(trajectories.KEYS))[row]) for row in keys_TK),
                truth={chunk: served.draw(script, keys_TK, styles_T, part) for chunk, part in parts.items()},
            )
        )
    return walks


def save_walks(walks: Sequence[Walk], file: Path) -> None:
    arrays = {}
    for index, walk in enumerate(walks):
        words = json.dumps([walk.prompt, *walk.held])
        arrays[f"{index}.image"], arrays[f"{index}.words"] = walk.image, np.array(words)
        arrays |= {f"{index}.truth.{chunk}": frames for chunk, frames in walk.truth.items()}
    np.savez_compressed(file, allow_pickle=False, **arrays)


def load_walks(file: Path) -> list[Walk]:
    walks: list[Walk] = []
    with np.load(file) as arrays:
        while f"{len(walks)}.image" in arrays:
            index = f"{len(walks)}."
            prompt, *held = json.loads(str(arrays[f"{index}words"]))
            names = [name for name in arrays.files if name.startswith(f"{index}truth.")]
            truth = {int(name.rpartition(".")[2]): arrays[name] for name in names}
            walks.append(Walk(image=arrays[f"{index}image"], prompt=prompt, held=tuple(held), truth=truth))
    return walks
