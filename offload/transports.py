"""How the bytes of a part travel from the host to a buffer of the device.

direct    host memory that is page-locked --> device                     at the speed of the link
staged    host memory --> one of two page-locked buffers --> device      at the speed of a processor's copying
sharded   own share --> device, then all ranks exchange their shares     see `sharded.py`
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offload.host_weights import HostPart

STAGING_BYTES = 32 * 1024 * 1024
"""Size of one staging buffer: the fastest with 4 or 8 host threads, and with 16 as fast as 64 MiB (docs/offload.md)."""

NUM_STAGING_BUFFERS = 2
"""One is filled by the host while the device empties the other."""


class Transport(Protocol):
    """Issue the copies of a part on the current stream.

    `num_ahead` layers may be issued before they are needed: two where issuing costs the host nothing, one where the
    host works for it and would otherwise keep the device waiting.
    """

    @property
    def num_ahead(self) -> int: ...

    def buffer_bytes(self, num_bytes: int) -> int:
        """Return the size of a buffer for a part of `num_bytes`; what is past the part belongs to the transport."""
        ...

    def copy(self, part: HostPart, buffer: Tensor) -> None:
        """Bring a part's bytes to `buffer`, uint8. Raises `CopyFailed` or `RanksDisagree`."""
        ...


class DirectCopies:
    """Copy straight from host memory. For a CUDA device that memory must be page-locked, or every copy is a wait."""

    num_ahead = 2

    def buffer_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def copy(self, part: HostPart, buffer: Tensor) -> None:
        for piece in part.pieces:
            target = buffer[piece.buffer_start_byte : piece.buffer_start_byte + piece.num_bytes]
            target.copy_(piece.source, non_blocking=True)


class _StagingBuffer:
    """Page-locked memory that is free again once the copy out of it has finished on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None

    def wait_free(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def mark_copied(self) -> None:
        if self._copied is not None:
            self._copied.record()


class StagedCopies:
    """Copy through two bounded, page-locked buffers; works from any host memory and never locks more than these."""

    num_ahead = 1

    def __init__(self, device: torch.device, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._buffers = [_StagingBuffer(staging_bytes, device) for _ in range(NUM_STAGING_BUFFERS)]
        self._staging_bytes = staging_bytes
        self._next = 0

    def buffer_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def copy(self, part: HostPart, buffer: Tensor) -> None:
        for piece in part.pieces:
            for start_byte in range(0, piece.num_bytes, self._staging_bytes):
                source = piece.source[start_byte : start_byte + self._staging_bytes]
                first = piece.buffer_start_byte + start_byte
                self._copy_run(source, buffer[first : first + source.numel()])

    def _copy_run(self, source: Tensor, target: Tensor) -> None:
        staging = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_STAGING_BUFFERS
        staging.wait_free()
        staged = staging.bytes[: source.numel()]
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        staging.mark_copied()
