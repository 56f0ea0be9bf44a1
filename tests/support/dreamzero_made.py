"""Tiny DreamZero models of both published structures, made by our own checkpoint writer with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from worldmodel.checkpoint.writer import write_checkpoint
from worldmodel.dreamzero.config import parse_options
from worldmodel.dreamzero.layout import plan_checkpoint
from worldmodel.dreamzero.published import CAMERA_HEIGHT, CAMERA_WIDTH, Published, Scale, published
from worldmodel.dreamzero.robot import Robot
from worldmodel.messages import StartWorker

NO_SIZES: Mapping[str, int] = MappingProxyType({})


def tiny_model(structure: str, sizes: Mapping[str, int] = NO_SIZES) -> Published:
    """Return the settings of the tiny model, in the structure of the published 14b or 5b; `sizes` replaces some."""
    model = published(Scale.TINY)
    network = dict(model.head["diffusion_model_cfg"]) | sizes
    if structure == "14b":
        return replace(model, head=model.head | {"diffusion_model_cfg": network})
    network |= {
        "model_type": "ti2v",
        "in_dim": 48,
        "out_dim": 48,
        "frame_seqlen": 2,
        "concat_first_frame_latent": False,
    }
    head = model.head | {
        "diffusion_model_cfg": network,
        "vae_cfg": {"dim": 4, "z_dim": 48},
        "target_video_height": 32,
        "target_video_width": 64,
    }
    return Published(head=head, width=128, height=64)


def write_tiny(folder: Path, structure: str, *, sizes: Mapping[str, int] = NO_SIZES, **options: Any) -> StartWorker:
    """Write a tiny checkpoint and return the message that loads it on a CPU."""
    model = tiny_model(structure, sizes)
    write_checkpoint(plan_checkpoint(model), folder, seed=0)
    return StartWorker(
        model="dreamzero",
        checkpoint=str(folder),
        width=model.width,
        height=model.height,
        fps=5,
        model_options=parse_options({"computed_steps": 5, **options}),
    )


def random_pictures(robot: Robot, index: int) -> dict[str, npt.NDArray[Any]]:
    """Draw what a robot sees in its n-th call: one frame first, then four."""
    shape = (1 if index == 0 else 4, CAMERA_HEIGHT, CAMERA_WIDTH, 3)
    rng = np.random.default_rng(index)
    return {key: rng.integers(0, 256, shape, np.uint8) for key in robot.cameras}
