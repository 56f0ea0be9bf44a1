"""What a model is asked before it is loaded for a clip, and what it answers. Torch-free; names no model.

A clip has a length and a picture size that must suit the model, and a long load before a refusal would be a long wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worldmodel.messages import Control

RANDOM_SCHEME = "random:"
"""`random:NAME` or `random:NAME:SEED` stands for a checkpoint folder where there is none."""

MAX_CLIP_MEDIA_FRAMES = 100_000
"""Longest clip that can be wished for, trimmed or not: 104 minutes at 16 frames a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipWish:
    """What somebody wants a clip to be.

    `checkpoint` and `options` are those of the configuration, `width` and `height` in pixels too; `follows_image` asks
    for the model's own rule, which chooses a size for the start image within the configured area. `trims` shortens a
    number of frames that does not fit instead of refusing it. `camera_folder` holds a camera
    path and comes from who runs the program: links in it are followed.
    """

    checkpoint: str
    options: dict[str, object]
    width: int
    height: int
    image_width: int
    image_height: int
    num_media_frames: int
    follows_image: bool = False
    trims: bool = False
    camera_folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPlan:
    """What the clip will be. `controls` steer its first chunk; `options` replace those of the configuration."""

    width: int
    height: int
    num_media_frames: int
    num_chunks: int
    latent_frames_per_chunk: int
    options: dict[str, object]
    controls: tuple[Control, ...] = ()


class ClipPlanner(Protocol):
    """Turn a wish into a plan. Raises `RequestRefused` whose `field` is a field of the wish or an option."""

    def __call__(self, wish: ClipWish) -> ClipPlan: ...
