"""What a DreamZero model needs of memory besides its weights, from sizes alone: nothing is allocated here."""

from __future__ import annotations

import math
from dataclasses import replace

from kvcache.spec import KVSpec
from worldmodel.dreamzero.frames import CALL_FRAMES
from worldmodel.dreamzero.observation_vae import PIECE_LATENT_FRAMES
from worldmodel.dreamzero.robot import Robot
from worldmodel.dreamzero.sizes import Sizes
from worldmodel.dreamzero.step_skip import NUM_STEPS
from worldmodel.dreamzero.transformer import NUM_BRANCHES, kv_geometry
from worldmodel.dreamzero.transformer_config import CONDITION_MASK_CHANNELS
from worldmodel.wan.captured import GRAPH_BASE_BYTES
from worldmodel.wan.precision import FLOAT32_BYTES, PrecisionPlan
from worldmodel.wan.transformer import TIME_ROWS

ENCODE_ACTIVATIONS = 6
"""Activations of the encoder's widest stage that are alive at once; an estimate, for the memory plan only."""

FORWARD_ACTIVATIONS = 8
"""The same of a transformer layer, in units of its residual stream; the feed-forward comes on top."""


def plan_kv(
    sizes: Sizes,
    robot: Robot,
    plan: PrecisionPlan,
    *,
    latent_size: tuple[int, int],
    picture_size: tuple[int, int],
    view_size: tuple[int, int],
    requested_sessions: int = 1,
    is_captured: bool = False,
) -> KVSpec:
    """Return the K/V geometry at one picture size, with the bytes of a session and of the worker.

    `is_captured`: forwards are captured in graphs.
    """
    spec = kv_geometry(
        sizes.transformer,
        plan,
        latent_height=latent_size[0],
        latent_width=latent_size[1],
        requested_sessions=requested_sessions,
    )
    return replace(
        spec,
        model_owned_bytes=_session_bytes(sizes, robot, latent_size=latent_size, view_size=view_size),
        worker_owned_bytes=_worker_bytes(sizes, plan, spec, picture_size=picture_size)
        + (_graph_bytes(sizes, plan, spec) if is_captured else 0),
    )


def _session_bytes(sizes: Sizes, robot: Robot, *, latent_size: tuple[int, int], view_size: tuple[int, int]) -> int:
    """Count the cameras' frames, the condition and the text rows, each committed and in flight."""
    config = sizes.transformer
    frames = len(robot.cameras) * CALL_FRAMES * math.prod(view_size) * 3
    channels = CONDITION_MASK_CHANNELS + config.out_channels if config.image_condition else 0
    condition = channels * sizes.condition_latent_frames * math.prod(latent_size) * FLOAT32_BYTES
    text = config.text_rows * config.text_dim * FLOAT32_BYTES
    return 2 * (frames + condition + text)


def _worker_bytes(sizes: Sizes, plan: PrecisionPlan, spec: KVSpec, *, picture_size: tuple[int, int]) -> int:
    """Take the larger of what encoding and denoising need: they follow each other."""
    frames = PIECE_LATENT_FRAMES * sizes.vae.temporal_factor + 1
    pixels = frames * math.prod(picture_size)
    encode = ENCODE_ACTIVATIONS * sizes.vae.base_dim * pixels * plan.vae.itemsize
    return max(encode, _forward_bytes(sizes, plan, spec))


def _forward_bytes(sizes: Sizes, plan: PrecisionPlan, spec: KVSpec) -> int:
    config = sizes.transformer
    tokens = spec.tokens_per_latent_frame * config.latent_frames_per_chunk + config.register_tokens
    width = FORWARD_ACTIVATIONS * config.width * FLOAT32_BYTES + config.ffn_dim * plan.linear.itemsize
    return NUM_BRANCHES * tokens * width


def _graph_bytes(sizes: Sizes, plan: PrecisionPlan, spec: KVSpec) -> int:
    """Count what graphs hold: the activations of a forward, which no other memory serves, and packed constants."""
    config = sizes.transformer
    # Those of every step, of a commit for each of its two graphs, and the three places that they are copied to.
    timesteps = (NUM_STEPS + 5) * (1 if sizes.final_noise is None else 2)
    constants = timesteps * TIME_ROWS * config.num_layers * config.width * FLOAT32_BYTES
    return GRAPH_BASE_BYTES + _forward_bytes(sizes, plan, spec) + constants
