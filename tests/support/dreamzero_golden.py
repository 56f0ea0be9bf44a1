"""Load the golden vectors of DreamZero. A missing folder, file or tensor is an error, never a skip.

The folder is `$WORLDSERVE_GOLDEN_DIR/dreamzero`, by default the copy in `tests/golden/data`. Any file set with the same
names may stand there: sizes come from `manifest.json` and from tensor shapes.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

DEFAULT_ROOT = Path(__file__).resolve().parent.parent / "golden" / "data"

ATOL, RTOL = 2e-4, 1e-3
"""Tolerance of float32 outputs, from the README of the files."""


def golden_dir() -> Path:
    """Return the folder with the DreamZero golden files; fail if it does not exist."""
    folder = Path(os.environ.get("WORLDSERVE_GOLDEN_DIR") or DEFAULT_ROOT) / "dreamzero"
    if not folder.is_dir():
        raise FileNotFoundError(f"golden folder {folder} does not exist: set WORLDSERVE_GOLDEN_DIR to its parent")
    return folder


def manifest() -> dict[str, Any]:
    """Return `manifest.json`: sizes, cases, calls, and the statistics of the synthetic data set."""
    return _manifest(golden_dir() / "manifest.json")


@functools.cache
def _manifest(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def rollouts() -> list[str]:
    """Return the names of all cases that are whole policy calls."""
    return sorted(case for case in manifest()["cases"] if case.startswith("rollout_"))


def head_options(case: str) -> dict[str, Any]:
    """Return the settings of the action head that a rollout changes, as the note of its file says them."""
    found = re.search(r"head options (\{.*?\})", manifest()["files"][f"{case}.safetensors"]["note"])
    options = {} if found is None else ast.literal_eval(found[1])
    assert isinstance(options, dict)
    return options


@functools.cache
def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"golden file {path} does not exist")
    return load_file(path)


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Return every tensor of one file, for example ``tensors("dit_single")``. Shared between tests: do not write."""
    return dict(_tensors(golden_dir() / f"{name}.safetensors"))


def assert_close(
    got: torch.Tensor, want: torch.Tensor, what: str = "tensor", *, atol: float = ATOL, rtol: float = RTOL
) -> None:
    """Fail with the largest difference if any element is out of tolerance."""
    assert got.shape == want.shape, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    difference = (got.double() - want.double()).abs()
    allowed = atol + rtol * want.double().abs()
    assert bool((difference <= allowed).all()), f"{what}: largest difference {float(difference.max()):.3e}"
