"""The measured speed of the link between host and device: what every plan of streaming is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from offload.host_weights import HostPart, HostPiece
from offload.mapped_memory import MappedMemory
from offload.transports import StagedCopies

PROBE_BYTES = 256 * 1024 * 1024
NUM_COPIES = 4


def measure_link(device: torch.device, *, probe_bytes: int = PROBE_BYTES) -> float:
    """Return bytes a second of copies from page-locked memory to the device, the fastest of a few.

    Takes `probe_bytes` on both sides while it runs. For a device that is the host it is the speed of a plain copy.
    """
    is_cuda = device.type == "cuda"
    source = torch.ones(probe_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty(probe_bytes, dtype=torch.uint8, device=device)
    return probe_bytes / min(
        _copy_s(lambda: target.copy_(source, non_blocking=True), device) for _ in range(NUM_COPIES)
    )


def measure_staged(device: torch.device, *, probe_bytes: int = PROBE_BYTES) -> float:
    """Return bytes a second of staged copies from memory that is not page-locked, the fastest of a few.

    Takes `probe_bytes` on both sides, and staging buffers, while it runs.
    """
    memory = MappedMemory.own(probe_bytes)
    memory.bytes.fill_(1)
    part = HostPart(pieces=(HostPiece(memory=memory, start_byte=0, num_bytes=probe_bytes, buffer_start_byte=0),))
    target = torch.empty(probe_bytes, dtype=torch.uint8, device=device)
    copies = StagedCopies(device)
    return probe_bytes / min(_copy_s(lambda: copies.copy(part, target), device) for _ in range(NUM_COPIES))


def _copy_s(copy: Callable[[], object], device: torch.device) -> float:
    """Return how long one copy takes; the host waits for it, which a copy of this size hides."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    copy()
    if is_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
