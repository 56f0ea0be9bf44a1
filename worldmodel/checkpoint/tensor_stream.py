"""Stored tensors, read in pieces by threads while earlier pieces are cast and copied to their place.

    file --reader threads--> staging buffers (pinned for CUDA) --caller's thread--> tensor, cast, on its device

Host memory is the staging buffers, whatever the size of a tensor or file: nothing is mapped, and what the pages of the
operating system's cache hold can be taken back any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.safetensors_header import TensorInfo

PIECE_BYTES = 16 * 1024 * 1024
NUM_BUFFERS = 4
NUM_READERS = 2
"""One reader fills a buffer while the other waits for the disk; two buffers are being copied."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""torch's type for a safetensors word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes `start_byte` and following of a tensor's data."""

    info: TensorInfo
    start_byte: int
    num_bytes: int

    @property
    def is_last(self) -> bool:
        return self.start_byte + self.num_bytes == self.info.num_bytes


class _Buffer:
    """Staging memory that is free again once the copy out of it has finished on the device."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._view = self.bytes.numpy().data
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, descriptor: int, piece: _Piece) -> None:
        """Read a piece. Runs in a reader thread. Raises OSError, EOFError."""
        if self._copied is not None:
            self._copied.synchronize()
        offset, done = piece.info.start_byte + piece.start_byte, 0
        while done < piece.num_bytes:
            count = os.preadv(descriptor, [self._view[done : piece.num_bytes]], offset + done)
            if count == 0:
                raise EOFError(f"ends before byte {offset + piece.num_bytes}, where tensor {piece.info.name} lies")
            done += count

    def mark_copied(self) -> None:
        """Note that the copies out of this buffer have been issued on the current stream."""
        if self._copied is not None:
            self._copied.record()


def stream_tensors(
    infos: Iterable[TensorInfo], dtype: Callable[[TensorInfo], torch.dtype | None], device: torch.device | str
) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Yield every tensor on `device`, file by file in the order of the data, so that reading is sequential.

    `dtype` says which type a tensor is cast to, None for its own. Tensors own their memory. Raises `CheckpointError`.
    """
    ordered = sorted(infos, key=lambda info: (info.file, info.start_byte))
    place = torch.device(device)
    with ExitStack() as stack:
        files = {file: stack.enter_context(_open(file)) for file in dict.fromkeys(info.file for info in ordered)}
        readers = stack.enter_context(ThreadPoolExecutor(NUM_READERS, thread_name_prefix="checkpoint reader"))
        free = deque(_Buffer(place) for _ in range(NUM_BUFFERS))
        reading: deque[tuple[_Piece, _Buffer, Future[None]]] = deque()
        pieces = _pieces(ordered)
        stack.callback(lambda: [future.cancel() for _, _, future in reading])
        out: Tensor | None = None
        while True:
            while free and (piece := next(pieces, None)) is not None:
                buffer = free.popleft()
                reading.append((piece, buffer, readers.submit(buffer.fill, files[piece.info.file].fileno(), piece)))
            if not reading:
                return
            piece, buffer, future = reading.popleft()
            _wait(future, piece.info.file)
            if out is None:
                stored = TORCH_DTYPES[piece.info.dtype]
                out = torch.empty(piece.info.shape, dtype=dtype(piece.info) or stored, device=place)
            _copy_out(buffer, piece, out)
            free.append(buffer)
            if piece.is_last:
                yield piece.info, out
                out = None


def _open(file: Path):
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read ({error.strerror})") from error


def _pieces(infos: list[TensorInfo]) -> Iterator[_Piece]:
    for info in infos:
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(str(info.file), f"tensor {info.name} has type {info.dtype}, which is not read")
        for start in range(0, max(info.num_bytes, 1), PIECE_BYTES):
            yield _Piece(info=info, start_byte=start, num_bytes=min(PIECE_BYTES, info.num_bytes - start))


def _wait(future: Future[None], file: Path) -> None:
    try:
        future.result()
    except (OSError, EOFError) as error:
        raise CheckpointError(str(file), f"cannot be read ({error})") from error


def _copy_out(buffer: _Buffer, piece: _Piece, out: Tensor) -> None:
    """Cast a piece to its place in `out`. To a CUDA device it goes as it is stored: the device casts faster."""
    stored = TORCH_DTYPES[piece.info.dtype]
    source = buffer.bytes[: piece.num_bytes].view(stored)
    first = piece.start_byte // stored.itemsize
    target = out.view(-1)[first : first + source.numel()]
    if out.device.type == "cuda":
        source = source.to(out.device, non_blocking=True)
    target.copy_(source)
    buffer.mark_copied()
