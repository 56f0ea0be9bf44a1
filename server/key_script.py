"""Key scripts of the command line: which keys are down in each latent frame, written by hand.

A script is a list of steps, separated by spaces. A step is the keys that are down, or "-" for none, and how many latent
frames they stay down: "w*6 wl*3 -*3 i" walks for six frames, turns right while walking for three, rests for three,
looks up for one.
"""

from __future__ import annotations

import re

KEYS = "wasdijkl"
MAX_LATENT_FRAMES = 100_000

_STEP = re.compile(r"(?P<keys>[^*]+)(?:\*(?P<count>[0-9]{1,6}))?")


class KeyScriptError(ValueError):
    """Report a script that can't be read. `column` counts characters from 1."""

    def __init__(self, column: int, problem: str) -> None:
        super().__init__(f"key script, column {column}: {problem}")
        self.column = column


def parse_key_script(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the keys of each latent frame; an empty script has no frames. Raises `KeyScriptError`."""
    frames: list[tuple[str, ...]] = []
    for match in re.finditer(r"\S+", text):
        keys, count = _parse_step(match.group(), match.start() + 1)
        if len(frames) + count > MAX_LATENT_FRAMES:
            raise KeyScriptError(match.start() + 1, f"expected at most {MAX_LATENT_FRAMES} latent frames in all")
        frames.extend([keys] * count)
    return tuple(frames)


def _parse_step(step: str, column: int) -> tuple[tuple[str, ...], int]:
    match = _STEP.fullmatch(step)
    if match is None:
        raise KeyScriptError(column, f"expected KEYS or KEYS*COUNT, got {step[:40]!r}")
    count = int(match["count"] or 1)
    if count == 0:
        raise KeyScriptError(column, f"expected a count of at least 1, got {step[:40]!r}")
    if match["keys"] == "-":
        return (), count
    for offset, key in enumerate(match["keys"]):
        if key not in KEYS:
            raise KeyScriptError(column + offset, f"unknown key {key!r}: expected one of {', '.join(KEYS)}, or - alone")
        if key in match["keys"][:offset]:
            raise KeyScriptError(column + offset, f"key {key!r} is given twice")
    return tuple(match["keys"]), count
