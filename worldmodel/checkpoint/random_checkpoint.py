"""A checkpoint without files: components with configs, filled with random weights straight on the device.

For benchmarks: a model of any size is there in seconds and needs no disk. What it shows means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.loading import DTypeChoice, NameChoice, Progress
from worldmodel.checkpoint.plan import MAX_SEED
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.clips import RANDOM_SCHEME


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomComponent:
    """One component. `gains` are those of `RandomWeights`."""

    subject: str
    class_name: str
    config: Mapping[str, Any]
    gains: Mapping[str, float]
    seed: int
    folder: Path | None = None

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Nothing is stored."""
        return {}

    def misfits(self, module: nn.Module) -> tuple[Problem, ...]:
        """Find nothing: what a module wants is made for it."""
        return ()

    def load_into(
        self,
        module: nn.Module,
        *,
        dtype: DTypeChoice,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        only: NameChoice | None = None,
    ) -> None:
        """Fill a module as `Component.load_into` says; every tensor it wants is there."""
        weights = RandomWeights(seed=self.seed, device=device, gains=self.gains)
        fill_random(module, weights, dtype=dtype, device=device, progress=progress, only=only)


class RandomCheckpoint:
    """The components of a model under one seed."""

    def __init__(self, model: str, seed: int, components: Mapping[str, RandomComponent]) -> None:
        self.name = f"{RANDOM_SCHEME}{model}:{seed}"
        self._components = dict(components)

    @property
    def digest(self) -> str:
        """Say what these weights are rather than hash them: the digest is shown, logged and compared."""
        return f"{self.name} (random weights, for benchmarks only)"

    def component(self, name: str) -> RandomComponent:
        """Return a component. Raises `CheckpointError` naming the ones that exist."""
        if name not in self._components:
            raise CheckpointError(self.name, f"has no component {name}, only {', '.join(sorted(self._components))}")
        return self._components[name]


def is_random(checkpoint: Path | str) -> bool:
    """Tell a random checkpoint from a folder by its text."""
    return str(checkpoint).startswith(RANDOM_SCHEME)


def parse_random(checkpoint: Path | str) -> tuple[str, int]:
    """Split `random:NAME[:SEED]` into name and seed. Raises `CheckpointError`."""
    name, _, seed = str(checkpoint).removeprefix(RANDOM_SCHEME).partition(":")
    if not name or not re.fullmatch(r"[0-9]{0,16}", seed) or int(seed or "0") > MAX_SEED:
        raise CheckpointError(
            str(checkpoint),
            f"expected {RANDOM_SCHEME}NAME or {RANDOM_SCHEME}NAME:SEED with a seed from 0 to {MAX_SEED}",
        )
    return name, int(seed or "0")
