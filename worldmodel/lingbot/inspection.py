"""What `inspect` says of a LingBot-World v2 checkpoint: parts, geometry, memory, capacity. Reads no tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from kvcache.spec import KVSpec
from worldmodel.checkpoint.component import Checkpoint, Component
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.inspection import (
    CARDS_GB,
    CONTEXT_BYTES,
    MAX_SESSIONS,
    ComponentFacts,
    Inspection,
    card_capacity,
    num_parameters,
    problems_of,
    session_memory,
    transformer_bytes,
)
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.lingbot.acceleration import check_choices, why_not_captured
from worldmodel.lingbot.camera import TOKEN_PIXELS
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import EmptyModel, build_empty, find_problems, open_any
from worldmodel.lingbot.memory import configured_kv
from worldmodel.offload_settings import OffloadSettings
from worldmodel.wan.captured import may_be_captured
from worldmodel.wan.layer_stream import NUM_SLOTS
from worldmodel.wan.precision import PrecisionPlan, precision_plan
from worldmodel.wan.text_encoder import default_placement
from worldmodel.wan.text_names import TextPlacement


def inspect_checkpoint(
    path: str,
    *,
    width: int,
    height: int,
    precision: str,
    text_encoder: str | None = None,
    options: LingBotOptions | None = None,
    offload: OffloadSettings | None = None,
    cards_gb: tuple[float, ...] = CARDS_GB,
    device: torch.device | None = None,
) -> Inspection:
    """Inspect a checkpoint, as it is on any GPU without a `device`.

    With one, choices of `options` that cannot be had on it are problems too. Of `offload` count the settings of the
    VAE, the camera and decoding; the transformer is counted as resident.

    Raises `LoadFailed` if it cannot be understood, ValueError for a size or a precision that there isn't.
    """
    options = options or LingBotOptions()
    _check_call(width=width, height=height, precision=precision)
    checkpoint = open_any(path)
    return inspect_empty(
        checkpoint,
        build_empty(checkpoint, options),
        width=width,
        height=height,
        precision=precision,
        text_encoder=text_encoder,
        options=options,
        offload=offload or OffloadSettings(),
        cards_gb=cards_gb,
        device=device,
    )


def _check_call(*, width: int, height: int, precision: str) -> None:
    for name, pixels in (("width", width), ("height", height)):
        if pixels < TOKEN_PIXELS or pixels % TOKEN_PIXELS:
            raise ValueError(f"{name} must be a multiple of {TOKEN_PIXELS} pixels, got {pixels}")
    precision_plan(precision)


def inspect_empty(
    checkpoint: Checkpoint,
    empty: EmptyModel,
    *,
    width: int,
    height: int,
    precision: str,
    text_encoder: str | None,
    options: LingBotOptions,
    offload: OffloadSettings,
    cards_gb: tuple[float, ...] = CARDS_GB,
    device: torch.device | None = None,
) -> Inspection:
    """Inspect a checkpoint whose modules were laid out; see `inspect_checkpoint`."""
    _check_call(width=width, height=height, precision=precision)
    plan = precision_plan(precision, device=device, vae=options.vae_precision)
    plan_kv = partial(
        configured_kv,
        empty.transformer.config,
        empty.vae,
        plan,
        width=width,
        height=height,
        options=options,
        offload=offload,
        requested_sessions=MAX_SESSIONS,
    )
    refusal = why_not_captured(streams=offload.streams)
    spec = plan_kv(is_captured=may_be_captured(options.graphs, plan_kv(), device, refusal=refusal))
    placement = _placement(empty, plan, options, text_encoder)
    parks_vae = offload.vae == "parked"
    weights_bytes = _weights(empty, plan, placement, parks_vae=parks_vae)
    return Inspection(
        checkpoint=checkpoint.name,
        digest=checkpoint.digest,
        width=width,
        height=height,
        precision=plan.description,
        components=_components(checkpoint, empty),
        geometry=_geometry(empty, spec, placement),
        memory={
            **weights_bytes,
            **session_memory(spec, cross_store="text"),
            "text_encoder_on_host_bytes": _host(empty, plan, placement),
            "vae_on_host_bytes": num_parameters(empty.vae) * plan.vae.itemsize if parks_vae else 0,
            "cuda_context_bytes": CONTEXT_BYTES,
        },
        capacity=tuple(card_capacity(card, spec, sum(weights_bytes.values())) for card in cards_gb),
        problems=(*find_problems(checkpoint, empty), *_choice_problems(empty, options, offload, plan, device, spec)),
    )


def _choice_problems(
    empty: EmptyModel,
    options: LingBotOptions,
    offload: OffloadSettings,
    plan: PrecisionPlan,
    device: torch.device | None,
    spec: KVSpec,
) -> tuple[Problem, ...]:
    if device is None:
        return ()
    config = empty.transformer.config
    return problems_of(lambda: check_choices(config, options, plan, device, spec, streams=offload.streams))


def _placement(
    empty: EmptyModel, plan: PrecisionPlan, options: LingBotOptions, text_encoder: str | None
) -> TextPlacement:
    if text_encoder is not None:
        return TextPlacement(text_encoder)
    if options.text_encoder is not None:
        return options.text_encoder
    return default_placement(empty.text_encoder, plan.text_encoder, torch.device("cuda"))


def _modules(empty: EmptyModel) -> dict[str, nn.Module]:
    return {"transformer": empty.transformer, "vae": empty.vae, "text_encoder": empty.text_encoder}


def _components(checkpoint: Checkpoint, empty: EmptyModel) -> tuple[ComponentFacts, ...]:
    facts = []
    for name, module in _modules(empty).items():
        component = checkpoint.component(name)
        stored = _readable_tensors(component)
        facts.append(
            ComponentFacts(
                name=name,
                class_name=component.class_name,
                dtypes=tuple(sorted({info.dtype for info in stored.values()})),
                num_tensors=len(stored) or sum(1 for _ in module.parameters()),
                num_parameters=sum(info.num_elements for info in stored.values()) or num_parameters(module),
                num_bytes=sum(info.num_bytes for info in stored.values()),
            )
        )
    return tuple(facts)


def _readable_tensors(component: Component) -> Mapping[str, TensorInfo]:
    """Return what is stored, nothing if it can't be read: that is among the problems."""
    try:
        return component.tensors
    except CheckpointError:
        return {}


