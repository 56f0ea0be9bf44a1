"""What this process takes of a CUDA device: a bound that torch enforces, and what was taken at most."""

from __future__ import annotations

from collections import Counter

import torch

NUM_SIZES = 20
"""Sizes of tensors that are listed where memory did not suffice."""


def bound_device(device: torch.device, num_bytes: int | None) -> None:
    """Let torch refuse to take more than these bytes of a CUDA device, or with None as much as there is."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else num_bytes / total_bytes, device)


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return what torch has now and had at most, and what its context and libraries (or other processes) have beside.

    `retries` counts allocations that first had to give unused memory back.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    beside_bytes = total_bytes - free_bytes - reserved_bytes
    found = {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": reserved_bytes,
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
        "beside_torch": beside_bytes,
        "device_peak": torch.cuda.max_memory_reserved(device) + beside_bytes,
    }
    shown = {name: round(num_bytes / 2**30, 3) for name, num_bytes in found.items()}
    return {**shown, "retries": float(torch.cuda.memory_stats(device)["num_alloc_retries"])}


def live_sizes(device: torch.device) -> str:
    """Say which sizes of memory are in use now, those that take most first, and what torch holds unused."""
    used: Counter[int] = Counter()
    unused: Counter[int] = Counter()
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == device.index:
            for block in segment["blocks"]:
                (unused if block["state"] == "inactive" else used)[block["size"]] += 1
    return f"in use: {_largest(used)}\nunused: {_largest(unused)}"


def _largest(sizes: Counter[int]) -> str:
    ranked = sorted(sizes.items(), key=lambda item: -item[0] * item[1])
    shown = ", ".join(f"{count} x {size / 2**20:.1f} MiB" for size, count in ranked[:NUM_SIZES])
    rest = sum(size * count for size, count in ranked[NUM_SIZES:])
    return f"{shown}, others {rest / 2**20:.0f} MiB"
