"""What a checkpoint consists of, file by file, before anything is written. Torch-free.

A model gives a plan (see `worldmodel/lingbot/layout.py`); `writer.py` carries it out. Sizes of a full checkpoint are
known, and can be tested, without 74 GB of disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from worldmodel.checkpoint.safetensors_header import ITEM_BYTES

MAX_SEED = 2**53 - 1
"""Largest seed of random weights, as of sessions: the largest integer that JSON carries exactly."""


class FileFormat(StrEnum):
    """How tensors are stored: safetensors, or torch's own zip with a pickled index."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor to write. `dtype` is the safetensors word.

    `key` decides the random values; it is the same in every layout of a model, `name` is what the file calls it.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One file of tensors. `path` is relative to the checkpoint, `gains` are those of `RandomWeights`."""

    path: str
    tensors: tuple[PlannedTensor, ...]
    format: FileFormat = FileFormat.SAFETENSORS
    gains: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data, without header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """All files of a checkpoint: JSON by path, and tensors."""

    json_files: Mapping[str, object]
    tensor_files: tuple[PlannedFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(file.num_bytes for file in self.tensor_files)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for file in self.tensor_files for tensor in file.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan can be asked for. `scale` is `full` or `tiny`, `dtype` that of the largest component."""

    scale: str
    layout: str
    dtype: str


def shard(
    tensors: Sequence[PlannedTensor],
    folder: str,
    stem: str,
    *,
    gains: Mapping[str, float],
    tensors_per_shard: int | None = None,
    max_shard_bytes: int | None = None,
) -> tuple[tuple[PlannedFile, ...], dict[str, object]]:
    """Cut a component into safetensors files, with their index where there are several.

    A shard ends after `tensors_per_shard` tensors or before it would pass `max_shard_bytes`; None means no such limit.
    """
    groups = _groups(tensors, tensors_per_shard, max_shard_bytes)
    if len(groups) == 1:
        single = PlannedFile(path=f"{folder}/{stem}.safetensors", tensors=tuple(groups[0]), gains=gains)
        return (single,), {}
    names = [f"{stem}-{number + 1:05}-of-{len(groups):05}.safetensors" for number in range(len(groups))]
    files = tuple(
        PlannedFile(path=f"{folder}/{name}", tensors=tuple(group), gains=gains)
        for name, group in zip(names, groups, strict=True)
    )
    weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files, {f"{folder}/{stem}.safetensors.index.json": index}


def _groups(
    tensors: Iterable[PlannedTensor], tensors_per_shard: int | None, max_shard_bytes: int | None
) -> list[list[PlannedTensor]]:
    groups: list[list[PlannedTensor]] = [[]]
    for tensor in tensors:
        last = groups[-1]
        is_full = tensors_per_shard is not None and len(last) >= tensors_per_shard
        if max_shard_bytes is not None:
            is_full |= bool(last) and sum(each.num_bytes for each in last) + tensor.num_bytes > max_shard_bytes
        if is_full:
            groups.append([])
        groups[-1].append(tensor)
    return groups
