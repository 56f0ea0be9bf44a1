"""How long a run lasts."""

from __future__ import annotations

import pytest
import torch

from training.demo_world import transformer
from training.demo_world.transformer import Clock, learning_rate_at


@pytest.mark.parametrize(("seconds", "until"), [(40.0, None), (None, 1140.0)])
def test_a_run_is_over_after_its_time_or_at_its_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, until: float | None
) -> None:
    now = 1000.0
    monkeypatch.setattr(transformer.time, "time", lambda: now)
    clock = Clock(seconds, until, torch.device("cpu"))
    now = 1100.0
    clock.read()
    assert clock.progress == 0
    clock.start()
    now = 1110.0
    assert clock.progress == 0
    clock.read()
    assert (clock.elapsed_s, clock.progress) == (10, 0.25)
    now = 1140.0
    clock.read()
    assert clock.progress == 1


def test_the_rate_stays_and_falls_over_the_last_share_of_the_run() -> None:
    rates = [learning_rate_at(2.0, 1000, progress, 0.5, 0.1) for progress in (0, 0.5, 0.75, 1)]
    assert rates == pytest.approx([2.0, 2.0, 1.1, 0.2])
    assert learning_rate_at(2.0, 0, 0, 0.5, 0.1) == pytest.approx(0.02)
