"""Drive through a world with a gamepad: `python -m clients.examples.drive_by_gamepad [URL] [--token TOKEN]`.

The left stick walks, the right stick looks. A stick is as good as the keys it stands for: past the dead zone they are
held.
"""

from __future__ import annotations

import sys

from clients.examples.command import URL, arguments_of, run
from clients.examples.window import Pad, first_pad, walk

DEAD_ZONE = 0.35
AXES = ("ad", "ws", "jl", "ik")
"""For each axis the keys at -1 and at +1: left stick x and y, right stick x and y. Up is -1."""


def keys_of(pad: Pad) -> tuple[str, ...]:
    """Return the keys that the sticks stand for."""
    values = [pad.get_axis(axis) for axis in range(min(len(AXES), pad.get_numaxes()))]
    return tuple(AXES[axis][value > 0] for axis, value in enumerate(values) if abs(value) > DEAD_ZONE)


async def main(url: str = URL, token: str | None = None) -> None:
    pad = first_pad()
    await walk(url, lambda: keys_of(pad), token=token)


if __name__ == "__main__":
    url, token = arguments_of(__doc__, optional=[("URL", URL)])
    sys.exit(run(lambda: main(url, token)))
