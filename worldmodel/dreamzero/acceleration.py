"""What a DreamZero worker computes with: the attention kernel and fused operations. Chosen once, at load."""

from __future__ import annotations

import torch

from kvcache.attention_backends import AttentionShape
from kvcache.spec import KVSpec
from worldmodel.dreamzero.captured_forward import CapturedForward
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.fused_forward import FusedForward
from worldmodel.dreamzero.sampler import Forward
from worldmodel.dreamzero.sizes import Sizes
from worldmodel.dreamzero.transformer_config import TransformerConfig
from worldmodel.dreamzero.weights import LoadedModel
from worldmodel.errors import LoadFailed
from worldmodel.kernels.layer_ops import LayerOps
from worldmodel.kernels.names import AttentionChoice, LayerOperations
from worldmodel.wan.acceleration import Acceleration, attention_backend, join, layer_operations
from worldmodel.wan.captured import check_graphs, create_graphs
from worldmodel.wan.precision import PrecisionPlan


def accelerate(model: LoadedModel, options: DreamZeroOptions, kv: KVSpec) -> Acceleration[Forward]:
    """Choose attention and forward for a loaded model and the geometry of its history.

    Raises:
        LoadFailed: naming the option, for a choice that can't run on this device or for this model.
    """
    transformer, plan, sizes = model.transformer, model.transformer.plan, model.sizes
    shape = _attention_shape(transformer.config, plan, transformer.device, kv)
    chosen = attention_backend(options.attention, shape)
    ops = _choose_ops(sizes, options, plan, transformer.device)
    forward = transformer if ops is None else FusedForward(transformer, ops, quantize=plan.quantizes_linears)
    return join(chosen, forward, ops, plan)


def capture(
    acceleration: Acceleration[Forward], model: LoadedModel, options: DreamZeroOptions, kv: KVSpec
) -> CapturedForward | str:
    """Return the forward that a worker captures while it warms up, or why it captures none.

    Raises:
        LoadFailed: naming the option, for graphs that were asked for and can't be had.
    """
    transformer = model.transformer
    graphs = create_graphs(
        options.graphs, kv, acceleration.graph_attention, transformer.plan.linear, transformer.device
    )
    return graphs if isinstance(graphs, str) else CapturedForward(acceleration.forward, graphs, kv)


def check_choices(
    sizes: Sizes, options: DreamZeroOptions, plan: PrecisionPlan, device: torch.device, kv: KVSpec
) -> None:
    """Refuse what `accelerate` and `capture` would refuse, before there are weights; nothing is timed or allocated.

    What is left to the worker needs no look. `device` must exist. Raises `LoadFailed` naming the option.
    """
    if options.attention is not AttentionChoice.AUTO:
        attention_backend(options.attention, _attention_shape(sizes.transformer, plan, device, kv))
    _choose_ops(sizes, options, plan, device)
    check_graphs(options.graphs, kv, options.attention, plan.linear, device)


def _attention_shape(
    config: TransformerConfig, plan: PrecisionPlan, device: torch.device, kv: KVSpec
) -> AttentionShape:
    """Return what a draft at the end of the window asks for."""
    video = config.latent_frames_per_chunk * kv.tokens_per_latent_frame
    return AttentionShape(
        num_queries=video + config.register_tokens,
        num_keys=config.window_latent_frames * kv.tokens_per_latent_frame + config.register_tokens,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=plan.linear,
        device=device,
        register_tokens=kv.register_tokens,
    )


def _choose_ops(sizes: Sizes, options: DreamZeroOptions, plan: PrecisionPlan, device: torch.device) -> LayerOps | None:
    """Return the fused operations to use, None for the layers as they are written. Raises `LoadFailed`."""
    choice = options.layer_operations
    if sizes.final_noise is None:
        return layer_operations(choice, plan, device)
    if plan.quantizes_linears or choice not in (LayerOperations.AUTO, LayerOperations.UNFUSED):
        raise LoadFailed(
            "fused and float8 layers have one timestep, this checkpoint decouples the noise of video and actions: use "
            "layer_operations 'unfused' and a precision without float8",
            field="layer_operations",
        )
    return None
