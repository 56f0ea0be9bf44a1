"""How many sessions fit on this worker's device, and how much memory is in use.

Which session leaves when all places are taken is the server's decision; a worker refuses what does not fit.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil
import torch

from kvcache.attention import Attention
from kvcache.cache import KVCache
from kvcache.errors import BudgetTooSmall
from kvcache.spec import KVSpec
from worldmodel.errors import LoadFailed
from worldmodel.messages import MemoryStats, StartWorker

logger = logging.getLogger(__name__)

KV_DTYPES: dict[int, torch.dtype] = {4: torch.float32, 2: torch.bfloat16, 1: torch.float8_e4m3fn}
"""Number format of stored K/V by its size in bytes."""


def plan_capacity(spec: KVSpec, start: StartWorker) -> int:
    """Return how many sessions fit beside the loaded weights, at most `start.requested_sessions`.

    On a CPU the budget is `start.memory_bytes` (None: as many as requested), on CUDA a fraction of what is free now, or
    left of `start.offload.device_bytes`.
    If one session needs more than the fraction, but not more than is free, it is served and a warning says so. Raises
    `LoadFailed` with the numbers if not even one fits.
    """
    spec = replace(spec, requested_sessions=start.requested_sessions)
    is_cpu = torch.device(start.device).type != "cuda"
    if not is_cpu:
        free_bytes, _ = torch.cuda.mem_get_info(start.device)
        if start.offload.device_bytes is not None:
            free_bytes = min(free_bytes, start.offload.device_bytes - torch.cuda.memory_reserved(start.device))
        fraction = start.gpu_memory_fraction
    elif start.memory_bytes is None:
        return start.requested_sessions
    else:
        free_bytes, fraction = start.memory_bytes, 1.0
    try:
        capacity = spec.capacity(free_bytes, fraction)
    except BudgetTooSmall as error:
        bound = " (on a CPU these are kvcache.cpu_memory_bytes)" if is_cpu else ""
        raise LoadFailed(f"no session fits in memory: {error}{bound}", code="out_of_memory") from error
    _log_capacity(spec, capacity, free_bytes=free_bytes, fraction=fraction)
    return capacity


def _log_capacity(spec: KVSpec, capacity: int, *, free_bytes: int, fraction: float) -> None:
    one, budget_bytes = spec.required_bytes(1), int(free_bytes * fraction)
    more = spec.required_bytes(2) - one
    numbers = (
        f"the first takes {one} bytes, each other {more}, and {budget_bytes} of {free_bytes} free bytes may be used "
        f"(fraction {fraction:g})"
    )
    if one > budget_bytes:
        logger.warning("capacity raised to one session although the budget holds none: %s", numbers)
    elif capacity < spec.requested_sessions:
        logger.warning("%d of the %d sessions requested fit: %s", capacity, spec.requested_sessions, numbers)
    else:
        logger.info("all sessions requested fit (%d): %s", capacity, numbers)


def allocate_cache(spec: KVSpec, start: StartWorker, attention: Attention | None = None) -> KVCache:
    """Allocate K/V storage for as many sessions as fit. `attention` of None is torch's. Raises `LoadFailed`."""
    capacity = plan_capacity(spec, start)
    dtype = KV_DTYPES[spec.element_bytes]
    try:
        return KVCache(spec, capacity=capacity, device=start.device, dtype=dtype, attention=attention)
    except torch.OutOfMemoryError as error:
        raise LoadFailed(
            f"K/V storage of {spec.storage_bytes(capacity)} bytes for {capacity} sessions could not be allocated",
            code="out_of_memory",
        ) from error


def memory_stats(cache: KVCache, device: torch.device) -> MemoryStats:
    """Read the accounting of the cache and the memory of this process."""
    return MemoryStats(
        sessions=len(cache.session_ids),
        total_pages=cache.total_pages,
        free_pages=cache.free_pages,
        rss_bytes=psutil.Process().memory_info().rss,
        device_bytes=torch.cuda.memory_reserved(device) if device.type == "cuda" else 0,
    )
