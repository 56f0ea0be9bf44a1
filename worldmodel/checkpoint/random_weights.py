"""Random weights of a realistic scale, in seconds and the same on every device: for benchmarks and test checkpoints.

All values come from one sequence of normal numbers of a prime length. A tensor reads it from a place that its name
decides, as often around as it is long: no two rows of a matrix are equal, and filling a tensor costs one scaled copy.
Values are scaled in float32 and then rounded, so that a tensor depends on its name, shape, type and the seed only, not
on the device or on the order of filling.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from worldmodel.checkpoint.loading import (
    DTypeChoice,
    NameChoice,
    Progress,
    check_other_buffers,
    choose_names,
    fill_module,
    names_by_tensor,
)

PERIOD = 16_777_213
"""Length of the sequence: the largest prime below 2^24, so that no row length divides it."""

NORM_SPREAD = 0.02
BIAS_SPREAD = 0.02


class RandomWeights:
    """Draw tensors by name. Keeps the sequence, 64 MiB, on `device`.

    Args:
        seed: Another seed gives other values everywhere.
        device: Where tensors are made.
        gains: Factors on the default spread by name pattern (`*` matches anything); the first match counts.
    """

    def __init__(
        self, *, seed: int, device: torch.device | str = "cpu", gains: Mapping[str, float] | None = None
    ) -> None:
        self._seed = seed
        self._gains = dict(gains or {})
        generator = torch.Generator().manual_seed(seed)
        self._sequence = torch.randn(PERIOD, generator=generator).to(device)

    def with_gains(self, gains: Mapping[str, float]) -> RandomWeights:
        """Return the same values under other gains; the sequence is shared."""
        other = RandomWeights.__new__(RandomWeights)
        other._seed, other._sequence, other._gains = self._seed, self._sequence, dict(gains)
        return other

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor on the device.

        Norm weights are near 1, biases near 0; matrices have the spread 1 / sqrt(inputs) times their gain, so that
        a layer keeps the size of what goes through it. `W` and `b` are a linear of several categories, [categories,
        inputs, outputs] and [categories, outputs]; every other matrix has its outputs in front.
        """
        mean, spread = self._scale(name, shape)
        out = torch.empty(shape, dtype=dtype, device=self._sequence.device)
        flat = out.view(-1)
        start, done = self._start(name), 0
        while done < flat.numel():
            count = min(PERIOD - start, flat.numel() - done)
            flat[done : done + count].copy_(self._sequence[start : start + count].mul(spread).add_(mean))
            start, done = 0, done + count
        return out

    def _scale(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        leaf = name.rpartition(".")[2]
        if leaf in ("bias", "b"):
            return 0.0, BIAS_SPREAD
        if leaf == "gamma" or math.prod(shape) == max(shape, default=1):
            return 1.0, NORM_SPREAD
        gain = next((gain for pattern, gain in self._gains.items() if fnmatch.fnmatchcase(name, pattern)), 1.0)
        num_inputs = shape[1] if leaf == "W" else math.prod(shape[1:])
        return 0.0, gain / math.sqrt(num_inputs)

    def _start(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed}:{name}".encode()).digest()[:8]) % PERIOD


def fill_random(
    module: nn.Module,
    weights: RandomWeights,
    *,
    dtype: DTypeChoice,
    device: torch.device | str,
    progress: Progress | None = None,
    only: NameChoice | None = None,
) -> None:
    """Fill a module's parameters and persistent buffers like a checkpoint would; it may be on the meta device.

    `device` must be that of `weights`. Names that share a parameter share one tensor, named by the first of them.
    `only` leaves alone what it does not accept by name.
    """
    wanted = names_by_tensor(module)
    check_other_buffers(module, wanted)
    wanted = wanted if only is None else choose_names(wanted, only)

    def drawn() -> Iterator[tuple[list[str], Tensor, int]]:
        for slot, names in wanted:
            made = weights.tensor(names[0], tuple(slot.shape), chosen(slot, names[0]))
            yield names, made, made.nbytes

    def chosen(slot: Tensor, name: str) -> torch.dtype:
        if not slot.is_floating_point():
            return slot.dtype
        return dtype if isinstance(dtype, torch.dtype) else dtype(name)

    total_bytes = sum(slot.numel() * chosen(slot, names[0]).itemsize for slot, names in wanted)
    fill_module(module, drawn(), device=device, total_bytes=total_bytes, progress=progress)
