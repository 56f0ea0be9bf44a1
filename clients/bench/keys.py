"""Random keys from a seed: what the viewers of a benchmark press, and when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

HELD_KEYS: tuple[tuple[str, ...], ...] = (
    ("w",),
    ("w", "j"),
    ("w", "l"),
    ("a",),
    ("d",),
    ("s",),
    ("j",),
    ("l",),
    ("w", "i"),
    ("w", "k"),
    (),
)
"""Sets of keys that a player may hold. Two that follow each other differ, so that every event changes something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPress:
    """Hold exactly `keys`, `wait_s` after the press before."""

    wait_s: float
    keys: tuple[str, ...]


def key_presses(*, events_per_second: float, seed: int, session: int) -> Iterator[KeyPress]:
    """Yield presses without end; equal arguments give equal presses.

    Waits are exponential with mean 1 / events_per_second (a Poisson process), so that presses do not fall into step
    with chunks.
    """
    source = random.Random(f"{seed}/{session}")
    held: tuple[str, ...] = ()
    while True:
        held = source.choice([keys for keys in HELD_KEYS if keys != held])
        yield KeyPress(wait_s=source.expovariate(events_per_second), keys=held)
