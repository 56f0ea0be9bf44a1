"""A component whose tensors and config were found already, wherever they lie. Its names are those of our modules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldmodel.checkpoint.errors import naming
from worldmodel.checkpoint.loading import DTypeChoice, NameChoice, Progress, find_misfits, load_tensors
from worldmodel.checkpoint.safetensors_header import TensorInfo, read_safetensors_header

_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredComponent:
    """Implements `Component`. `tensors` maps a module's names to where they are stored."""

    subject: str
    class_name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    folder: Path | None = None

    def misfits(self, module: nn.Module) -> tuple[str, ...]:
        """Say what of the stored tensors does not fit a module, one sentence per kind; reads headers only."""
        return find_misfits(self.tensors, module)

    def load_into(
        self,
        module: nn.Module,
        *,
        dtype: DTypeChoice,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        only: NameChoice | None = None,
    ) -> None:
        """Fill a module as `Component.load_into` says."""
        load_tensors(self.tensors, module, self.subject, dtype=dtype, device=device, progress=progress, only=only)


def sampled_digest(root: Path, files: Iterable[Path]) -> str:
    """Return a content digest in hex, cheap enough for any size of model.

    SHA-256 over names and sizes of the files, the content of small ones, and of each large one the header and 64 KiB of
    data at the start, the middle and the end. It tells checkpoints apart; it proves no integrity.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        with naming(file, "read"):
            digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
            digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    """Return a small file's content; of a large one the safetensors header, if it has one, and three samples."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= 4 * _SAMPLE_BYTES:
            return stream.read()
        starts = [0, size // 2, size - _SAMPLE_BYTES]
        pieces = []
        if file.suffix == ".safetensors":
            header = read_safetensors_header(file)
            pieces.append(header.header_bytes)
            starts[0] = header.data_start_byte
        for start in starts:
            stream.seek(start)
            pieces.append(stream.read(_SAMPLE_BYTES))
    return b"".join(pieces)
