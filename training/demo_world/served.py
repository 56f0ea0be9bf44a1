"""Sessions of a served demo world, and what the renderer says that they should have shown.

A session is steered over a real socket and watched as H.264. What acted in which chunk is read from the chunks, so that
the truth belongs to what happened and nothing here depends on timing.

Shape suffixes: T latent frames, K the eight keys, M media frames, N chunks.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image

from clients.python import WorldClient
from training.demo_world import scene, trajectories
from training.demo_world.prompts import WORDS

FRAMES_PER_CHUNK = 3
Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a session is asked for.

    It starts at `start`, x and z in metres, with `heading` in radians and a style; `keys_TK` are held one latent frame
    each, of which the first counts as none; a style of `switches` is asked for once that many chunks have come.
    """

    start: tuple[float, float]
    heading: float
    style: int
    keys_TK: trajectories.Bools
    num_chunks: int
    switches: Mapping[int, int] = field(default_factory=dict)
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a session showed, uint8 [M, H, W, 3], the chunk in which the keys began, and the style of each chunk."""

    frames: Frames
    first_chunk: int
    styles_N: npt.NDArray[np.int64]


def prompt_of(style: int, wording: int = 0) -> str:
    words = WORDS[scene.STYLES[style]]
    return f"a {words[wording % len(words)]} town"


def start_png(script: Script) -> bytes:
    """Draw the session's start image as a PNG file."""
    pixels = draw(script, np.zeros((1, len(trajectories.KEYS)), bool), np.array([script.style]))[0]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def draw(
    script: Script, keys_TK: trajectories.Bools, styles_T: npt.NDArray[np.int64], only: slice = slice(None)
) -> Frames:
    """Render a walk's media frames, or some, from the script's start; the first latent frame stands there."""
    start = np.array([script.start]) / trajectories.METRES_PER_UNIT
    cameras = trajectories.walk(keys_TK[None], start, np.array([script.heading]))
    styles = np.concatenate([styles_T[:1], np.repeat(styles_T[1:], 4)]).astype(np.int32)
    return scene.render(trajectories.media_poses(cameras)[0][only], styles[only]).numpy()


def truth(script: Script, walk: Walk, only: slice = slice(None)) -> Frames:
    """Render what the session should have shown, or some of its media frames."""
    num_frames = FRAMES_PER_CHUNK * script.num_chunks
    keys = np.zeros((num_frames, len(trajectories.KEYS)), bool)
    acted = script.keys_TK[: num_frames - FRAMES_PER_CHUNK * walk.first_chunk]
    first = FRAMES_PER_CHUNK * walk.first_chunk
    keys[first + 1 : first + len(acted)] = acted[1:]
    return draw(script, keys, np.repeat(walk.styles_N, FRAMES_PER_CHUNK), only)


async def serve(world_url: str, script: Script) -> Walk:
    """Play a script on a server. Raises what the client raises, and RuntimeError if the session ends early."""
    frames: list[Frames] = []
    asked: dict[int, int] = {}
    styles = np.full(script.num_chunks, script.style)
    held = [[key for key, down in zip(trajectories.KEYS, row, strict=True) if down] for row in script.keys_TK]
    prompt = prompt_of(script.style)
    client = WorldClient(world_url, image=start_png(script), prompt=prompt, seed=script.seed, pacing="free")
    first_chunk = script.num_chunks
    async with client as world:
        # A run that begins while the session is paused has made nothing yet, so the keys act from its first chunk on.
        await world.pause()
        await world.reset(prompt=prompt)
        # Nothing acts at first: in chunk 0 the first latent frame is the start image, and does not move.
        receipt = await world.script([[], *held[1:]])
        await world.unpause()
        async for chunk in world.chunks():
            if chunk.run < world.run:
                continue
            for event in chunk.header.applied:
                if event.event_id == receipt.event_id:
                    first_chunk = chunk.chunk_index
                else:
                    styles[chunk.chunk_index :] = asked[event.event_id]
            frames.append(await asyncio.to_thread(chunk.frames))
            if len(frames) == script.num_chunks:
                break
            if len(frames) in script.switches:
                style = script.switches[len(frames)]
                asked[(await world.prompt(prompt_of(style, len(asked)))).event_id] = style
    if len(frames) < script.num_chunks:
        raise RuntimeError(f"the session ended after {len(frames)} of {script.num_chunks} chunks")
    return Walk(frames=np.concatenate(frames), first_chunk=first_chunk, styles_N=styles)


def chunk_slice(chunk: int) -> slice:
    """Return the media frames of a chunk, counted from 0: the first has 9, every other one 12."""
    return slice(max(0, 12 * chunk - 3), 12 * chunk + 9)


def psnr_db(shown: Frames, true: Frames) -> float:
    """Return the PSNR over all given frames."""
    squared = np.square(shown.astype(np.float64) - true.astype(np.float64)).mean()
    return float(10 * np.log10(255**2 / max(squared, 1e-3)))


def edges(frames: Frames) -> float:
    """Return the mean absolute difference of neighbouring pixels: what blur takes away."""
    values = frames.astype(np.float64)
    across, down = np.abs(np.diff(values, axis=2)).mean(), np.abs(np.diff(values, axis=1)).mean()
    return float(across + down)


def nearest(shown: Frames, candidates: list[Frames]) -> int:
    """Return which of the candidates a picture is most like."""
    return int(np.argmax([psnr_db(shown, candidate) for candidate in candidates]))
