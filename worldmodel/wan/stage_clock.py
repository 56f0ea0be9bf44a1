"""Time the stages of a tick on the device that runs them."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StageClock:
    """Marks between stages of work on one device; on CUDA they cost nothing until the durations are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_marks_s: list[float] = []
        self._device_marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Close a stage (the first call opens the first one)."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._device_marks.append(event)
        else:
            self._host_marks_s.append(time.perf_counter())

    def durations_ms(self) -> tuple[float, ...]:
        """Return the length of each stage in order. On CUDA this waits for the last mark."""
        if self._device.type == "cuda":
            self._device_marks[-1].synchronize()
            return tuple(float(before.elapsed_time(after)) for before, after in pairwise(self._device_marks))
        return tuple(1000.0 * (after - before) for before, after in pairwise(self._host_marks_s))
