"""The speed of the link is that of the copies that streaming makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload import link
from offload.host_weights import HostPart
from offload.transports import StagedCopies

CPU = torch.device("cpu")


@pytest.mark.parametrize("measure", [link.measure_link, link.measure_staged])
def test_the_fastest_copy_counts(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., float]) -> None:
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 25.0, 30.0, 39.0])
    monkeypatch.setattr(link.time, "perf_counter", lambda: next(times))
    assert measure(CPU, probe_bytes=1024) == 512.0


def test_staged_copies_are_measured_through_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = StagedCopies.copy

    def copy(self: StagedCopies, part: HostPart, buffer: torch.Tensor) -> None:
        real(self, part, buffer)
        copied.append(int(buffer.sum()))

    monkeypatch.setattr(StagedCopies, "copy", copy)
    assert link.measure_staged(CPU, probe_bytes=1000) > 0
    assert copied == [1000] * link.NUM_COPIES
