"""Load a LingBot-World v2 checkpoint, of either layout or random, and check that its parts fit together.

Whatever does not fit stops the start with the name of the setting; nothing is guessed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from worldmodel.adapter import ProgressFn
from worldmodel.checkpoint.component import Checkpoint, Component
from worldmodel.checkpoint.diffusers import open_checkpoint
from worldmodel.checkpoint.loading import Progress
from worldmodel.checkpoint.random_checkpoint import RandomCheckpoint, RandomComponent, is_random, parse_random
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.camera import PACK
from worldmodel.lingbot.config import LingBotOptions
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
from worldmodel.messages import LoadStage
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.text_encoder import TextCleaning, TextEncoder, load_text_encoder
from worldmodel.wan.vae import WanVAE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """Everything of a checkpoint that is needed to serve, on its device and in its number formats."""

    transformer: LingBotTransformer
    vae: WanVAE
    text_encoder: TextEncoder
    flow_shift: float
    digest: str
    num_parameters: int


def load_model(
    folder: Path | str, options: LingBotOptions, plan: PrecisionPlan, device: torch.device, progress: ProgressFn
) -> LoadedModel:
    """Load all parts of a checkpoint, telling `progress` about each.

    Raises:
        LoadFailed: for a checkpoint that is damaged, of another model, or at odds with itself or with `options`.
    """
    progress(LoadStage.CHECKPOINT, 0.0, Path(folder).name)
    checkpoint = open_any(folder)
    config = _transformer_config(checkpoint, options)
    flow_shift = options.flow_shift if options.flow_shift is not None else _flow_shift(checkpoint)
    digest = checkpoint.digest
    progress(LoadStage.CHECKPOINT, 1.0, "")
    transformer = _load_transformer(checkpoint, config, plan, device, _at(LoadStage.TRANSFORMER, progress))
    vae = _load_vae(checkpoint, config, plan, device, _at(LoadStage.VAE, progress))
    text_encoder = load_text_encoder(
        checkpoint,
        text_len=config.text_rows,
        cleaning=TextCleaning(options.text_cleaning.value),
        dtype=plan.text_encoder,
        device=device,
        progress=_at(LoadStage.TEXT_ENCODER, progress),
    )
    if text_encoder.width != config.text_dim:
        raise LoadFailed(
            f"text_dim of the transformer is {config.text_dim}, but the text encoder's d_model is {text_encoder.width}",
            field="text_dim",
        )
    return LoadedModel(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        flow_shift=flow_shift,
        digest=digest,
        num_parameters=_num_parameters(transformer) + _num_parameters(vae) + text_encoder.num_parameters,
    )


def open_any(checkpoint: Path | str) -> Checkpoint:
    """Open a checkpoint folder of either layout, or `random:NAME[:SEED]` for weights that are made up.

    Raises `LoadFailed`.
    """
    if not is_random(checkpoint):
        folder = Path(checkpoint)
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


def _at(stage: LoadStage, progress: ProgressFn) -> Progress:
    return lambda fraction, detail: progress(stage, fraction, detail)


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
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise LoadFailed(f"scheduler config: flow_shift must be a number above 0, got {value!r}", field="flow_shift")
    return float(value)


def _load_transformer(
    checkpoint: Checkpoint, config: TransformerConfig, plan: PrecisionPlan, device: torch.device, progress: Progress
) -> LingBotTransformer:
    with torch.device("meta"):
        transformer = LingBotTransformer(config)
    reader = checkpoint.component("transformer")
    reader.load_into(transformer, dtype=plan.linear, device=device, progress=progress)
    transformer.apply_precision(plan)
    return transformer.eval()


def _load_vae(
    checkpoint: Checkpoint, config: TransformerConfig, plan: PrecisionPlan, device: torch.device, progress: Progress
) -> WanVAE:
    reader = _component(checkpoint, "vae", VAE_CLASS)
    try:
        vae = WanVAE.from_config(reader.config)
    except ValueError as error:
        raise LoadFailed(str(error), field="vae") from error
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
    reader.load_into(vae, dtype=plan.vae, device=device, progress=progress)
    vae.fold_weights()
    return vae.eval()


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
