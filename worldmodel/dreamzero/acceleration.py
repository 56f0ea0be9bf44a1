"""What a DreamZero worker computes with: the attention kernel and fused operations. Chosen once, at load.

Whatever is chosen is said in `description`, which operators see; a choice by name that can't be had stops the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvcache.attention import Attention
from kvcache.attention_backends import AttentionBackend, AttentionShape, choose_attention
from kvcache.errors import AttentionUnavailable
from kvcache.spec import KVSpec
from worldmodel.dreamzero.config import DreamZeroOptions, LayerOperations
from worldmodel.dreamzero.fused_forward import FusedForward
from worldmodel.dreamzero.sampler import Forward
from worldmodel.dreamzero.transformer import DreamZeroTransformer
from worldmodel.dreamzero.weights import LoadedModel
from worldmodel.errors import LoadFailed
from worldmodel.kernels.choice import OpsChoice, OpsUnavailable, create_ops
from worldmodel.kernels.layer_ops import PlainOps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceleration:
    """The parts of a worker that have more than one implementation."""

    attention: Attention
    forward: Forward
    description: str


def accelerate(model: LoadedModel, options: DreamZeroOptions, kv: KVSpec) -> Acceleration:
    """Choose attention and forward for a loaded model and the geometry of its history.

    Raises:
        LoadFailed: naming the option, for a choice that can't run on this device or for this model.
    """
    transformer = model.transformer
    try:
        chosen = choose_attention(AttentionBackend(options.attention.value), _attention_shape(transformer, kv))
    except AttentionUnavailable as error:
        raise LoadFailed(str(error), field="attention") from error
    forward, layers = _choose_forward(
        transformer, options.layer_operations, decoupled=model.sizes.final_noise is not None
    )
    description = f"{chosen.describe()}; layers {layers}"
    logger.info("attention %s", description)
    return Acceleration(attention=chosen.attention, forward=forward, description=description)


def _attention_shape(transformer: DreamZeroTransformer, kv: KVSpec) -> AttentionShape:
    """Return what a draft at the end of the window asks for."""
    config = transformer.config
    video = config.latent_frames_per_chunk * kv.tokens_per_latent_frame
    return AttentionShape(
        num_queries=video + config.register_tokens,
        num_keys=config.window_latent_frames * kv.tokens_per_latent_frame + config.register_tokens,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=transformer.plan.linear,
        device=transformer.device,
    )


def _choose_forward(
    transformer: DreamZeroTransformer, choice: LayerOperations, *, decoupled: bool
) -> tuple[Forward, str]:
    """Return the forward and its name for operators."""
    quantize = transformer.plan.quantizes_linears
    if decoupled and (quantize or choice not in (LayerOperations.AUTO, LayerOperations.UNFUSED)):
        raise LoadFailed(
            "fused and float8 layers have one timestep, this checkpoint decouples the noise of video and actions: use "
            "layer_operations 'unfused' and a precision without float8",
            field="layer_operations",
        )
    if quantize and choice is LayerOperations.UNFUSED:
        raise LoadFailed(
            f"the precision {transformer.plan.name!r} has no unfused form: use layer_operations 'auto'",
            field="layer_operations",
        )
    if decoupled:
        return transformer, LayerOperations.UNFUSED.value
    try:
        ops = create_ops(OpsChoice(choice.value), transformer.device)
    except OpsUnavailable as error:
        raise LoadFailed(str(error), field="layer_operations") from error
    if quantize:
        ops = PlainOps() if ops is None else ops
        return FusedForward(transformer, ops, quantize=True), f"{ops.name} with float8 linears"
    return (transformer, LayerOperations.UNFUSED.value) if ops is None else (FusedForward(transformer, ops), ops.name)
