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
    if decoupled or transformer.plan.residual != transformer.plan.linear:
        if choice not in (LayerOperations.AUTO, LayerOperations.UNFUSED):
            reason = "the two timesteps of decoupled noise" if decoupled else f"precision {transformer.plan.name!r}"
            raise LoadFailed(
                f"layer_operations {choice.value!r} can't be used with {reason}: use 'unfused'",
                field="layer_operations",
            )
        return transformer, LayerOperations.UNFUSED.value
    try:
        ops = create_ops(OpsChoice(choice.value), transformer.device)
    except OpsUnavailable as error:
        raise LoadFailed(str(error), field="layer_operations") from error
    return (transformer, LayerOperations.UNFUSED.value) if ops is None else (FusedForward(transformer, ops), ops.name)
