"""Checkpoints of any size on no disk: files with headers and lengths, and holes where the tensor data would be."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from worldmodel.checkpoint.plan import CheckpointPlan, FileFormat, PlannedFile
from worldmodel.checkpoint.tensor_stream import TORCH_DTYPES
from worldmodel.checkpoint.writer import safetensors_header


def write_headers(plan: CheckpointPlan, out: Path) -> None:
    """Write everything of a planned checkpoint but its tensor data, which reads as zeros."""
    for path, content in plan.json_files.items():
        _file(out, path).write_text(json.dumps(content))
    for planned in plan.tensor_files:
        if planned.format is FileFormat.TORCH:
            _write_torch(planned, _file(out, planned.path))
        else:
            with _file(out, planned.path).open("wb") as stream:
                header = safetensors_header(planned.tensors)
                stream.write(header)
                stream.truncate(len(header) + planned.num_bytes)


def _file(out: Path, path: str) -> Path:
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    return out / path


def _write_torch(planned: PlannedFile, file: Path) -> None:
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        tensors = {
            tensor.name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for tensor in planned.tensors
        }
        torch.save(tensors, file)
