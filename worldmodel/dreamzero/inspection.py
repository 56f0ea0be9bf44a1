"""What `inspect` says of a DreamZero checkpoint: parts, geometry, memory, capacity. Reads no tensor data."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from kvcache.spec import KVSpec
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
from worldmodel.checkpoint.json_file import read_json_object
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.dreamzero.acceleration import check_choices
from worldmodel.dreamzero.checkpoint import (
    CONFIG_FILE,
    METADATA_FILE,
    TEXT_ENCODER,
    DreamZeroCheckpoint,
)
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.embodiments import EMBODIMENTS
from worldmodel.dreamzero.memory import plan_kv
from worldmodel.dreamzero.picture_size import latent_size
from worldmodel.dreamzero.published import Scale, published
from worldmodel.dreamzero.robot import Robot
from worldmodel.dreamzero.weights import EmptyModules, empty_modules, part_problems, read_checkpoint
from worldmodel.errors import LoadFailed
from worldmodel.wan.captured import may_be_captured
from worldmodel.wan.precision import PrecisionPlan, precision_plan

ADAPTERS = "adapters"
"""Low-rank adapters of the transformer, which are merged into it at load."""


def is_dreamzero(path: str) -> bool:
    """Tell a DreamZero folder by its `config.json`. Raises `CheckpointError` if that is broken."""
    file = Path(path) / CONFIG_FILE
    return os.path.isfile(file) and "action_head_cfg" in read_json_object(file)


def inspect_dreamzero(
    path: str,
    *,
    width: int | None = None,
    height: int | None = None,
    precision: str,
    options: DreamZeroOptions | None = None,
    cards_gb: tuple[float, ...] = CARDS_GB,
    device: torch.device | None = None,
) -> Inspection:
    """Inspect a checkpoint, by default at the picture size and for the robot that it was trained for.

    Without a `device` it is for any GPU; with one, choices of `options` that cannot be had on it are problems too.

    Raises `LoadFailed` if it cannot be understood, ValueError for a size or a precision that there isn't.
    """
    plan = precision_plan(precision, device=device, vae=None if options is None else options.vae_precision)
    checkpoint, robot = read_checkpoint(path, options or DreamZeroOptions(embodiment=trained_embodiment(path)))
    modules = empty_modules(checkpoint.sizes)
    trained_height, trained_width = _trained_size(checkpoint)
    width, height = width or trained_width, height or trained_height
    try:
        kv_spec = partial(_kv_spec, checkpoint, robot, modules, plan, width=width, height=height)
        graphs = (options or DreamZeroOptions()).graphs
        spec = kv_spec(is_captured=may_be_captured(graphs, kv_spec(is_captured=False), device))
    except LoadFailed as error:
        raise ValueError(error.message) from error
    weights_bytes = _weights(checkpoint, modules, plan)
    return Inspection(
        checkpoint=checkpoint.name,
        digest=checkpoint.digest,
        width=width,
        height=height,
        precision=plan.description,
        components=_components(checkpoint),
        geometry=_geometry(checkpoint, robot, spec),
        memory={
            **weights_bytes,
            **session_memory(spec, cross_store="text_and_image"),
            "cuda_context_bytes": CONTEXT_BYTES,
        },
        capacity=tuple(card_capacity(card, spec, sum(weights_bytes.values())) for card in cards_gb),
        problems=(*part_problems(checkpoint, modules), *_choice_problems(checkpoint, options, plan, device, spec)),
    )


def trained_embodiment(path: str) -> str:
    """Return the first robot that the checkpoint has statistics of; without any, loading says what it has."""
    try:
        metadata = read_json_object(Path(path) / METADATA_FILE)
    except CheckpointError:
        # Loading says what is wrong with this file, and with the others besides.
        metadata = {}
    tags = [entry.tag for entry in EMBODIMENTS if entry.tag in (*metadata, metadata.get("embodiment_tag"))]
    return tags[0] if tags else DreamZeroOptions().embodiment


def _trained_size(checkpoint: DreamZeroCheckpoint) -> tuple[int, int]:
    """Return (height, width) of the tiled picture: twice a view of the training run, else as published."""
    if (view := checkpoint.training.view_size) is not None:
        return 2 * view[0], 2 * view[1]
    model = published(Scale.FULL_5B if checkpoint.sizes.wide_vae else Scale.FULL_14B)
    return model.height, model.width


def _kv_spec(
    checkpoint: DreamZeroCheckpoint,
    robot: Robot,
    modules: EmptyModules,
    plan: PrecisionPlan,
    *,
    width: int,
    height: int,
    is_captured: bool,
) -> KVSpec:
    sizes = checkpoint.sizes
    latent = latent_size(
        sizes,
        checkpoint.training.view_size,
        width=width,
        height=height,
        spatial_factor=modules.vae.spatial_factor,
    )
    return plan_kv(
        sizes,
        robot,
        plan,
        latent_size=latent,
        picture_size=sizes.picture_size or (height, width),
        view_size=(height // 2, width // 2),
        requested_sessions=MAX_SESSIONS,
        is_captured=is_captured,
    )


def _weights(checkpoint: DreamZeroCheckpoint, modules: EmptyModules, plan: PrecisionPlan) -> dict[str, int]:
    """Count device bytes of the weights."""
    text = checkpoint.tensors[TEXT_ENCODER].values()
    return {
        "transformer_weights_bytes": transformer_bytes(modules.transformer, plan),
        "vae_weights_bytes": num_parameters(modules.vae) * plan.vae.itemsize,
        "image_encoder_weights_bytes": num_parameters(modules.image_encoder) * plan.linear.itemsize,
        "text_encoder_on_device_bytes": sum(info.num_elements for info in text) * plan.text_encoder.itemsize,
    }


def _components(checkpoint: DreamZeroCheckpoint) -> tuple[ComponentFacts, ...]:
    stored: dict[str, Iterable[TensorInfo]] = {name: part.values() for name, part in checkpoint.tensors.items()}
    if checkpoint.lora:
        stored[ADAPTERS] = [info for pair in checkpoint.lora for info in (pair.down, pair.up)]
    return tuple(_facts(name, list(tensors)) for name, tensors in stored.items())


def _facts(name: str, tensors: list[TensorInfo]) -> ComponentFacts:
    return ComponentFacts(
        name=name,
        class_name="",
        dtypes=tuple(sorted({info.dtype for info in tensors})),
        num_tensors=len(tensors),
        num_parameters=sum(info.num_elements for info in tensors),
        num_bytes=sum(info.num_bytes for info in tensors),
    )


def _geometry(checkpoint: DreamZeroCheckpoint, robot: Robot, spec: KVSpec) -> dict[str, object]:
    sizes, config = checkpoint.sizes, checkpoint.sizes.transformer
    return {
        "embodiment": robot.embodiment.tag,
        "cameras": len(robot.cameras),
        "actions": f"{config.actions_per_chunk} rows of {robot.num_action_dims}",
        "layers": config.num_layers,
        "heads": f"{config.num_heads} of {config.head_dim}",
        "width": config.width,
        "ffn": config.ffn_dim,
        "latent_frames_per_chunk": config.latent_frames_per_chunk,
        "window_latent_frames": config.window_latent_frames,
        "tokens_per_latent_frame": spec.tokens_per_latent_frame,
        "vae": f"{'Wan 2.2' if sizes.wide_vae else 'Wan 2.1'}, {sizes.vae.z_dim} latent channels",
        "text_encoder": f"{sizes.text_encoder['num_layers']} layers of {sizes.text_encoder['d_model']}",
    }


def _choice_problems(
    checkpoint: DreamZeroCheckpoint,
    options: DreamZeroOptions | None,
    plan: PrecisionPlan,
    device: torch.device | None,
    spec: KVSpec,
) -> tuple[Problem, ...]:
    if device is None or options is None:
        return ()
    return problems_of(lambda: check_choices(checkpoint.sizes, options, plan, device, spec))
