"""Load the golden vectors of LingBot-World v2. A missing folder, file or tensor is an error, never a skip.

The folder is `$WORLDSERVE_GOLDEN_DIR/lingbot`, by default the copy in `tests/golden/data`. Any file set with the same
names may stand there: sizes come from `manifest.json` and from tensor shapes.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

DEFAULT_ROOT = Path(__file__).resolve().parent.parent / "golden" / "data"


def golden_dir() -> Path:
    """Return the folder with the LingBot golden files; fail if it does not exist."""
    folder = Path(os.environ.get("WORLDSERVE_GOLDEN_DIR") or DEFAULT_ROOT) / "lingbot"
    if not folder.is_dir():
        raise FileNotFoundError(f"golden folder {folder} does not exist: set WORLDSERVE_GOLDEN_DIR to its parent")
    return folder


def load_json(name: str) -> Any:
    """Parse one JSON file of the golden folder."""
    return json.loads((golden_dir() / name).read_text(encoding="utf-8"))


def manifest() -> dict[str, Any]:
    """Return `manifest.json`: sizes, schedules, scripts, and shape and dtype of each tensor."""
    return _manifest(golden_dir() / "manifest.json")


@functools.cache
def _manifest(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@functools.cache
def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"golden file {path} does not exist")
    return load_file(path)


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Return every tensor of one file, for example ``tensors("case1_forward")``. Shared between tests: do not write."""
    return dict(_tensors(golden_dir() / f"{name}.safetensors"))


def max_abs(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest absolute difference in float64; shapes must be equal and values finite."""
    assert got.shape == want.shape, f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    assert bool(torch.isfinite(got).all()), "values are not finite"
    return float((got.double() - want.double()).abs().max())


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "tensor") -> None:
    """Fail if any element differs by more than `tolerance`."""
    difference = max_abs(got, want)
    assert difference <= tolerance, f"{what}: largest difference {difference:.3e}, tolerance {tolerance:.1e}"
