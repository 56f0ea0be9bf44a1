"""Counts that would leave nothing to measure are refused at once, not by an error at the end of a run."""

from __future__ import annotations

import importlib
import sys

import pytest

FEWEST = {
    "capture": {"repeats": 1},
    "demo_parts": {"threads": 1, "chunks": 1},
    "dreamzero_call": {"rounds": 1, "sessions": 1},
    "event_loop_lag": {"sessions": 1, "fps": 1, "cores": 1},
    "fp8_fidelity": {"chunks": 1, "num-walks": 1},
    "full_size": {"chunks": 1, "sessions": 1},
    "graphs_served": {"rounds": 1, "chunks": 1},
    "offload_rate": {"chunks": 2},
    "parts": {"repeats": 1},
    "removals": {"repeats": 1},
    "robot_calls": {"robots": 1},
    "vae_precision": {"chunks": 1},
}
"""What each script needs at least. The first chunk of a row of `offload_rate` is not counted."""


@pytest.mark.parametrize("script", FEWEST)
def test_too_few_are_refused_by_name(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{script}")
    for option, fewest in FEWEST[script].items():
        monkeypatch.setattr(sys, "argv", [script, f"--{option}", str(fewest - 1)])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 2
        assert f"argument --{option}: expected a finite number and at least {fewest}" in capsys.readouterr().err
