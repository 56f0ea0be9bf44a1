"""Load a DreamZero checkpoint and check that its parts fit together.

Headers and settings are checked first, so that everything that does not fit is named in one error before 45 GB are
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from worldmodel.adapter import ProgressFn
from worldmodel.checkpoint.errors import CheckpointError, log_whole
from worldmodel.checkpoint.inspection import num_parameters
from worldmodel.checkpoint.loading import Progress
from worldmodel.checkpoint.problems import Problem
from worldmodel.dreamzero.checkpoint import (
    IMAGE_ENCODER,
    TEXT_ENCODER,
    TOKENIZER,
    TRANSFORMER,
    VAE,
    DreamZeroCheckpoint,
    open_checkpoint,
)
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.embodiments import embodiment
from worldmodel.dreamzero.image_encoder import ImageEncoder
from worldmodel.dreamzero.lora import merge_lora
from worldmodel.dreamzero.observation_vae import ObservationVAE
from worldmodel.dreamzero.prompts import Encoder
from worldmodel.dreamzero.robot import Robot, read_robot
from worldmodel.dreamzero.sizes import Sizes
from worldmodel.dreamzero.transformer import DreamZeroTransformer
from worldmodel.dreamzero.wide_vae import WideObservationVAE
from worldmodel.messages import LoadStage
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.text_names import TextCleaning
from worldmodel.wan.umt5 import UMT5Encoder, parse_umt5_config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """Everything of a checkpoint that is needed to serve, on its device and in its number formats.

    `view_size` is (height, width) of a camera's view in the training run, None if the checkpoint does not say.
    """

    sizes: Sizes
    robot: Robot
    view_size: tuple[int, int] | None
    transformer: DreamZeroTransformer
    vae: ObservationVAE
    image_encoder: ImageEncoder
    text_encoder: Encoder
    digest: str
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmptyModules:
    """The modules on the meta device, by component."""

    transformer: DreamZeroTransformer
    vae: ObservationVAE
    image_encoder: ImageEncoder
    text_encoder: UMT5Encoder

    def by_component(self) -> dict[str, nn.Module]:
        return {
            TRANSFORMER: self.transformer,
            VAE: self.vae,
            IMAGE_ENCODER: self.image_encoder,
            TEXT_ENCODER: self.text_encoder,
        }


def load_model(
    path: str,
    options: DreamZeroOptions,
    plan: PrecisionPlan,
    device: torch.device,
    progress: ProgressFn,
    *,
    check: Callable[[DreamZeroCheckpoint, EmptyModules], None] | None = None,
) -> LoadedModel:
    """Load all parts of a checkpoint, telling `progress` about each.

    `check` may refuse the checkpoint before any weights are read.

    Raises:
        LoadFailed: for a checkpoint that is damaged, of another model, or at odds with itself or with `options`; it
            names everything found.
    """
    # Imported here, so that a model made without a checkpoint needs no tokenizer library.
    from worldmodel.wan.text_encoder import load_text_encoder, load_tokenizer

    progress(LoadStage.CHECKPOINT, 0.0, "")
    checkpoint, robot = read_checkpoint(path, options)
    modules = empty_modules(checkpoint.sizes)
    check_parts(checkpoint, modules)
    if check is not None:
        check(checkpoint, modules)
    tokenizer = load_tokenizer(checkpoint, modules.text_encoder.config.vocab_size)
    progress(LoadStage.CHECKPOINT, 1.0, "")
    transformer = _load_transformer(checkpoint, modules.transformer, plan, device, progress)
    vae, image_encoder = modules.vae, modules.image_encoder
    checkpoint.component(VAE).load_into(
        vae, dtype=plan.vae, device=device, progress=_share(LoadStage.VAE, progress, 0.0, 0.5)
    )
    vae.fold_weights()
    checkpoint.component(IMAGE_ENCODER).load_into(
        image_encoder, dtype=plan.linear, device=device, progress=_share(LoadStage.VAE, progress, 0.5, 1.0)
    )
    text_encoder = load_text_encoder(
        checkpoint,
        text_len=checkpoint.sizes.transformer.text_rows,
        cleaning=TextCleaning.OFFICIAL,
        dtype=plan.text_encoder,
        device=device,
        tokenizer=tokenizer,
        progress=_share(LoadStage.TEXT_ENCODER, progress, 0.0, 1.0),
    )
    return LoadedModel(
        sizes=checkpoint.sizes,
        robot=robot,
        view_size=checkpoint.training.view_size,
        transformer=transformer,
        vae=vae.eval(),
        image_encoder=image_encoder.requires_grad_(False).eval(),
        text_encoder=text_encoder,
        digest=checkpoint.digest,
        num_parameters=sum(map(num_parameters, (transformer, vae, image_encoder))) + text_encoder.num_parameters,
    )


def read_checkpoint(path: str, options: DreamZeroOptions) -> tuple[DreamZeroCheckpoint, Robot]:
    """Read settings and headers of a checkpoint. Raises `CheckpointError` with everything that does not fit."""
    problems: list[str] = []
    entry = embodiment(options.embodiment)
    checkpoint = open_checkpoint(path, tag=entry.tag, tokenizer=options.tokenizer, problems=problems)
    config = checkpoint.sizes.transformer
    robot = read_robot(
        checkpoint.metadata,
        checkpoint.training,
        entry,
        state_width=config.state_dim,
        action_width=config.action_dim,
        action_rows=config.actions_per_chunk,
        problems=problems,
        cameras=options.cameras,
    )
    modules = empty_modules(checkpoint.sizes)
    if problems or robot is None:
        raise CheckpointError(checkpoint.name, *problems, *part_problems(checkpoint, modules))
    return checkpoint, robot


def empty_modules(sizes: Sizes) -> EmptyModules:
    """Build the modules of a checkpoint on the meta device."""
    with torch.device("meta"):
        transformer = DreamZeroTransformer(sizes.transformer)
        image_encoder = ImageEncoder(sizes.image_encoder)
        text_encoder = UMT5Encoder(parse_umt5_config(sizes.text_encoder))
    # Statistics of the latents are no weights: they need values from the start.
    vae_class = WideObservationVAE if sizes.wide_vae else ObservationVAE
    return EmptyModules(
        transformer=transformer, vae=vae_class(sizes.vae), image_encoder=image_encoder, text_encoder=text_encoder
    )


def _load_transformer(
    checkpoint: DreamZeroCheckpoint,
    transformer: DreamZeroTransformer,
    plan: PrecisionPlan,
    device: torch.device,
    progress: ProgressFn,
) -> DreamZeroTransformer:
    checkpoint.component(TRANSFORMER).load_into(
        transformer, dtype=plan.linear, device=device, progress=_share(LoadStage.TRANSFORMER, progress, 0.0, 1.0)
    )
    merge_lora(transformer, checkpoint.lora)
    transformer.apply_precision(plan)
    return transformer.eval()


def _share(stage: LoadStage, progress: ProgressFn, start: float, end: float) -> Progress:
    return lambda fraction, detail: progress(stage, start + fraction * (end - start), detail)


def check_parts(checkpoint: DreamZeroCheckpoint, modules: EmptyModules) -> None:
    """Compare names and shapes of all tensors and look at the tokenizer. Raises `CheckpointError` with all findings.

    The tokens are left to `load_tokenizer`, which a load calls next: loading a tokenizer takes seconds.
    """
    problems = part_problems(checkpoint, modules, counts_tokens=False)
    if problems:
        log_whole(problems)
        raise CheckpointError(checkpoint.name, *problems)


def part_problems(
    checkpoint: DreamZeroCheckpoint, modules: EmptyModules, *, counts_tokens: bool = True
) -> list[Problem]:
    """Compare names and shapes of all components with their modules, and look at the tokenizer."""
    problems = [
        problem.of(name)
        for name, module in modules.by_component().items()
        for problem in checkpoint.component(name).misfits(module)
    ]
    vocab_size = modules.text_encoder.config.vocab_size if counts_tokens else None
    return [*problems, *(Problem(text=text) for text in _tokenizer_problems(checkpoint, vocab_size))]


def _tokenizer_problems(checkpoint: DreamZeroCheckpoint, vocab_size: int | None) -> list[str]:
    # Imported here for the reason that `load_model` gives.
    from worldmodel.wan.text_encoder import find_tokenizer_problems

    try:
        problems = find_tokenizer_problems(checkpoint.component(TOKENIZER), vocab_size)
        return [f"tokenizer: {problem}" for problem in problems]
    except CheckpointError as error:
        return [error.message]
