"""Files of torch.save: names, types, shapes and places of their tensors, without tensor data and without trust.

torch reads the index with `weights_only=True` into tensors that have no memory; where the data lies in the file comes
with it, so that the tensors are read like those of a safetensors file.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import get_unsafe_globals_in_checkpoint

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.checkpoint.tensor_stream import TORCH_DTYPES

_MAX_INDEX_BYTES = 100_000_000
_MAX_OBJECTS = 5
_MAX_OBJECT_CHARS = 100
# What torch's reader raises for an index that was not written by torch.save: it checks what is called, not with what.
_UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    OSError,
)
_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


def read_torch_index(file: Path) -> tuple[TensorInfo, ...]:
    """List the tensors of a file that holds one dictionary of them. Raises `CheckpointError` for anything else."""
    _check_archive(file)
    try:
        with FakeTensorMode():
            content = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(str(file), _what_else(file)) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise CheckpointError(str(file), "must hold one dictionary from names to tensors")
    num_bytes = file.stat().st_size
    return tuple(_tensor_info(file, num_bytes, name, tensor) for name, tensor in content.items())


def _what_else(file: Path) -> str:
    """Say what an index names that tensors don't need, as far as it can be followed without being run.

    What torch says of it is advice to run it.
    """
    expected = "expected one dictionary from names to tensors, as torch.save writes a state dict"
    try:
        found = sorted(name[:_MAX_OBJECT_CHARS] for name in get_unsafe_globals_in_checkpoint(file))
    except (*_UNREADABLE, AssertionError, struct.error):
        found = []
    if not found:
        return f"is no file of plain tensors: its index is damaged or of another kind, {expected}"
    rest = f" and {len(found) - _MAX_OBJECTS} more" if len(found) > _MAX_OBJECTS else ""
    return f"is no file of plain tensors: it holds objects of {', '.join(found[:_MAX_OBJECTS])}{rest}, {expected}"


def _check_archive(file: Path) -> None:
    """Check what torch.load would trust: that this is an uncompressed archive with an index of reasonable size."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise CheckpointError(str(file), f"is compressed, which torch.save never does ({packed[0]})")
            orders = [_start_of(archive, entry) for entry in entries if entry.filename.endswith("/byteorder")]
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read ({error.strerror})") from error
    except (zipfile.BadZipFile, ValueError, RuntimeError) as error:
        raise CheckpointError(
            str(file), "is truncated, or not written by torch.save of version 1.6 or later"
        ) from error
    if any(order.strip() != b"little" for order in orders):
        raise CheckpointError(str(file), f"must be little-endian, its byte order is {orders[0]!r}")
    index = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if index > _MAX_INDEX_BYTES:
        raise CheckpointError(str(file), f"has an index of {index} bytes, at most {_MAX_INDEX_BYTES} are read")


def _start_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as stream:
        return stream.read(16)


def _tensor_info(file: Path, file_bytes: int, name: str, tensor: torch.Tensor) -> TensorInfo:
    if tensor.dtype not in _WORDS:
        raise CheckpointError(str(file), f"tensor {name} has type {tensor.dtype}, which is not read")
    if not tensor.is_contiguous():
        raise CheckpointError(str(file), f"tensor {name} is not stored contiguously")
    # torch tells where a storage without memory lies in its file, for exactly this use.
    storage_start = tensor.untyped_storage()._checkpoint_offset
    if storage_start is None:
        raise CheckpointError(str(file), f"tensor {name} has no place in the file")
    info = TensorInfo(
        name=name,
        dtype=_WORDS[tensor.dtype],
        shape=tuple(tensor.shape),
        file=file,
        start_byte=storage_start + int(tensor.storage_offset()) * tensor.itemsize,
        num_bytes=tensor.numel() * tensor.itemsize,
    )
    if info.start_byte + info.num_bytes > file_bytes:
        raise CheckpointError(str(file), f"tensor {name} would end behind the end of the file")
    return info
