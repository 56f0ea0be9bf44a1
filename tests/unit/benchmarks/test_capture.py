"""The forms that are measured against each other compute the same; a CPU runs those without a graph, at a tiny size."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import capture


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[capture.Timed]:
    meter = capture.Meter(torch.device("cpu"), 1)
    monkeypatch.setattr(capture, "Meter", lambda device, repeats: meter)
    monkeypatch.setattr(sys, "argv", ["capture", "--tiny", "--device", "cpu", "--repeats", "1", *arguments])
    capture.main()
    assert not meter.failures
    return meter.rows


@pytest.mark.slow
def test_layers_compiled_between_their_attentions_equal_those_as_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(monkeypatch, "--precision", "fp32", "--backend", "eager")
    assert [row.name for row in rows] == ["as it serves", "layers as written", "layers compiled"]
    assert all(row.distance < 1e-5 for row in rows)
    # Three pieces, compiled once for all layers.
    assert "'compiled_graphs': 3" in capsys.readouterr().out


def test_a_robot_models_forward_is_measured_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = run(monkeypatch, "--model", "dreamzero", "--precision", "fp32")
    assert (row.name, row.distance) == ("as it serves", 0.0)
