"""A checkpoint opened, checked against itself and the options, and laid out as modules without memory.

Everything that can be wrong is found here, before the first byte of a weight is read; nothing is guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from worldmodel.checkpoint.component import Checkpoint, Component
from worldmodel.checkpoint.config_values import number, shown
from worldmodel.checkpoint.diffusers import Checkpoint as DiffusersCheckpoint
from worldmodel.checkpoint.diffusers import open_checkpoint
from worldmodel.checkpoint.errors import CheckpointError, findings_of, log_whole, naming
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.random_checkpoint import RandomCheckpoint, RandomComponent, is_random, parse_random
from worldmodel.errors import LoadFailed
from worldmodel.json_checks import describe
from worldmodel.lingbot.camera import PACK
from worldmodel.lingbot.config import MAX_FLOW_SHIFT, MIN_FLOW_SHIFT, LingBotOptions
from worldmodel.lingbot.original_layout import OriginalCheckpoint, is_original_layout
from worldmodel.lingbot.published import (
    PIPELINE_CLASS,
    RANDOM_GAINS,
    TEXT_ENCODER_CLASS,
    TRANSFORMER_CLASS,
    VAE_CLASS,
    published_model,
)
from worldmodel.lingbot.trajectory import MEDIA_FRAMES_PER_LATENT_FRAME
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig, read_transformer_config
from worldmodel.wan.flow_scheduler import NUM_TRAIN_TIMESTEPS
from worldmodel.wan.text_encoder import empty_text_encoder, find_tokenizer_problems
from worldmodel.wan.umt5 import UMT5Encoder
from worldmodel.wan.vae import WanVAE

logger = logging.getLogger(__name__)

BuiltT = TypeVar("BuiltT")

SCHEDULER_FACTS = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_dynamic_shifting": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "num_train_timesteps": NUM_TRAIN_TIMESTEPS,
}
"""What the sampler takes for granted; a scheduler that says otherwise is of another kind of model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmptyModel:
    """The modules of a checkpoint without their weights, and what the options made of its settings."""

    transformer: LingBotTransformer
    vae: WanVAE
    text_encoder: UMT5Encoder
    flow_shift: float

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by the names of their components."""
        return {"transformer": self.transformer, "vae": self.vae, "text_encoder": self.text_encoder}


def open_any(checkpoint: Path | str) -> Checkpoint:
    """Open a checkpoint folder of either layout, or `random:NAME[:SEED]` for weights that are made up.

    Raises `LoadFailed`.
    """
    if not is_random(checkpoint):
        folder = Path(checkpoint)
        with naming(folder, "read"):
            return OriginalCheckpoint(folder) if is_original_layout(folder) else open_checkpoint(folder)
    made_up = random_checkpoint(*parse_random(checkpoint))
    logger.warning("%s: RANDOM WEIGHTS, for benchmarks only: pictures will mean nothing", checkpoint)
    return made_up


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
    """Build all modules, from headers and configs alone.

    Raises `LoadFailed` for a part that cannot be built or is at odds with another. Where that is not all that is wrong,
    it has the other parts' problems too.
    """
    failures: list[LoadFailed] = []

    def attempt(build: Callable[[], BuiltT]) -> BuiltT | None:
        try:
            return build()
        except LoadFailed as error:
            failures.append(error)
            return None

    attempt(lambda: _check_index(checkpoint))
    transformer = attempt(lambda: _empty_transformer(checkpoint, options))
    vae = attempt(lambda: _empty_vae(checkpoint))
    text_encoder = attempt(lambda: empty_text_encoder(checkpoint.component("text_encoder")))
    flow_shift = attempt(lambda: _flow_shift(checkpoint, options))
    if transformer is not None and vae is not None:
        attempt(lambda: _check_vae(vae, transformer.config))
    if transformer is not None and text_encoder is not None:
        attempt(lambda: _check_text_width(text_encoder, transformer.config))
    if failures or transformer is None or vae is None or text_encoder is None or flow_shift is None:
        raise _all_of(failures, checkpoint, {"transformer": transformer, "vae": vae, "text_encoder": text_encoder})
    return EmptyModel(transformer=transformer, vae=vae, text_encoder=text_encoder, flow_shift=flow_shift)


def _all_of(
    failures: Sequence[LoadFailed], checkpoint: Checkpoint, modules: Mapping[str, nn.Module | None]
) -> LoadFailed:
    """Return one error for failures and for what is wrong besides with the modules that could be built."""
    others = _problems(checkpoint, {name: module for name, module in modules.items() if module is not None})
    if len(failures) == 1 and not others:
        return failures[0]
    first = [finding for error in failures for finding in findings_of(error)]
    return CheckpointError(checkpoint.name, *first, *others, field=failures[0].field)


def check_fit(checkpoint: Checkpoint, empty: EmptyModel) -> None:
    """Compare all components with the modules. Raises `CheckpointError` with all findings at once.

    The tokens are left to `load_tokenizer`, which a load calls next: loading a tokenizer takes seconds.
    """
    problems = _problems(checkpoint, empty.modules, counts_tokens=False)
    if problems:
        log_whole(problems)
        raise CheckpointError(checkpoint.name, *problems)


def find_problems(checkpoint: Checkpoint, empty: EmptyModel) -> tuple[Problem, ...]:
    """Say what does not fit the modules, cannot be read or is not there, component by component."""
    return _problems(checkpoint, empty.modules)


def _problems(
    checkpoint: Checkpoint, modules: Mapping[str, nn.Module], *, counts_tokens: bool = True
) -> tuple[Problem, ...]:
    """Look through every component, whatever is wrong with those before it."""
    found: list[Problem] = []
    for name, module in modules.items():
        found += [problem.of(name) for problem in _misfits(checkpoint, name, module)]
    text_encoder = modules.get("text_encoder")
    vocab_size = None
    if counts_tokens and isinstance(text_encoder, UMT5Encoder):
        vocab_size = text_encoder.config.vocab_size
    found += [problem.of("tokenizer") for problem in _tokenizer_problems(checkpoint, vocab_size)]
    return tuple(found)


def _misfits(checkpoint: Checkpoint, name: str, module: nn.Module) -> tuple[Problem, ...]:
    try:
        return checkpoint.component(name).misfits(module)
    except CheckpointError as error:
        return error.findings


def _tokenizer_problems(checkpoint: Checkpoint, vocab_size: int | None) -> tuple[Problem, ...]:
    try:
        problems = find_tokenizer_problems(checkpoint.component("tokenizer"), vocab_size)
        return tuple(Problem(text=text) for text in problems)
    except CheckpointError as error:
        return error.findings


def _check_index(checkpoint: Checkpoint) -> None:
    """Refuse a `model_index.json` of another kind of model, or of one with a second transformer for some timesteps.

    Other layouts have no such file.
    """
    if not isinstance(checkpoint, DiffusersCheckpoint):
        return
    pipeline = checkpoint.index.get("_class_name", PIPELINE_CLASS)
    second = checkpoint.index.get("transformer_2")
    problems: list[str] = []
    if pipeline != PIPELINE_CLASS:
        problems.append(f"model_index.json: _class_name must be {shown(PIPELINE_CLASS)}, got {shown(pipeline)}")
    if second not in (None, [None, None]):
        problems.append(
            f"model_index.json: transformer_2 must be null, as the model has one transformer, got {shown(second)}"
        )
    if problems:
        raise CheckpointError(checkpoint.name, *problems)


def _component(checkpoint: Checkpoint, name: str, class_name: str) -> Component:
    """Return a component. Raises `LoadFailed` if the index or its own config says that it is of another class."""
    reader = checkpoint.component(name)
    if reader.class_name != class_name:
        raise LoadFailed(f"{name} must be a {class_name}, the checkpoint has a {reader.class_name}", field=name)
    said = reader.config.get("_class_name", class_name)
    if said != class_name:
        raise LoadFailed(f"{name} config: _class_name must be {shown(class_name)}, got {shown(said)}", field=name)
    return reader


def _empty_transformer(checkpoint: Checkpoint, options: LingBotOptions) -> LingBotTransformer:
    config = _transformer_config(checkpoint, options)
    with torch.device("meta"):
        return LingBotTransformer(config)


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
    per_chunk = options.latent_frames_per_chunk or config.latent_frames_per_chunk
    if visible is not None and visible < sink + per_chunk:
        raise LoadFailed(
            f"visible_latent_frames = {visible} must hold the sink and one chunk: sink_latent_frames = {sink} and "
            f"latent_frames_per_chunk = {per_chunk}. What [model.options] does not set is the checkpoint's",
            field=_window_field(options),
        )
    return replace(
        config,
        latent_frames_per_chunk=per_chunk,
        sink_latent_frames=sink,
        window_latent_frames=None if visible is None else visible - sink,
    )


def _window_field(options: LingBotOptions) -> str:
    """Name the option that is to blame for a window too small: one that was given."""
    names = ("visible_latent_frames", "latent_frames_per_chunk", "sink_latent_frames")
    return next((name for name in names if getattr(options, name) is not None), names[0])


def _flow_shift(checkpoint: Checkpoint, options: LingBotOptions) -> float:
    """Check that the scheduler is one of flow matching, whoever gives the shift, and return the shift in force."""
    config = checkpoint.component("scheduler").config
    for key, expected in SCHEDULER_FACTS.items():
        if config.get(key, expected) != expected:
            raise LoadFailed(
                f"scheduler config: {key} must be {describe(expected)}, got {describe(config[key])}", field="scheduler"
            )
    if options.flow_shift is not None:
        return options.flow_shift
    try:
        return number(
            config.get("flow_shift"), "scheduler config: flow_shift", minimum=MIN_FLOW_SHIFT, maximum=MAX_FLOW_SHIFT
        )
    except ValueError as error:
        raise LoadFailed(str(error), field="flow_shift") from error


def _empty_vae(checkpoint: Checkpoint) -> WanVAE:
    component = _component(checkpoint, "vae", VAE_CLASS)
    try:
        with torch.device("meta"):
            vae = WanVAE.from_config(component.config)
    except ValueError as error:
        raise LoadFailed(str(error), field="vae") from error
    # No checkpoint stores these as tensors.
    vae.latents_mean, vae.latents_std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return vae


def _check_text_width(text_encoder: UMT5Encoder, config: TransformerConfig) -> None:
    if text_encoder.config.d_model != config.text_dim:
        raise LoadFailed(
            f"text_dim of the transformer is {config.text_dim}, but the text encoder's d_model is "
            f"{text_encoder.config.d_model}",
            field="text_dim",
        )


def _check_vae(vae: WanVAE, config: TransformerConfig) -> None:
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
    if vae.config.temporal_factor != MEDIA_FRAMES_PER_LATENT_FRAME:
        raise LoadFailed(
            f"the VAE must give {MEDIA_FRAMES_PER_LATENT_FRAME} media frames for each latent frame but the first, as "
            f"camera paths and clips count them, temperal_downsample gives {vae.config.temporal_factor}",
            field="temperal_downsample",
        )
