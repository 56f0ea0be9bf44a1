"""Plans of LingBot-World v2 checkpoints: every file of both layouts with names, shapes, types and shard sizes.

Names and shapes are those of our modules, built without memory, so that a plan cannot differ from what is loaded;
tests compare the plan with the published totals.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import nn

from worldmodel.checkpoint.plan import CheckpointPlan, FileFormat, PlannedFile, PlannedTensor, PlanRequest, shard
from worldmodel.lingbot.original_layout import TEXT_ENCODER_FILE, TOKENIZER_FOLDER, TRANSFORMER_FOLDER, VAE_FILE
from worldmodel.lingbot.published import FULL, RANDOM_GAINS, TINY, Config, PublishedModel
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TEXT_ROWS, read_transformer_config
from worldmodel.wan.made_tokenizer import tokenizer_files
from worldmodel.wan.original_names import original_umt5_name, original_vae_name
from worldmodel.wan.umt5 import UMT5Encoder, parse_umt5_config
from worldmodel.wan.vae import WanVAE

TEXT_SHARD_BYTES = 5_000_000_000

_UNUSED_TOKENS = 84
"""Rows of the published embedding that no token has: 256384 rows for 256300 tokens."""


class Layout(StrEnum):
    """DIFFUSERS: a folder per component. ORIGINAL: as the authors' code reads it."""

    DIFFUSERS = "diffusers"
    ORIGINAL = "original"


def plan_checkpoint(model: PublishedModel, *, layout: Layout, transformer_dtype: str = "F32") -> CheckpointPlan:
    """Plan a checkpoint of a published model. The VAE is F32 and the text encoder BF16, as published."""
    transformer, vae, text_encoder = _tensors(model, transformer_dtype)
    tokenizer = tokenizer_files(_num_tokens(model.text_encoder))
    if layout is Layout.ORIGINAL:
        return _original(model, transformer, vae, text_encoder, tokenizer)
    return _diffusers(model, transformer, vae, text_encoder, tokenizer)


Tensors = tuple[PlannedTensor, ...]


def _tensors(model: PublishedModel, transformer_dtype: str) -> tuple[Tensors, Tensors, Tensors]:
    with torch.device("meta"):
        transformer = LingBotTransformer(read_transformer_config(model.transformer))
        vae = WanVAE.from_config(model.vae)
        text_encoder = UMT5Encoder(parse_umt5_config(model.text_encoder))
    return (
        planned_tensors(transformer, transformer_dtype),
        planned_tensors(vae, "F32"),
        planned_tensors(text_encoder, "BF16"),
    )


def planned_tensors(module: nn.Module, dtype: str) -> Tensors:
    """List a module's tensors in one type; of names that share a tensor, the first."""
    seen: dict[int, PlannedTensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), PlannedTensor(name=name, key=name, shape=tuple(tensor.shape), dtype=dtype))
    return tuple(seen.values())


def _num_tokens(text_encoder: Config) -> int:
    vocabulary = text_encoder["vocab_size"]
    assert isinstance(vocabulary, int)
    return vocabulary - min(_UNUSED_TOKENS, vocabulary // 8)


def _diffusers(
    model: PublishedModel, transformer: Tensors, vae: Tensors, text_encoder: Tensors, tokenizer: dict[str, object]
) -> CheckpointPlan:
    json_files: dict[str, object] = {
        "model_index.json": model.model_index,
        "scheduler/scheduler_config.json": dict(model.scheduler),
        "transformer/config.json": dict(model.transformer),
        "vae/config.json": dict(model.vae),
        "text_encoder/config.json": dict(model.text_encoder),
        **{f"tokenizer/{name}": content for name, content in tokenizer.items()},
    }
    stem = "diffusion_pytorch_model"
    parts = (
        shard(
            transformer,
            "transformer",
            stem,
            gains=RANDOM_GAINS["transformer"],
            tensors_per_shard=model.tensors_per_shard,
        ),
        shard(vae, "vae", stem, gains=RANDOM_GAINS["vae"]),
        shard(
            text_encoder,
            "text_encoder",
            "model",
            gains=RANDOM_GAINS["text_encoder"],
            max_shard_bytes=TEXT_SHARD_BYTES,
        ),
    )
    files: list[PlannedFile] = []
    for part, index in parts:
        files += part
        json_files |= index
    return CheckpointPlan(json_files=json_files, tensor_files=tuple(files))


def _original(
    model: PublishedModel, transformer: Tensors, vae: Tensors, text_encoder: Tensors, tokenizer: dict[str, object]
) -> CheckpointPlan:
    shards, index = shard(
        transformer,
        TRANSFORMER_FOLDER,
        "diffusion_pytorch_model",
        gains=RANDOM_GAINS["transformer"],
        tensors_per_shard=model.tensors_per_shard,
    )
    files = (
        *shards,
        _torch_file(VAE_FILE, vae, "vae", original_vae_name),
        _torch_file(TEXT_ENCODER_FILE, text_encoder, "text_encoder", original_umt5_name),
    )
    json_files = {
        f"{TRANSFORMER_FOLDER}/config.json": original_config(model.transformer),
        **index,
        **{f"{TOKENIZER_FOLDER}/{name}": content for name, content in tokenizer.items()},
    }
    return CheckpointPlan(json_files=json_files, tensor_files=files)


def _torch_file(path: str, tensors: Tensors, component: str, rename: Callable[[str], str]) -> PlannedFile:
    renamed = tuple(
        PlannedTensor(name=rename(tensor.name), key=tensor.key, shape=tensor.shape, dtype=tensor.dtype)
        for tensor in tensors
    )
    return PlannedFile(path=path, tensors=renamed, format=FileFormat.TORCH, gains=RANDOM_GAINS[component])


def original_config(transformer: Config) -> dict[str, object]:
    """Return `transformers/config.json` of the original layout: the sizes, without window and chunk length."""
    sizes = read_transformer_config(transformer)
    return {
        "_class_name": "WanModel",
        "model_type": "i2v",
        "patch_size": [1, 2, 2],
        "text_len": TEXT_ROWS,
        "in_dim": sizes.in_channels,
        "dim": sizes.width,
        "ffn_dim": sizes.ffn_dim,
        "freq_dim": sizes.freq_dim,
        "text_dim": sizes.text_dim,
        "out_dim": sizes.out_channels,
        "num_heads": sizes.num_heads,
        "num_layers": sizes.num_layers,
        "window_size": [-1, -1],
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": sizes.eps,
    }


def plan_for(request: PlanRequest) -> CheckpointPlan:
    """Plan what `make-checkpoint` was asked for."""
    return plan_checkpoint(
        FULL if request.scale == "full" else TINY,
        layout=Layout(request.layout),
        transformer_dtype=request.dtype.upper(),
    )
