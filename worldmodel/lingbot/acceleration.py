"""What a LingBot worker computes with: the attention backend, fused operations, float8. Chosen once, at load."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcache.attention import Attention
from kvcache.attention_backends import AttentionShape
from kvcache.spec import KVSpec
from worldmodel.errors import LoadFailed
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import LayerOps
from worldmodel.kernels.names import AttentionChoice, LayerOperations
from worldmodel.lingbot.captured_forward import CapturedForward
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.streaming import stream_transformer
from worldmodel.lingbot.streaming_cache import StreamRequest
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.acceleration import Acceleration, attention_backend, join, layer_operations
from worldmodel.wan.captured import check_graphs, create_graphs
from worldmodel.wan.precision import PrecisionPlan

STREAMED_WEIGHTS = "weights that are streamed come between the layers of a forward"
"""Why a worker with offload captures nothing."""


def accelerate(
    transformer: LingBotTransformer, options: LingBotOptions, kv: KVSpec, streams: StreamRequest | None = None
) -> Acceleration[Forward]:
    """Choose attention and forward for a loaded transformer and the geometry of its history.

    With `streams` the linears of the layers are loaded here, to be streamed; without, they are there.

    Raises:
        LoadFailed: naming the option, for a choice that can't run on this device or in this precision.
    """
    plan, device = transformer.plan, transformer.device
    chosen = attention_backend(options.attention, _attention_shape(transformer.config, plan, device, kv))
    ops = _choose_ops(options, plan, device)
    streamed = None
    if streams is not None:
        streamed = stream_transformer(transformer, streams, _format_of(ops, plan), kv)
    forward: Forward = transformer
    if ops is not None:
        layers = None if streamed is None else streamed.fused
        with torch.inference_mode():
            forward = FusedForward(transformer, ops, quantize=plan.quantizes_linears, layers=layers)
    if device.type == "cuda":
        merges = merges_padding(options, chosen.attention.name, device)
        warm_up_text(transformer, chosen.attention, merges_padding=merges)
        # Weights that were folded or quantised leave unused memory with the allocator, which sessions need.
        torch.cuda.empty_cache()
    found = join(chosen, forward, ops, plan)
    return found if streamed is None else replace(found, description=f"{found.description}; {streamed.description}")


def merges_padding(options: LingBotOptions, attention: str, device: torch.device) -> bool:
    """Tell whether one row of a text, with a bias, stands for all its padding rows; `attention` names what attends.

    On a GPU with Triton only. The other kernels take no bias, or one in float32, and read all 512 rows in the time that
    Triton takes for 120 with a bias (docs/performance.md).
    """
    takes_bias = attention in (AttentionChoice.TRITON.value, AttentionChoice.TRITON_PAGED.value)
    return not options.pad_text_exact and (takes_bias or device.type != "cuda")


def layer_format(options: LingBotOptions, plan: PrecisionPlan, device: torch.device) -> FusedFormat | None:
    """Return the form that `accelerate` gives to layers, None for layers as they are written. Raises as it does."""
    return _format_of(_choose_ops(options, plan, device), plan)


def _format_of(ops: LayerOps | None, plan: PrecisionPlan) -> FusedFormat | None:
    return None if ops is None else FusedFormat(ops, plan.linear, quantize=plan.quantizes_linears)


def capture(
    acceleration: Acceleration[Forward],
    transformer: LingBotTransformer,
    options: LingBotOptions,
    kv: KVSpec,
    *,
    merges_padding: bool,
) -> CapturedForward | str:
    """Return the forward that a worker captures while it warms up, or why it captures none.

    `merges_padding` is what the function of that name says of the worker's attention.

    Raises:
        LoadFailed: naming the option, for graphs that were asked for and can't be had.
    """
    graphs = create_graphs(
        options.graphs,
        kv,
        acceleration.graph_attention,
        transformer.plan.kv,
        transformer.device,
        refusal=why_not_captured(streams=is_streamed(transformer)),
    )
    if isinstance(graphs, str):
        return graphs
    return CapturedForward(acceleration.forward, graphs, transformer, merges_padding=merges_padding)


def why_not_captured(*, streams: bool) -> str | None:
    """Return the reason of this model's own against graphs, or None."""
    return STREAMED_WEIGHTS if streams else None


def is_streamed(transformer: LingBotTransformer) -> bool:
    """Tell whether weights are copied to the device while a forward runs."""
    return transformer.weights.streamed is not None


def check_choices(
    config: TransformerConfig,
    options: LingBotOptions,
    plan: PrecisionPlan,
    device: torch.device,
    kv: KVSpec,
    *,
    streams: bool = False,
) -> None:
    """Refuse what `accelerate` and `capture` would refuse, before there are weights; nothing is timed or allocated.

    `streams`: layers will be copied to the device as they are needed. What is left to the worker is never refused.
    `device` must exist. Raises `LoadFailed` naming the option.
    """
    if options.attention is not AttentionChoice.AUTO:
        attention_backend(options.attention, _attention_shape(config, plan, device, kv))
    if options.layer_operations is not LayerOperations.AUTO:
        _choose_ops(options, plan, device)
    refusal = why_not_captured(streams=streams)
    check_graphs(options.graphs, kv, options.attention, plan.kv, device, refusal=refusal)


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


def warm_up_text(transformer: LingBotTransformer, attention: Attention, *, merges_padding: bool) -> None:
    """Attend once to every form that a text may have, so that no later prompt meets cold code.

    With merged padding a short and a long one, with and without a bias; else there is one form only.
    """
    config, plan, device = transformer.config, transformer.plan, transformer.device
    heads = (config.num_heads, config.head_dim)
    query_THK = torch.zeros(16, *heads, device=device).to(plan.kv)
    for num_rows in (2, config.text_rows) if merges_padding else (config.text_rows,):
        text_LHK = torch.zeros(num_rows, *heads, device=device).to(plan.kv)
        attention(query_THK, text_LHK, text_LHK)
        if merges_padding:
            attention(query_THK, text_LHK, text_LHK, logit_bias_S=torch.zeros(num_rows, device=device))


def _choose_ops(options: LingBotOptions, plan: PrecisionPlan, device: torch.device) -> LayerOps | None:
    """Return the fused operations to use, None for the layers as they are written. Raises `LoadFailed`."""
    choice = options.layer_operations
    if not plan.rounds_as_official:
        return layer_operations(choice, plan, device)
    if choice not in (LayerOperations.AUTO, LayerOperations.UNFUSED):
        raise LoadFailed(
            f"layer_operations {choice.value!r} don't round as the precision {plan.name!r} says: use 'unfused'",
            field="layer_operations",
        )
    return None
