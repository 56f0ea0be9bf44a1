"""Plans of DreamZero checkpoints: every file with names, shapes, types and shard sizes, before anything is written.

Names and shapes are those of our modules, built without memory, so that a plan cannot differ from what is loaded.
`worldmodel/checkpoint/writer.py` carries a plan out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from worldmodel.checkpoint.loading import names_by_tensor
from worldmodel.checkpoint.plan import CheckpointPlan, PlannedTensor, shard
from worldmodel.dreamzero.published import Published, Scale, config_file, metadata_file, published, training_file
from worldmodel.dreamzero.sizes import read_sizes
from worldmodel.dreamzero.weights import empty_modules
from worldmodel.wan.made_tokenizer import tokenizer_files
from worldmodel.wan.original_names import original_umt5_name, original_vae_name

if TYPE_CHECKING:
    from worldmodel.checkpoint.plan import PlanRequest

SHARD_BYTES = 5_000_000_000

_UNUSED_TOKENS = 84


def plan_checkpoint(model: Published, *, dtype: str = "BF16") -> CheckpointPlan:
    """Plan a whole checkpoint folder, tokenizer included. Raises ValueError for settings that contradict each other."""
    problems: list[str] = []
    sizes = read_sizes(model.head, problems)
    if sizes is None or problems:
        raise ValueError("; ".join(problems))
    modules = empty_modules(sizes)

    def vae_name(name: str) -> str:
        return original_wide_vae_name(name, sizes.vae.num_res_blocks) if sizes.wide_vae else original_vae_name(name)

    tensors = [
        *_renamed(modules.transformer, "action_head.model.", dtype, lambda name: name),
        *_renamed(modules.text_encoder, "action_head.text_encoder.", dtype, original_umt5_name),
        *_renamed(modules.image_encoder, "action_head.image_encoder.model.visual.", dtype, lambda name: name),
        *_renamed(modules.vae, "action_head.vae.model.", dtype, vae_name),
    ]
    files, index = shard(tensors, ".", "model", gains={}, max_shard_bytes=SHARD_BYTES)
    vocabulary = int(sizes.text_encoder["vocab_size"])
    tokenizer = tokenizer_files(vocabulary - min(_UNUSED_TOKENS, vocabulary // 8))
    return CheckpointPlan(
        json_files={
            "config.json": config_file(model),
            "experiment_cfg/metadata.json": metadata_file(),
            "experiment_cfg/conf.yaml": training_file(model),
            **{f"tokenizer/{name}": content for name, content in tokenizer.items()},
            **{path.removeprefix("./"): content for path, content in index.items()},
        },
        tensor_files=tuple(replace(file, path=file.path.removeprefix("./")) for file in files),
    )


def plan_for(request: PlanRequest) -> CheckpointPlan:
    """Plan what `make-checkpoint --like dreamzero-droid` asks for. Raises ValueError for a layout there is none of."""
    return _plan_scale(request, Scale.FULL_14B)


def plan_for_5b(request: PlanRequest) -> CheckpointPlan:
    """Plan what `make-checkpoint --like dreamzero-droid-5b` asks for; tiny is that of the other model."""
    return _plan_scale(request, Scale.FULL_5B)


def _plan_scale(request: PlanRequest, full: Scale) -> CheckpointPlan:
    if request.layout == "original":
        raise ValueError("DreamZero checkpoints have one layout only, leave the layout out")
    scale = Scale.TINY if request.scale == "tiny" else full
    return plan_checkpoint(published(scale), dtype=request.dtype.upper())


def _renamed(module: nn.Module, prefix: str, dtype: str, rename: Callable[[str], str]) -> list[PlannedTensor]:
    return [
        PlannedTensor(name=prefix + rename(names[0]), key=prefix + names[0], shape=tuple(tensor.shape), dtype=dtype)
        for tensor, names in names_by_tensor(module)
    ]


def original_wide_vae_name(name: str, num_units: int) -> str:
    """Return the original name of an encoder tensor of the Wan 2.2 VAE; the inverse of `wide_vae_name`."""
    match = re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(resnets\.(\d+)|downsampler)\.(.+)", name)
    if match is None:
        return original_vae_name(name)
    stage, _, place, rest = match.groups()
    if place is None:
        return f"encoder.downsamples.{stage}.downsamples.{num_units}.{rest}"
    unit = original_vae_name(f"encoder.down_blocks.0.{rest}").removeprefix("encoder.downsamples.0.")
    return f"encoder.downsamples.{stage}.downsamples.{place}.{unit}"
