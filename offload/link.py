"""The measured speed of the link between host and device: what every plan of streaming is compared with."""

from __future__ import annotations

import time

import torch

PROBE_BYTES = 256 * 1024 * 1024
NUM_COPIES = 4


def measure_link(device: torch.device, *, probe_bytes: int = PROBE_BYTES) -> float:
    """Return bytes a second of copies from page-locked memory to the device, the fastest of a few.

    Takes `probe_bytes` on both sides while it runs. For a device that is the host it is the speed of a plain copy.
    """
    is_cuda = device.type == "cuda"
    source = torch.ones(probe_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty(probe_bytes, dtype=torch.uint8, device=device)
    return probe_bytes / min(_copy_s(source, target) for _ in range(NUM_COPIES))


def _copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return how long one copy takes; the host waits for it, which a copy of this size hides."""
    is_cuda = target.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(target.device)
    started_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    if is_cuda:
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - started_s
