"""Types of options that the benchmarks share: what can't be measured is refused at once, not minutes later."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from worldmodel.catalog import options_parser
from worldmodel.errors import WorldModelError
from worldmodel.wan.precision import precision_plan


def device_name(text: str) -> str:
    """An option's type: a device that torch can compute on here."""
    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError) as error:
        # Without CUDA torch raises AssertionError.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise argparse.ArgumentTypeError(f"expected a device that torch finds here; {text}: {reason}") from error
    return text


def require_cuda(parser: argparse.ArgumentParser) -> None:
    """End the process unless there is a CUDA device, for a script that runs on nothing else."""
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device; torch finds none")


def precision_name(text: str) -> str:
    """An option's type: the name of a precision plan."""
    try:
        precision_plan(text)
    except (ValueError, WorldModelError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def lingbot_options(text: str) -> dict[str, Any]:
    """An option's type: a JSON object of `[model.options]` of LingBot-World v2."""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object; got {text}") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object; got {text}")
    try:
        options_parser("lingbot_world_v2")(options)
    except WorldModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return options


def new_file(text: str) -> Path:
    """An option's type: a file that can be written; it is written at the end, when a run could be lost."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected the name of a file in a folder that exists; got {text}")
    return file


def old_file(text: str) -> Path:
    """An option's type: a file that is there."""
    file = Path(text)
    if not file.is_file():
        raise argparse.ArgumentTypeError(f"expected a file; {text} is none")
    return file