def _geometry(empty: EmptyModel, spec: KVSpec, placement: TextPlacement) -> dict[str, object]:
    config, text = empty.transformer.config, empty.text_encoder.config
    return {
        "layers": config.num_layers,
        "heads": f"{config.num_heads} of {config.head_dim}",
        "width": config.width,
        "ffn": config.ffn_dim,
        "latent_frames_per_chunk": config.latent_frames_per_chunk,
        "sink_latent_frames": config.sink_latent_frames,
        "window_latent_frames": config.window_latent_frames,
        "tokens_per_latent_frame": spec.tokens_per_latent_frame,
        "flow_shift": empty.flow_shift,
        "vae": f"base {empty.vae.config.base_dim}, {empty.vae.config.z_dim} latent channels",
        "text_encoder": f"{text.num_layers} layers of {text.d_model}, {text.vocab_size} tokens",
        "text_encoder_placement": str(placement),
    }


def _weights(empty: EmptyModel, plan: PrecisionPlan, placement: TextPlacement, *, parks_vae: bool) -> dict[str, int]:
    """Count device bytes of the weights. A parked VAE's are counted where it works, among what sessions share."""
    text_bytes = num_parameters(empty.text_encoder) * plan.text_encoder.itemsize
    if placement is TextPlacement.CPU:
        text_bytes = 0
    elif placement is TextPlacement.STREAMED:
        text_bytes = NUM_SLOTS * num_parameters(empty.text_encoder.layers[0]) * plan.text_encoder.itemsize
    return {
        "transformer_weights_bytes": transformer_bytes(empty.transformer, plan),
        "vae_weights_bytes": 0 if parks_vae else num_parameters(empty.vae) * plan.vae.itemsize,
        "text_encoder_on_device_bytes": text_bytes,
    }


def _host(empty: EmptyModel, plan: PrecisionPlan, placement: TextPlacement) -> int:
    """Count host bytes of the text encoder."""
    if placement is TextPlacement.RESIDENT:
        return 0
    return num_parameters(empty.text_encoder) * plan.text_encoder.itemsize
