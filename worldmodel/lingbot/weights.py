"""Load a LingBot-World v2 checkpoint, of either layout or random, onto its device and into its number formats.

`empty_model.py` has found everything that does not fit before the first tensor is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from worldmodel.adapter import ProgressFn
from worldmodel.checkpoint.component import Component
from worldmodel.checkpoint.loading import Progress
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import build_empty, check_fit, open_any
from worldmodel.lingbot.layer_parts import is_streamed_name
from worldmodel.lingbot.streamed_layers import LayerSource
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.messages import LoadStage
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.text_encoder import TextEncoder, load_text_encoder, load_tokenizer
from worldmodel.wan.vae import WanVAE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """Everything of a checkpoint that is needed to serve, on its device and in its number formats.

    With a `layer_source` the linears of the transformer's layers are not loaded yet; they come from there.
    """

    transformer: LingBotTransformer
    vae: WanVAE
    text_encoder: TextEncoder
    flow_shift: float
    digest: str
    num_parameters: int
    layer_source: LayerSource | None = None


def load_model(
    folder: Path | str,
    options: LingBotOptions,
    plan: PrecisionPlan,
    device: torch.device,
    progress: ProgressFn,
    *,
    streams_layers: bool = False,
    check: Callable[[TransformerConfig], None] | None = None,
) -> LoadedModel:
    """Load all parts of a checkpoint, telling `progress` about each; with `streams_layers` all but the layers' linears.

    `check` may refuse the network before any weights are read.

    Raises:
        LoadFailed: for a checkpoint that is damaged, of another model, or at odds with itself or with `options`.
    """
    progress(LoadStage.CHECKPOINT, 0.0, Path(folder).name)
    checkpoint = open_any(folder)
    empty = build_empty(checkpoint, options)
    check_fit(checkpoint, empty)
    if check is not None:
        check(empty.transformer.config)
    tokenizer = load_tokenizer(checkpoint, empty.text_encoder.config.vocab_size)
    digest = checkpoint.digest
    progress(LoadStage.CHECKPOINT, 1.0, "")
    component = checkpoint.component("transformer")
    transformer = _load_transformer(
        component, empty.transformer, plan, device, _at(LoadStage.TRANSFORMER, progress), streams_layers=streams_layers
    )
    vae = _load_vae(checkpoint.component("vae"), empty.vae, plan, device, _at(LoadStage.VAE, progress))
    text_encoder = load_text_encoder(
        checkpoint,
        text_len=empty.transformer.config.text_rows,
        cleaning=options.text_cleaning,
        dtype=plan.text_encoder,
        device=device,
        placement=options.text_encoder,
        tokenizer=tokenizer,
        progress=_at(LoadStage.TEXT_ENCODER, progress),
    )
    logger.info("text encoder: %s", text_encoder.placement)
    return LoadedModel(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        flow_shift=empty.flow_shift,
        digest=digest,
        num_parameters=_num_parameters(transformer) + _num_parameters(vae) + text_encoder.num_parameters,
        layer_source=LayerSource(component=component, device=device) if streams_layers else None,
    )


def _at(stage: LoadStage, progress: ProgressFn) -> Progress:
    """Report a stage, and log what it took in the end: where there is no terminal nobody sees the rate otherwise."""

    def report(fraction: float, detail: str) -> None:
        progress(stage, fraction, detail)
        if fraction == 1.0:
            logger.info("%s: %s", stage, detail)

    return report


def _load_transformer(
    component: Component,
    empty: LingBotTransformer,
    plan: PrecisionPlan,
    device: torch.device,
    progress: Progress,
    *,
    streams_layers: bool,
) -> LingBotTransformer:
    only = (lambda name: not is_streamed_name(name)) if streams_layers else None
    component.load_into(empty, dtype=plan.linear, device=device, progress=progress, only=only)
    empty.apply_precision(plan)
    return empty.eval()


def _load_vae(
    component: Component, empty: WanVAE, plan: PrecisionPlan, device: torch.device, progress: Progress
) -> WanVAE:
    component.load_into(empty, dtype=plan.vae, device=device, progress=progress)
    empty.fold_weights()
    return empty.eval()


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
