"""Every removal that is timed against its plain form equals it, at a tiny size, and names a test that is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import removals
from benchmarks.removals_world import build_world

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
NUM_REMOVALS = 8
"""Those that a CPU has."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_removal_equals_its_plain_form(precision: str) -> None:
    with torch.inference_mode():
        rows = removals.measure(build_world("tiny", CPU, precision), repeats=1)
    assert len(rows) == NUM_REMOVALS
    assert {row.name: row.difference for row in rows if row.difference > row.tolerance} == {}


def test_every_test_that_is_named_is_there() -> None:
    names = [value for name, value in vars(removals).items() if name.endswith("_TEST")]
    assert names
    for name in names:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_another_result_is_seen() -> None:
    removal = removals.Removal(
        name="one of four",
        plain=lambda: torch.full((4,), 2.0),
        served=lambda: torch.tensor([2.0, 2.0, 1.5, 2.0]),
        test="",
    )
    assert removals.time_removal(removal, CPU, repeats=1).difference == 0.25
    with pytest.raises(ValueError, match=r"expected a result \(4,\), got \(3,\)"):
        removals.time_removal(replace(removal, served=lambda: torch.zeros(3)), CPU, repeats=1)
