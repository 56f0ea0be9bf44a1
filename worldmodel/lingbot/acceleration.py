"""What a LingBot worker computes with: the attention backend, fused operations, float8. Chosen once, at load.

Whatever is chosen is said in `description`, which operators see; a choice by name that can't be had stops the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kvcache.attention import Attention
from kvcache.attention_backends import AttentionBackend, AttentionShape, ChosenAttention, choose_attention
from kvcache.errors import AttentionUnavailable
from kvcache.spec import KVSpec
from worldmodel.errors import LoadFailed
from worldmodel.kernels.choice import OpsChoice, OpsUnavailable, create_ops
from worldmodel.kernels.layer_ops import LayerOps, PlainOps
from worldmodel.lingbot.config import AttentionChoice, LayerOperations, LingBotOptions
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.precision import PrecisionPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceleration:
    """The parts of a worker that have more than one implementation."""

    attention: Attention
    forward: Forward
    description: str


def accelerate(transformer: LingBotTransformer, options: LingBotOptions, kv: KVSpec) -> Acceleration:
    """Choose attention and forward for a loaded transformer and the geometry of its history.

    Raises:
        LoadFailed: naming the option, for a choice that can't run on this device or in this precision.
    """
    plan, device = transformer.plan, transformer.device
    chosen = _choose_attention(options, _attention_shape(transformer.config, plan, device, kv))
    forward, layers = _make_forward(transformer, _choose_ops(options, plan, device))
    if device.type == "cuda":
        warm_up_text(transformer, chosen.attention)
        # Weights that were folded or quantised leave unused memory with the allocator, which sessions need.
        torch.cuda.empty_cache()
    description = f"{chosen.describe()}; layers {layers}"
    logger.info("attention %s", description)
    return Acceleration(attention=chosen.attention, forward=forward, description=description)


def check_choices(
    config: TransformerConfig, options: LingBotOptions, plan: PrecisionPlan, device: torch.device, kv: KVSpec
) -> None:
    """Refuse what `accelerate` would refuse, before there are weights; nothing is timed or allocated.

    What is left to the worker is never refused. `device` must exist. Raises `LoadFailed` naming the option.
    """
    if options.attention is not AttentionChoice.AUTO:
        _choose_attention(options, _attention_shape(config, plan, device, kv))
    if options.layer_operations is not LayerOperations.AUTO:
        _choose_ops(options, plan, device)


def _choose_attention(options: LingBotOptions, shape: AttentionShape) -> ChosenAttention:
    try:
        return choose_attention(AttentionBackend(options.attention.value), shape)
    except AttentionUnavailable as error:
        raise LoadFailed(str(error), field="attention") from error


def _attention_shape(
    config: TransformerConfig, plan: PrecisionPlan, device: torch.device, kv: KVSpec
) -> AttentionShape:
    visible = config.sink_latent_frames + (config.window_latent_frames or config.latent_frames_per_chunk)
    return AttentionShape(
        num_queries=config.latent_frames_per_chunk * kv.tokens_per_latent_frame,
        num_keys=visible * kv.tokens_per_latent_frame,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=plan.kv,
        device=device,
    )


def warm_up_text(transformer: LingBotTransformer, attention: Attention) -> None:
    """Attend once to a short and a long text, with and without a bias, so that no later prompt meets cold code."""
    config, plan, device = transformer.config, transformer.plan, transformer.device
    heads = (config.num_heads, config.head_dim)
    query_THK = torch.zeros(16, *heads, dtype=plan.linear, device=device)
    for num_rows in (2, config.text_rows):
        text_LHK = torch.zeros(num_rows, *heads, device=device).to(plan.kv)
        for bias_L in (None, torch.zeros(num_rows, device=device)):
            attention(query_THK, text_LHK, text_LHK, logit_bias_S=bias_L)


def _choose_ops(options: LingBotOptions, plan: PrecisionPlan, device: torch.device) -> LayerOps | None:
    """Return the fused operations to use, None for the layers as they are written. Raises `LoadFailed`."""
    choice = OpsChoice(options.layer_operations.value)
    if plan.rounds_as_official:
        if choice not in (OpsChoice.AUTO, OpsChoice.UNFUSED):
            raise LoadFailed(
                f"layer_operations {choice.value!r} don't round as the precision {plan.name!r} says: use 'unfused'",
                field="layer_operations",
            )
        return None
    if plan.quantizes_linears and choice is OpsChoice.UNFUSED:
        raise LoadFailed(
            f"the precision {plan.name!r} has no unfused form: use layer_operations 'auto'", field="layer_operations"
        )
    try:
        ops = create_ops(choice, device)
    except OpsUnavailable as error:
        raise LoadFailed(str(error), field="layer_operations") from error
    return PlainOps() if ops is None and plan.quantizes_linears else ops


def _make_forward(transformer: LingBotTransformer, ops: LayerOps | None) -> tuple[Forward, str]:
    """Return the forward and its name for operators."""
    if ops is None:
        return transformer, OpsChoice.UNFUSED.value
    quantizes = transformer.plan.quantizes_linears
    with torch.inference_mode():
        forward = FusedForward(transformer, ops, quantize=quantizes)
    return forward, f"{ops.name} with float8 linears" if quantizes else ops.name
