"""What a LingBot-World model needs of memory besides its weights, from sizes alone: nothing is allocated here.

The counts are those of `LingBotAdapter.generate`; a test compares them with what a session holds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvcache.spec import KVSpec
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.layer_parts import TIME_NETWORKS, is_streamed_name
from worldmodel.lingbot.transformer import LingBotTransformer, kv_geometry
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.offload_settings import OffloadSettings
from worldmodel.wan.captured import GRAPH_BASE_BYTES
from worldmodel.wan.layers import PATCH
from worldmodel.wan.precision import FLOAT32_BYTES, PrecisionPlan
from worldmodel.wan.transformer import TIME_ROWS
from worldmodel.wan.vae import WanVAE

MAX_BASES = 2
"""Camera bases kept: one for the default intrinsics, one for those of a trajectory."""

VAE_ACTIVATIONS = 5
"""Activations of the VAE's widest units that are alive at once: the input, three stacked taps of it, and the output.

When the inputs of the stage and of the second convolution were kept as well, 7 in all, a device was seen to need 6.98.
"""

VAE_HISTORY_FRAMES = 2
"""Frames of a layer's history that are read while the next history is there already."""

LAYER_ACTIVATIONS = 12
"""Streams of the model's width that a layer holds at once, beside the hidden ones of its feed-forward; an estimate."""

NUM_TIMESTEPS = 5
"""The steps and the commit, whose constants graphs hold packed."""

ROTATION_ELEMENTS = 9
"""Of a camera basis, the part that differs from token to token."""


def num_camera_bases(plan: PrecisionPlan) -> int:
    """Return how many camera bases a worker keeps: none where rays are rounded, since a basis cannot show that."""
    return 0 if plan.rounds_as_official else MAX_BASES


def configured_kv(
    config: TransformerConfig,
    vae: WanVAE,
    plan: PrecisionPlan,
    *,
    width: int,
    height: int,
    options: LingBotOptions,
    offload: OffloadSettings,
    requested_sessions: int = 1,
    is_captured: bool = False,
) -> KVSpec:
    """Return what `plan_kv` does for a configuration: whoever asks for one of a worker's, a worker too, asks here.

    `is_captured` is found out at load.
    """
    return plan_kv(
        config,
        vae,
        plan,
        width=width,
        height=height,
        requested_sessions=requested_sessions,
        recache_on_prompt=options.recache_on_prompt,
        noise_clip_latent_frames=options.noise_clip_latent_frames or 0,
        keeps_camera=offload.camera_modulation == "per_chunk",
        decodes_whole_chunks=offload.decode == "whole_chunk",
        parks_vae=offload.vae == "parked",
        is_captured=is_captured,
    )


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
    parks_vae: bool = False,
    is_captured: bool = False,
) -> KVSpec:
    """Return the K/V geometry at one picture size, with the bytes of a session and of the worker.

    `vae` may be on the meta device. A worker that does not keep the camera's scales and shifts has those of one layer
    at a time; one that does not decode whole chunks decodes and encodes one latent frame at a time; one that parks the
    VAE has its weights on the device while it works. `is_captured`: forwards are captured in graphs.
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
            latent_frames_at_once=config.latent_frames_per_chunk if decodes_whole_chunks else 1,
            parks_vae=parks_vae,
        ),
    )
    if is_captured:
        graph_bytes = _graph_bytes(config, plan, spec, num_camera_layers=config.num_layers if keeps_camera else 0)
        spec = replace(spec, worker_owned_bytes=spec.worker_owned_bytes + graph_bytes)
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
    latent_frames_at_once: int,
    parks_vae: bool,
) -> int:
    """Count the camera bases, the VAE caches of the chunk in flight, then the larger of denoising and the VAE's work.

    One chunk is in flight at a time, whoever owns it. Denoising holds camera scale and shift of layers for one
    chunk and the streams of a layer, the VAE its widest activations: they follow each other. Encoding is as wide
    as decoding, both are at the size of the picture.
    """
    factor = vae.config.spatial_factor
    tokens_per_frame = math.prod((height // factor // PATCH, width // factor // PATCH))
    frames = config.latent_frames_per_chunk
    stream_bytes = frames * tokens_per_frame * config.width * plan.linear.itemsize
    denoise_bytes = 2 * num_camera_layers * stream_bytes + _layer_bytes(config, plan, frames * tokens_per_frame)
    bases_bytes = num_camera_bases(plan) * ROTATION_ELEMENTS * tokens_per_frame * config.width * FLOAT32_BYTES
    media_frames = vae.config.temporal_factor * latent_frames_at_once
    widest = max(vae.config.decoder_base_dim, vae.config.base_dim)
    frame_bytes = widest * height * width * plan.vae.itemsize
    vae_bytes = (VAE_ACTIVATIONS * media_frames + VAE_HISTORY_FRAMES) * frame_bytes
    if parks_vae:
        vae_bytes += sum(parameter.numel() for parameter in vae.parameters()) * plan.vae.itemsize
    in_flight_bytes = vae.cache_bytes(height, width, plan.vae)
    return bases_bytes + in_flight_bytes + max(denoise_bytes, vae_bytes)


def _layer_bytes(config: TransformerConfig, plan: PrecisionPlan, num_tokens: int) -> int:
    """Count what a layer holds while it runs."""
    return num_tokens * (LAYER_ACTIVATIONS * config.width + 2 * config.ffn_dim) * plan.linear.itemsize


def _graph_bytes(config: TransformerConfig, plan: PrecisionPlan, spec: KVSpec, *, num_camera_layers: int) -> int:
    """Count what graphs hold: the inputs of a chunk at their own place, a layer's streams, and constants.

    No other memory serves them, so that the inputs don't make room for the VAE's work any more. The constants are those
    of every timestep, and the places of both graphs that they are copied to.
    """
    num_tokens = config.latent_frames_per_chunk * spec.tokens_per_latent_frame
    condition = (config.in_channels - config.out_channels) * PATCH * PATCH
    token_bytes = ((2 * num_camera_layers + 1) * config.width + condition) * plan.linear.itemsize
    token_bytes += config.head_dim // 2 * plan.rope.itemsize
    constants = (NUM_TIMESTEPS + 2) * TIME_ROWS * config.num_layers * config.width * FLOAT32_BYTES
    return GRAPH_BASE_BYTES + num_tokens * token_bytes + _layer_bytes(config, plan, num_tokens) + constants


def outside_bytes(transformer: LingBotTransformer, vae: WanVAE, plan: PrecisionPlan, *, parks_vae: bool) -> int:
    """Count the weights that a device holds beside streamed layers; modules may be on the meta device.

    The networks of the time path are not among them: they run once, at load.
    """
    total = 0
    for name, parameter in transformer.named_parameters():
        if not (is_streamed_name(name) or name.startswith(TIME_NETWORKS)):
            total += parameter.numel() * (FLOAT32_BYTES if _is_float32(name) else plan.linear.itemsize)
    return total if parks_vae else total + sum(each.numel() for each in vae.parameters()) * plan.vae.itemsize


def _is_float32(name: str) -> bool:
    """Tell what `apply_precision` keeps in float32 in every plan."""
    return name.startswith("head.") or ".norm3." in name or name.endswith(".modulation")
