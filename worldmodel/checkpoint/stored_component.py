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
from worldmodel.checkpoint.loading import DTypeChoice, KeyOf, NameChoice, Progress, find_misfits, load_tensors
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.safetensors_header import MAX_HEADER_BYTES, TensorInfo

_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredComponent:
    """Implements `Component`. `tensors` maps a module's names to where they are stored.

    `key_of` says which key of the file stands for a name, None where they are the same.
    """

    subject: str
    class_name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    folder: Path | None = None
    key_of: KeyOf | None = None

    def misfits(self, module: nn.Module) -> tuple[Problem, ...]:
        """Say what of the stored tensors does not fit a module; reads headers only."""
        return find_misfits(self.tensors, module, key_of=self.key_of)

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
        load_tensors(
            self.tensors,
            module,
            self.subject,
            dtype=dtype,
            device=device,
            progress=progress,
            only=only,
            key_of=self.key_of,
        )


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
            # As it stands there, so that a damaged file has a digest too; what is wrong with it is said elsewhere.
            header_length = int.from_bytes(stream.read(8), "little")
            if header_length <= MAX_HEADER_BYTES:
                pieces.append(stream.read(header_length))
                starts[0] = 8 + header_length
        for start in starts:
            stream.seek(start)
            pieces.append(stream.read(_SAMPLE_BYTES))
    return b"".join(pieces)
