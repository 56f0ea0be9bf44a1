"""Which sampler steps run the network. A step that does not reuses the last velocity; the sampler goes on regardless.

Source: DreamZero official code (static masks, and the dynamic schedule with its thresholds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NUM_STEPS = 16

STATIC_STEPS: dict[int, tuple[int, ...]] = {
    5: (0, 1, 2, 7, 12),
    6: (0, 1, 5, 10, 14, 15),
    7: (0, 1, 2, 6, 10, 14, 15),
    8: (0, 1, 2, 6, 10, 13, 14, 15),
    16: tuple(range(NUM_STEPS)),
}
"""Steps that run the network, by how many of them there are."""

LEADING_STEPS = 2
SKIPS_BY_SIMILARITY = ((0.95, 4), (0.93, 2))
"""Steps left out after two velocities whose cosine similarity is above a threshold; the first that fits counts."""


class StepSkipping(Protocol):
    """Decide step by step. One object serves one trajectory."""

    def runs(self, step: int) -> bool:
        """Tell whether this step runs the network; asked once per step, in order."""
        ...

    def computed(self, velocity: Tensor) -> None:
        """Take note of the guided video velocity that the network gave for a step that ran."""
        ...


@dataclass(frozen=True, slots=True)
class StaticSkipping:
    """A fixed set of steps."""

    steps: frozenset[int]

    def runs(self, step: int) -> bool:
        return step in self.steps

    def computed(self, velocity: Tensor) -> None:
        """Do nothing: the steps are fixed."""


class DynamicSkipping:
    """Leave steps out while the velocity hardly turns.

    The first two steps run. Then the last two computed velocities decide how many steps are left out before one runs.
    """

    def __init__(self) -> None:
        self._skips_left = 0
        self._num_computed = 0
        self._last: Tensor | None = None
        self._before: Tensor | None = None
        self._just_skipped = False

    def runs(self, step: int) -> bool:
        if self._skips_left:
            self._skips_left -= 1
            self._just_skipped = True
            return False
        if self._just_skipped or self._num_computed < LEADING_STEPS:
            self._just_skipped = False
            return True
        skips = self._skips()
        if not skips:
            return True
        self._skips_left, self._just_skipped = skips - 1, True
        return False

    def computed(self, velocity: Tensor) -> None:
        self._before, self._last = self._last, velocity
        self._num_computed += 1

    def _skips(self) -> int:
        assert self._last is not None
        assert self._before is not None
        similarity = torch.nn.functional.cosine_similarity(
            self._last.flatten().float(), self._before.flatten().float(), dim=0
        ).item()
        return next((skips for threshold, skips in SKIPS_BY_SIMILARITY if similarity > threshold), 0)


def static_skipping(num_computed: int) -> StaticSkipping:
    """Return the fixed set with this many computed steps. Raises ValueError naming the known counts."""
    if num_computed not in STATIC_STEPS:
        raise ValueError(f"computed steps: expected one of {', '.join(map(str, STATIC_STEPS))}, got {num_computed}")
    return StaticSkipping(frozenset(STATIC_STEPS[num_computed]))
