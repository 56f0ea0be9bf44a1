"""What a DreamZero worker computes with: the attention kernel and fused operations. Chosen once, at load."""

from __future__ import annotations

from kvcache.attention_backends import AttentionShape
from kvcache.spec import KVSpec
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.fused_forward import FusedForward
from worldmodel.dreamzero.sampler import Forward
from worldmodel.dreamzero.transformer import DreamZeroTransformer
from worldmodel.dreamzero.weights import LoadedModel
from worldmodel.errors import LoadFailed
from worldmodel.kernels.layer_ops import LayerOps
from worldmodel.kernels.names import LayerOperations
from worldmodel.wan.acceleration import Acceleration, attention_backend, join, layer_operations


def accelerate(model: LoadedModel, options: DreamZeroOptions, kv: KVSpec) -> Acceleration[Forward]:
    """Choose attention and forward for a loaded model and the geometry of its history.

    Raises:
        LoadFailed: naming the option, for a choice that can't run on this device or for this model.
    """
    transformer = model.transformer
    chosen = attention_backend(options.attention, _attention_shape(transformer, kv))
    ops = _choose_ops(transformer, options.layer_operations, decoupled=model.sizes.final_noise is not None)
    quantize = transformer.plan.quantizes_linears
    forward = transformer if ops is None else FusedForward(transformer, ops, quantize=quantize)
    return join(chosen, forward, ops, transformer.plan)


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


def _choose_ops(transformer: DreamZeroTransformer, choice: LayerOperations, *, decoupled: bool) -> LayerOps | None:
    """Return the fused operations to use, None for the layers as they are written. Raises `LoadFailed`."""
    plan = transformer.plan
    if not decoupled:
        return layer_operations(choice, plan, transformer.device)
    if plan.quantizes_linears or choice not in (LayerOperations.AUTO, LayerOperations.UNFUSED):
        raise LoadFailed(
            "fused and float8 layers have one timestep, this checkpoint decouples the noise of video and actions: use "
            "layer_operations 'unfused' and a precision without float8",
            field="layer_operations",
        )
    return None
