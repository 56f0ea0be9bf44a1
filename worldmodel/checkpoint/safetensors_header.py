"""The header of a safetensors file: names, types, shapes and places of tensors, read without their data.

    | header length u64 LE | header: JSON object | tensor data |

Checked here so that a damaged file is named before a model is built.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.json_file import parse_json_object

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor. `dtype` is the safetensors word (`BF16`), `start_byte` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start_byte: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """A checked file. `header_bytes` are its raw JSON."""

    file: Path
    num_bytes: int
    header_bytes: bytes
    tensors: tuple[TensorInfo, ...]

    @property
    def data_start_byte(self) -> int:
        return 8 + len(self.header_bytes)


def read_safetensors_header(file: Path) -> SafetensorsFile:
    """Read and check a header. Raises `CheckpointError` for a missing, foreign, truncated or overlong file."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
            if header_length is None or not 2 <= header_length <= MAX_HEADER_BYTES:
                raise CheckpointError(str(file), "is not a safetensors file")
            header_bytes = stream.read(header_length)
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read ({error.strerror})") from error
    if not header_bytes.startswith(b"{"):
        raise CheckpointError(str(file), "is not a safetensors file")
    if len(header_bytes) < header_length:
        raise CheckpointError(
            str(file), f"is truncated: header of {header_length} bytes expected, {len(header_bytes)} found"
        )
    tensors = _parse(file, header_bytes)
    _check_no_overlap_or_gap(file, tensors, first_byte=8 + header_length)
    expected = max((info.start_byte + info.num_bytes for info in tensors), default=8 + header_length)
    if num_bytes < expected:
        raise CheckpointError(str(file), f"is truncated: {expected} bytes expected, {num_bytes} found")
    if num_bytes > expected:
        raise CheckpointError(str(file), f"has bytes after its last tensor: {expected} expected, {num_bytes} found")
    return SafetensorsFile(file=file, num_bytes=num_bytes, header_bytes=header_bytes, tensors=tensors)


def _parse(file: Path, header_bytes: bytes) -> tuple[TensorInfo, ...]:
    try:
        header = parse_json_object(header_bytes, str(file))
    except CheckpointError as error:
        raise CheckpointError(str(file), f"is not a safetensors file: its header {error.problems[0]}") from error
    data_start = 8 + len(header_bytes)
    return tuple(
        _tensor_info(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    )


def _check_no_overlap_or_gap(file: Path, tensors: tuple[TensorInfo, ...], *, first_byte: int) -> None:
    """Refuse tensors that do not follow each other byte by byte, as the safetensors library does.

    Where they shared bytes, a small file could stand for any amount of memory; bytes between them are of no tensor.
    """
    end_byte, before = first_byte, ""
    for info in sorted(tensors, key=lambda info: (info.start_byte, info.num_bytes)):
        if info.start_byte < end_byte:
            raise CheckpointError(str(file), f"tensor {info.name} begins inside tensor {before}")
        if info.start_byte > end_byte:
            raise CheckpointError(
                str(file), f"has {info.start_byte - end_byte} bytes of no tensor before tensor {info.name}"
            )
        end_byte, before = info.start_byte + info.num_bytes, info.name


def _tensor_info(file: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            info = TensorInfo(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                file=file,
                start_byte=data_start + start,
                num_bytes=end - start,
            )
        case _:
            raise CheckpointError(str(file), f"has a malformed header entry for tensor {name}")
    if start < 0 or dtype not in ITEM_BYTES or info.num_elements * ITEM_BYTES[dtype] != info.num_bytes:
        raise CheckpointError(
            str(file), f"tensor {name} of type {dtype} and shape {list(shape)} cannot fill {info.num_bytes} bytes"
        )
    return info
