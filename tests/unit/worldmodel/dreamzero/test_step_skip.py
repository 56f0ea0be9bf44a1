"""When the dynamic schedule leaves steps out: its thresholds, of which the golden velocities keep well clear."""

from __future__ import annotations

import math

import pytest
import torch

from worldmodel.dreamzero.step_skip import DynamicSkipping


@pytest.mark.parametrize(
    ("similarity", "num_skipped"),
    [(0.92, 0), (0.929, 0), (0.931, 2), (0.94, 2), (0.949, 2), (0.951, 4), (0.96, 4), (-0.96, 0)],
)
def test_the_more_alike_two_velocities_the_more_steps_are_left_out(similarity: float, num_skipped: int) -> None:
    skipping, ran = DynamicSkipping(), []
    angle = math.acos(similarity)
    for step in range(2 + num_skipped + 1):
        ran.append(skipping.runs(step))
        if ran[-1]:
            # Every computed velocity is turned by the same angle, and longer than the one before.
            turned = angle * sum(ran)
            skipping.computed((1 + step) * torch.tensor([math.cos(turned), math.sin(turned)]))
    assert ran == [True, True, *[False] * num_skipped, True]
