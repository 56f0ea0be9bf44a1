"""Write a planned checkpoint with random values: one tensor in memory at a time, the same bytes for the same seed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from worldmodel.checkpoint.errors import CheckpointError, naming
from worldmodel.checkpoint.loading import Progress
from worldmodel.checkpoint.plan import CheckpointPlan, FileFormat, PlannedFile, PlannedTensor
from worldmodel.checkpoint.random_weights import RandomWeights
from worldmodel.checkpoint.tensor_stream import TORCH_DTYPES

_PARTIAL = ".partial"


def write_checkpoint(plan: CheckpointPlan, out: Path, *, seed: int, progress: Progress | None = None) -> None:
    """Write all files of a plan into a folder that is empty or not there yet.

    `progress` is called with the fraction of tensor bytes written. A file of tensors in torch's format is held in
    memory as a whole, of a safetensors file one tensor. Raises `CheckpointError`, before anything is written, if the
    folder is not empty or the disk too small.
    """
    with naming(out, "written"):
        _check_room(plan, out)
    for path, content in plan.json_files.items():
        with naming(out / path, "written"):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = RandomSource(seed)
    done_bytes = 0
    for planned in plan.tensor_files:
        write_file(planned, out, weights)
        done_bytes += planned.num_bytes
        if progress is not None:
            progress(done_bytes / max(1, plan.num_bytes), planned.path)


class RandomSource:
    """`RandomWeights` of one seed for every table of gains, sharing what is slow to make."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._plain = RandomWeights(seed=seed, device=device)

    def tensor(self, tensor: PlannedTensor, gains: Mapping[str, float]) -> torch.Tensor:
        """Return the values of a planned tensor."""
        return self._plain.with_gains(gains).tensor(tensor.key, tensor.shape, TORCH_DTYPES[tensor.dtype])


def write_file(planned: PlannedFile, out: Path, source: RandomSource) -> Path:
    """Write one file of tensors under a temporary name, then rename it; return its path."""
    file = out / planned.path
    partial = file.with_name(file.name + _PARTIAL)
    with naming(file, "written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            if planned.format is FileFormat.TORCH:
                torch.save({tensor.name: source.tensor(tensor, planned.gains) for tensor in planned.tensors}, partial)
            else:
                _write_safetensors(planned, partial, source)
            partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
    return file


def _write_safetensors(planned: PlannedFile, file: Path, source: RandomSource) -> None:
    with file.open("wb") as stream:
        stream.write(safetensors_header(planned.tensors))
        for tensor in planned.tensors:
            values = source.tensor(tensor, planned.gains).cpu().contiguous()
            stream.write(values.reshape(-1).view(torch.uint8).numpy().data)


def safetensors_header(tensors: tuple[PlannedTensor, ...]) -> bytes:
    """Return length and JSON header of a file that holds these tensors one after the other."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Data starts at a multiple of eight, as the format wants.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check_room(plan: CheckpointPlan, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(str(out), "must be a new or empty folder")
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < plan.num_bytes:
        raise CheckpointError(
            str(out), f"the checkpoint takes {plan.num_bytes / 1e9:.1f} GB, the disk has {free_bytes / 1e9:.1f} GB free"
        )
