"""What a LingBot worker computes with: the attention backend, fused operations, float8. Chosen once, at load.

Whatever is chosen is said in `description`, which operators see; a choice by name that can't be had stops the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from kvcache.attention import Attention
from kvcache.attention_backends import AttentionBackend, AttentionShape, choose_attention
from kvcache.errors import AttentionUnavailable
from kvcache.spec import KVSpec
from worldmodel.errors import LoadFailed
from worldmodel.kernels.choice import OpsChoice, OpsUnavailable, create_ops
from worldmodel.kernels.layer_ops import LayerOps, PlainOps
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.transformer import LingBotTransformer

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
    try:
        chosen = choose_attention(AttentionBackend(options.attention.value), _attention_shape(transformer, kv))
    except AttentionUnavailable as error:
        raise LoadFailed(str(error), field="attention") from error
    forward, layers = _choose_forward(transformer, OpsChoice(options.layer_operations.value))
    if transformer.device.type == "cuda":
        warm_up_text(transformer, chosen.attention)
        # Weights that were folded or quantised leave unused memory with the allocator, which sessions need.
        torch.cuda.empty_cache()
    description = f"{chosen.describe()}; layers {layers}"
    logger.info("attention %s", description)
    return Acceleration(attention=chosen.attention, forward=forward, description=description)


def _attention_shape(transformer: LingBotTransformer, kv: KVSpec) -> AttentionShape:
    config = transformer.config
    visible = config.sink_latent_frames + (config.window_latent_frames or config.latent_frames_per_chunk)
    return AttentionShape(
        num_queries=config.latent_frames_per_chunk * kv.tokens_per_latent_frame,
        num_keys=visible * kv.tokens_per_latent_frame,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=transformer.plan.kv,
        device=transformer.device,
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


def _choose_forward(transformer: LingBotTransformer, choice: OpsChoice) -> tuple[Forward, str]:
    """Return the forward and its name for operators."""
    plan = transformer.plan
    if plan.rounds_as_official:
        if choice not in (OpsChoice.AUTO, OpsChoice.UNFUSED):
            raise LoadFailed(
                f"layer_operations {choice.value!r} don't round as the precision {plan.name!r} says: use 'unfused'",
                field="layer_operations",
            )
        return transformer, OpsChoice.UNFUSED.value
    try:
        ops = create_ops(choice, transformer.device)
    except OpsUnavailable as error:
        raise LoadFailed(str(error), field="layer_operations") from error
    if plan.quantizes_linears:
        return _quantized(transformer, ops, choice)
    if ops is None:
        return transformer, OpsChoice.UNFUSED.value
    with torch.inference_mode():
        return FusedForward(transformer, ops), ops.name


def _quantized(transformer: LingBotTransformer, ops: LayerOps | None, choice: OpsChoice) -> tuple[Forward, str]:
    if choice is OpsChoice.UNFUSED:
        raise LoadFailed(
            f"the precision {transformer.plan.name!r} has no unfused form: use layer_operations 'auto'",
            field="layer_operations",
        )
    ops = PlainOps() if ops is None else ops
    with torch.inference_mode():
        return FusedForward(transformer, ops, quantize=True), f"{ops.name} with float8 linears"
