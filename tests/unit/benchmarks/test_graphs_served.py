"""Chunks through graphs and plain ones follow each other in one session; a tape stands in for graphs on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import full_size, graphs_served
from kvcache.attention_indexed import GatheredAttention
from kvcache.spec import KVSpec
from tests.support.graph_tape import TapeRecorder
from worldmodel.kernels.names import GraphChoice
from worldmodel.lingbot import acceleration
from worldmodel.wan.captured import CapturedForwards


@pytest.mark.slow
def test_both_kinds_are_served_and_give_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def create(choice: GraphChoice, kv: KVSpec, *_: object, **__: object) -> CapturedForwards:
        return CapturedForwards(choice, kv, GatheredAttention(), TapeRecorder())

    monkeypatch.setattr(acceleration, "create_graphs", create)
    monkeypatch.setattr(full_size, "FIRST_STEADY_CHUNK", 1)
    asked = ["--tiny", "--device", "cpu", "--precision", "fp32", "--rounds", "2", "--chunks", "1"]
    monkeypatch.setattr(sys, "argv", ["graphs_served", *asked, "--json", str(tmp_path / "out.json")])
    graphs_served.main()
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["graphs"].count("ms in a graph") == 2
    assert 0 < report["graphs_bytes"] < report["graphs_planned_bytes"] < report["worker_owned_bytes"]
    assert report["distance_of_first_chunk"] < 1e-5
    assert {kind: [row["chunk"] for row in rows] for kind, rows in report["rows"].items()} == {
        "graphs": [1.0, 3.0],
        "plain": [2.0, 4.0],
    }
