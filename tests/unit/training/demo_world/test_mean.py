"""The mean of runs."""

from __future__ import annotations

from pathlib import Path

import torch

from training.demo_world.mean import average
from training.demo_world.model import DemoModel, export


def test_the_mean_of_two_runs_lies_half_way_between_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = DemoModel(), DemoModel()
    with torch.no_grad():
        for model in (first, second):
            for parameter in model.parameters():
                # What bfloat16 holds exactly, the mean of two too.
                parameter.copy_(torch.randint(-8, 8, parameter.shape) / 8)
    export(first, tmp_path / "first")
    export(second, tmp_path / "second")
    mean = average([tmp_path / "first", tmp_path / "second"])
    for ours, one, other in zip(mean.parameters(), first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, (one + other) / 2, atol=0, rtol=0)
