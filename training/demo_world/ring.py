"""Walks that are seen a few times and give way to new ones, so that no walk is learnt by heart.

The ring is the training's walks on the device. As steps go by, portions of it are drawn anew in the same order again
and again, at the rate at which clips are taken from it; how large it is does not change how often a walk is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from training.demo_world.dataset import Walks


class WalkRing:
    """Renews `walks` in place, by `portion` walks from `build`, so that each is in about `seen` clips.

    Every step takes `clips_per_step` clips. All processes of a run renew equally much at the same steps.
    """

    def __init__(
        self, walks: Walks, build: Callable[[int], Walks], *, portion: int, clips_per_step: int, seen: float
    ) -> None:
        self.walks = walks
        self._build, self._portion = build, min(portion, len(walks))
        self._walks_per_step = clips_per_step / seen
        self._next, self._due = 0, 0.0
        self.num_renewed = 0
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def step(self) -> None:
        """Count a step, and renew what is due; on a GPU the host does not wait for it."""
        self._due += self._walks_per_step
        while self._due >= self._portion:
            self._due -= self._portion
            self._renew()

    def lasting(self, num_steps: int) -> Tensor:
        """Return the walks that stay for that many steps. Raises ValueError where there are none."""
        num_leaving = self._portion * math.floor((self._due + num_steps * self._walks_per_step) / self._portion)
        num_walks, device = len(self.walks), self.walks.gap_W.device
        if num_leaving >= num_walks:
            raise ValueError(
                f"expected more than the {num_leaving} walks that {num_steps} steps renew; got {num_walks}"
            )
        return (self._next + num_leaving + torch.arange(num_walks - num_leaving, device=device)) % num_walks

    def take_seconds(self) -> float:
        """Return what renewing cost since the last call, in seconds of the device, which must have caught up."""
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        self._seconds, self._spans = 0.0, []
        return seconds

    def _renew(self) -> None:
        on_cuda = self.walks.gap_W.is_cuda
        if on_cuda:
            span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            span[0].record()
            self._spans.append(span)
        began = time.monotonic()
        num_walks = len(self.walks)
        others = self._build(self._portion)
        # The last portion may go round the end.
        first = min(self._portion, num_walks - self._next)
        self.walks.replace(self._next, others.part(0, first))
        self.walks.replace(0, others.part(first, self._portion))
        self._next = (self._next + self._portion) % num_walks
        self.num_renewed += self._portion
        if on_cuda:
            span[1].record()
        else:
            self._seconds += time.monotonic() - began
