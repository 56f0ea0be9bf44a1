"""Safetensors files of the weight cache: written tensor by tensor and hashed on the way, read by their header only.

| header length u64 LE | header: JSON, padded with spaces to ALIGNMENT | tensors, one after the other |
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CacheDamaged
from offload.host_plan import StoredTensor
from offload.layout import ALIGNMENT, TensorSpec

WORDS: dict[torch.dtype, str] = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
"""The format's word for every type that weights may have."""

DTYPES = {word: dtype for dtype, word in WORDS.items()}
MAX_HEADER_BYTES = 100_000_000
READ_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and SHA-256 of a file, and SHA-256 of its header alone."""

    num_bytes: int
    sha256: str
    header_sha256: str


def write_tensor_file(file: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> FileDigest:
    """Write a new file, flush it to the disk and return its digest. Raises OSError, ValueError for a wrong tensor."""
    header = _header(specs)
    digest = hashlib.sha256(header)
    num_bytes = len(header)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        _write_all(stream.fileno(), memoryview(header))
        for spec, tensor in zip(specs, tensors, strict=True):
            if TensorSpec.of(spec.name, tensor) != spec:
                raise ValueError(f"{spec.name}: expected {spec}, got {TensorSpec.of(spec.name, tensor)}")
            data = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            _write_all(stream.fileno(), data)
            num_bytes += len(data)
        os.fsync(stream.fileno())
    return FileDigest(num_bytes=num_bytes, sha256=digest.hexdigest(), header_sha256=hashlib.sha256(header).hexdigest())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for spec in specs:
        end = start + spec.num_bytes
        entries[spec.name] = {"dtype": WORDS[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(file: Path) -> bytes:
    """Return the header with its length. Raises OSError, `CacheDamaged` for a length that cannot be."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CacheDamaged(file.parent.name, f"{file.name} has a header of {length} bytes")
        return prefix + stream.read(length)


def stored_tensors(file: Path, header: bytes) -> dict[str, StoredTensor]:
    """Return the tensors of a file. Raises `CacheDamaged`, of one that was checked if it has changed since."""
    try:
        entries: dict[str, dict[str, Any]] = json.loads(header[8:])
        return {
            name: StoredTensor(
                key=name,
                file=file,
                start_byte=len(header) + entry["data_offsets"][0],
                dtype=DTYPES[entry["dtype"]],
                shape=tuple(entry["shape"]),
                span_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CacheDamaged(file.parent.name, f"{file.name} has a header that cannot be read") from error


def file_sha256(file: Path) -> str:
    """Hash a whole file. Raises OSError."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
