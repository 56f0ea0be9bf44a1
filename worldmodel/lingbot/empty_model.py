"""A checkpoint opened, checked against itself and the options, and laid out as modules without memory.

Everything that can be wrong is found here, before the first byte of a weight is read; nothing is guessed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from worldmodel.checkpoint.component import Checkpoint, Component
from worldmodel.checkpoint.config_values import number
from worldmodel.checkpoint.diffusers import open_checkpoint
from worldmodel.checkpoint.errors import CheckpointError, naming
from worldmodel.checkpoint.random_checkpoint import RandomCheckpoint, RandomComponent, is_random, parse_random
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.camera import PACK
from worldmodel.lingbot.config import MAX_FLOW_SHIFT, MIN_FLOW_SHIFT, LingBotOptions
from worldmodel.lingbot.original_layout import is_original_layout, open_original
from worldmodel.lingbot.published import (
    RANDOM_GAINS,
    TEXT_ENCODER_CLASS,
    TRANSFORMER_CLASS,
    VAE_CLASS,
    published_model,
)
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig, read_transformer_config
from worldmodel.wan.text_encoder import empty_text_encoder, find_tokenizer_problems
from worldmodel.wan.umt5 import UMT5Encoder
from worldmodel.wan.vae import WanVAE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmptyModel:
    """The modules of a checkpoint without their weights, and what the options made of its settings."""

    transformer: LingBotTransformer
    vae: WanVAE
    text_encoder: UMT5Encoder
    flow_shift: float


def open_any(checkpoint: Path | str) -> Checkpoint:
    """Open a checkpoint folder of either layout, or `random:NAME[:SEED]` for weights that are made up.

    Raises `LoadFailed`.
    """
    if not is_random(checkpoint):
        folder = Path(checkpoint)
        with naming(folder, "read"):
            return open_original(folder) if is_original_layout(folder) else open_checkpoint(folder)
    logger.warning("%s: RANDOM WEIGHTS, for benchmarks only: pictures will mean nothing", checkpoint)
    return random_checkpoint(*parse_random(checkpoint))


def random_checkpoint(name: str, seed: int) -> RandomCheckpoint:
    """Return a published model with random weights and the byte tokenizer. Raises `LoadFailed` for an unknown name."""
    try:
        model = published_model(name)
    except ValueError as error:
        raise LoadFailed(f"checkpoint: {error}", field="checkpoint") from error
    parts = {
        "transformer": (TRANSFORMER_CLASS, model.transformer),
        "vae": (VAE_CLASS, model.vae),
        "text_encoder": (TEXT_ENCODER_CLASS, model.text_encoder),
        "tokenizer": (model.tokenizer_class, {}),
        "scheduler": ("UniPCMultistepScheduler", model.scheduler),
    }
    components = {
        part: RandomComponent(
            subject=f"{name}: {part}",
            class_name=class_name,
            config=config,
            gains=RANDOM_GAINS.get(part, {}),
            seed=seed,
        )
        for part, (class_name, config) in parts.items()
    }
    return RandomCheckpoint(name, seed, components)


def build_empty(checkpoint: Checkpoint, options: LingBotOptions) -> EmptyModel:
    """Build all modules from the configs alone. Raises `LoadFailed` for parts that are at odds with each other."""
    config = _transformer_config(checkpoint, options)
    vae = _empty_vae(checkpoint, config)
    text_encoder = empty_text_encoder(checkpoint.component("text_encoder"))
    if text_encoder.config.d_model != config.text_dim:
        raise LoadFailed(
            f"text_dim of the transformer is {config.text_dim}, but the text encoder's d_model is "
            f"{text_encoder.config.d_model}",
            field="text_dim",
        )
    with torch.device("meta"):
        transformer = LingBotTransformer(config)
    flow_shift = options.flow_shift if options.flow_shift is not None else _flow_shift(checkpoint)
    return EmptyModel(transformer=transformer, vae=vae, text_encoder=text_encoder, flow_shift=flow_shift)


def check_fit(checkpoint: Checkpoint, empty: EmptyModel) -> None:
    """Compare all components with the modules. Raises `CheckpointError` with all findings at once."""
    problems = find_problems(checkpoint, empty)
    if problems:
        raise CheckpointError(checkpoint.name, *problems)


def find_problems(checkpoint: Checkpoint, empty: EmptyModel) -> tuple[str, ...]:
    """Say what does not fit the modules or is not there, component by component."""
    modules = {"transformer": empty.transformer, "vae": empty.vae, "text_encoder": empty.text_encoder}
    found = {name: checkpoint.component(name).misfits(module) for name, module in modules.items()}
    found["tokenizer"] = find_tokenizer_problems(checkpoint.component("tokenizer"))
    return tuple(f"{name}: {problem}" for name, sentences in found.items() for problem in sentences)


def _component(checkpoint: Checkpoint, name: str, class_name: str) -> Component:
    reader = checkpoint.component(name)
    if reader.class_name != class_name:
        raise LoadFailed(f"{name} must be a {class_name}, the checkpoint has a {reader.class_name}", field=name)
    return reader


def _transformer_config(checkpoint: Checkpoint, options: LingBotOptions) -> TransformerConfig:
    content = _component(checkpoint, "transformer", TRANSFORMER_CLASS).config
    try:
        config = read_transformer_config(content)
    except ValueError as error:
        raise LoadFailed(f"transformer config: {error}", field="transformer") from error
    sink = config.sink_latent_frames
    visible = None if config.window_latent_frames is None else sink + config.window_latent_frames
    if options.visible_latent_frames is not None:
        visible = options.visible_latent_frames
    if options.sink_latent_frames is not None:
        sink = options.sink_latent_frames
    try:
        return replace(
            config,
            latent_frames_per_chunk=options.latent_frames_per_chunk or config.latent_frames_per_chunk,
            sink_latent_frames=sink,
            window_latent_frames=None if visible is None else visible - sink,
        )
    except ValueError as error:
        raise LoadFailed(f"window options do not fit the checkpoint: {error}", field="visible_latent_frames") from error


def _flow_shift(checkpoint: Checkpoint) -> float:
    value = checkpoint.component("scheduler").config.get("flow_shift")
    try:
        return number(value, "scheduler config: flow_shift", minimum=MIN_FLOW_SHIFT, maximum=MAX_FLOW_SHIFT)
    except ValueError as error:
        raise LoadFailed(str(error), field="flow_shift") from error


def _empty_vae(checkpoint: Checkpoint, config: TransformerConfig) -> WanVAE:
    component = _component(checkpoint, "vae", VAE_CLASS)
    try:
        with torch.device("meta"):
            vae = WanVAE.from_config(component.config)
    except ValueError as error:
        raise LoadFailed(str(error), field="vae") from error
    # No checkpoint stores these as tensors.
    vae.latents_mean, vae.latents_std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    if vae.config.z_dim != config.out_channels:
        raise LoadFailed(
            f"z_dim of the VAE is {vae.config.z_dim}, but out_channels of the transformer is {config.out_channels}",
            field="z_dim",
        )
    if vae.config.spatial_factor != PACK:
        raise LoadFailed(
            f"the VAE must shrink pictures {PACK} times as camera rays are packed, dim_mult gives "
            f"{vae.config.spatial_factor}",
            field="dim_mult",
        )
    return vae
