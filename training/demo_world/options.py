"""Types of command line options that refuse what a run would only stumble over minutes later."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from training.demo_world.files import expect_whole
from worldmodel.checkpoint.errors import CheckpointError


def number(
    *, above: float | None = None, least: float | None = None, most: float | None = None, below: float | None = None
) -> Callable[[str], float]:
    """Return an option type: a finite number within the bounds."""

    def read(text: str) -> float:
        value = float(text)
        _expect_within(value, text, above, least, most, below)
        return value

    read.__name__ = "number"
    return read


def count(*, least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an option type: a whole number within the bounds."""

    def read(text: str) -> int:
        value = int(text)
        _expect_within(value, text, None, least, most, None)
        return value

    read.__name__ = "whole number"
    return read


def folder_with(*names: str) -> Callable[[str], Path]:
    """Return an option type: a folder that is there and holds these."""

    def read(text: str) -> Path:
        folder = Path(text)
        missing = [name for name in names if not (folder / name).exists()]
        if not folder.is_dir() or missing:
            found = f"one without {' and '.join(missing)}" if folder.is_dir() else "none"
            wanted = f"a folder with {' and '.join(names)}" if names else "a folder"
            raise argparse.ArgumentTypeError(f"expected {wanted}; {text} is {found}")
        return folder

    read.__name__ = "folder"
    return read


def trained_part(text: str) -> Path:
    """An option's type: a component's diffusers folder whose weights are all there."""
    folder = folder_with("config.json")(text)
    try:
        expect_whole(folder)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return folder


def make_out(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of `--out`; ends the process, naming the option, where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"argument --out: expected a folder to write to; {folder}: {error.strerror}")


def _expect_within(
    value: float, text: str, above: float | None, least: float | None, most: float | None, below: float | None
) -> None:
    bounds = [
        (above, f"above {above}", lambda bound: value > bound),
        (least, f"at least {least}", lambda bound: value >= bound),
        (most, f"at most {most}", lambda bound: value <= bound),
        (below, f"below {below}", lambda bound: value < bound),
    ]
    asked = [(says, holds(bound)) for bound, says, holds in bounds if bound is not None]
    if not math.isfinite(value) or not all(holds for _, holds in asked):
        wanted = " and ".join(["a finite number", *(says for says, _ in asked)])
        raise argparse.ArgumentTypeError(f"expected {wanted}; got {text}")
