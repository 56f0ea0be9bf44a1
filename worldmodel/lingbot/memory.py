"""What a LingBot-World model needs of memory besides its weights, from sizes alone: nothing is allocated here.

The counts are those of `LingBotAdapter.generate`; a test compares them with what a session holds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvcache.spec import KVSpec
from worldmodel.lingbot.transformer import kv_geometry
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.layers import PATCH
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.vae import WanVAE

MAX_BASES = 2
"""Camera bases kept: one for the default intrinsics, one for those of a trajectory."""

DECODE_ACTIVATIONS = 6
"""Activations of the decoder's widest stage that are alive at once; an estimate, for the memory plan only."""

FLOAT32_BYTES = 4

ROTATION_ELEMENTS = 9
"""Of a camera basis, the part that differs from token to token."""


def num_camera_bases(plan: PrecisionPlan) -> int:
    """Return how many camera bases a worker keeps: none where rays are rounded, since a basis cannot show that."""
    return 0 if plan.rounds_as_official else MAX_BASES


def plan_kv(
    config: TransformerConfig,
    vae: WanVAE,
    plan: PrecisionPlan,
    *,
    width: int,
    height: int,
    requested_sessions: int = 1,
    recache_on_prompt: bool = False,
    noise_clip_latent_frames: int = 0,
    keeps_camera: bool = True,
    decodes_whole_chunks: bool = True,
) -> KVSpec:
    """Return the K/V geometry at one picture size, with the bytes of a session and of the worker.

    `vae` may be on the meta device. A worker that does not keep the camera's scales and shifts has those of one layer
    at a time; one that does not decode whole chunks decodes one latent frame at a time.
    """
    latent_height, latent_width = height // vae.config.spatial_factor, width // vae.config.spatial_factor
    spec = kv_geometry(
        config,
        plan,
        latent_height=latent_height,
        latent_width=latent_width,
        requested_sessions=requested_sessions,
        worker_owned_bytes=_worker_bytes(
            config,
            vae,
            plan,
            width=width,
            height=height,
            num_camera_layers=config.num_layers if keeps_camera else 1,
            decoded_latent_frames=config.latent_frames_per_chunk if decodes_whole_chunks else 1,
        ),
    )
    owned_bytes = _session_bytes(config, vae, plan, width=width, height=height)
    owned_bytes += noise_clip_latent_frames * config.out_channels * latent_height * latent_width * FLOAT32_BYTES
    if recache_on_prompt:
        frame_bytes = (config.in_channels * latent_height * latent_width) * FLOAT32_BYTES
        owned_bytes += (spec.session_latent_frames + config.latent_frames_per_chunk) * frame_bytes
    return replace(spec, model_owned_bytes=owned_bytes, rewritable_history=recache_on_prompt)


def _session_bytes(config: TransformerConfig, vae: WanVAE, plan: PrecisionPlan, *, width: int, height: int) -> int:
    """Count the committed VAE caches, then the start image, the condition and the text.

    Of text there are two: on the way to a prompt a session keeps the rows that the way began at.
    """
    latent_pixels = (height // vae.config.spatial_factor) * (width // vae.config.spatial_factor)
    image_bytes = 3 * height * width * FLOAT32_BYTES
    condition_bytes = config.in_channels * config.latent_frames_per_chunk * latent_pixels * FLOAT32_BYTES
    text_bytes = config.text_rows * config.text_dim * plan.linear.itemsize
    return vae.cache_bytes(height, width, plan.vae) + image_bytes + condition_bytes + 2 * text_bytes


def _worker_bytes(
    config: TransformerConfig,
    vae: WanVAE,
    plan: PrecisionPlan,
    *,
    width: int,
    height: int,
    num_camera_layers: int,
    decoded_latent_frames: int,
) -> int:
    """Count the camera bases, the VAE caches of the chunk in flight, then the larger of denoising and decoding.

    One chunk is in flight at a time, whoever owns it. Denoising holds camera scale and shift of layers for one
    chunk, decoding its widest activations: they follow each other.
    """
    factor = vae.config.spatial_factor
    tokens_per_frame = math.prod((height // factor // PATCH, width // factor // PATCH))
    frames = config.latent_frames_per_chunk
    modulation_bytes = 2 * num_camera_layers * frames * tokens_per_frame * config.width * plan.linear.itemsize
    bases_bytes = num_camera_bases(plan) * ROTATION_ELEMENTS * tokens_per_frame * config.width * FLOAT32_BYTES
    media_frames = vae.config.temporal_factor * decoded_latent_frames
    activation_bytes = media_frames * vae.config.decoder_base_dim * height * width * plan.vae.itemsize
    in_flight_bytes = vae.cache_bytes(height, width, plan.vae)
    return bases_bytes + in_flight_bytes + max(modulation_bytes, DECODE_ACTIVATIONS * activation_bytes)
