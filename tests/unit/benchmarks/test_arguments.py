"""A benchmark refuses in one sentence, before it loads anything, what it would fail on minutes later."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.demo_walks import Walk, save_walks
from benchmarks.provenance import provenance

ROOT = Path(__file__).parents[3]
TINY = ("--tiny", "--device", "cpu")


def refusal(
    script: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the last line of what a script says as it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{script}").main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("full_size", (*TINY, "--json", "/no/such/folder/x.json"), "argument --json: expected the name of a file in"),
        ("removals", ("--json", "/"), "argument --json: expected the name of a file in a folder that exists; got /"),
        ("full_size", (*TINY, "--precision", "fp9"), "argument --precision: unknown precision 'fp9': expected one of"),
        ("full_size", (*TINY, "--options", "x"), "argument --options: expected a JSON object; got x"),
        ("graphs_served", (*TINY, "--options", "[1]"), "argument --options: expected a JSON object; got [1]"),
        (
            "graphs_served",
            (*TINY, "--options", '{"bogus": 1}'),
            "argument --options: bogus: unknown key 'bogus'",
        ),
        (
            "full_size",
            (*TINY, "--device", "cuda:99"),
            "argument --device: expected a device that torch finds",
        ),
        ("full_size", (*TINY, "--profile"), "argument --profile: expected --device cuda; got cpu"),
        ("removals", ("--scale", "full"), "argument --scale: full needs about 40 GB of a CUDA device"),
        ("capture", (*TINY, "--scale", "14b"), "argument --scale: expected --model dreamzero without --tiny"),
        ("fp8_fidelity", TINY, "argument --tiny: expected --random-layers, since the demo world has one size"),
        ("fp8_fidelity", ("--walks", "/no/walks.npz"), "argument --walks: expected a file; /no/walks.npz is none"),
    ],
)
def test_what_cannot_be_run_is_refused(
    script: str,
    arguments: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert expected in refusal(script, arguments, monkeypatch, capsys)


@pytest.mark.parametrize("script", ["parts", "fp8_fidelity"])
def test_a_missing_device_is_one_sentence(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "expected a CUDA device; torch finds none" in refusal(script, (), monkeypatch, capsys)


def test_walks_of_more_chunks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = np.zeros((1, 2, 2, 3), np.uint8)
    save_walks([Walk(image=picture[0], prompt="a town", held=("w",), truth={3: picture})], tmp_path / "walks.npz")
    arguments = ("--walks", str(tmp_path / "walks.npz"), "--chunks", "2", "--device", "cpu")
    said = refusal("fp8_fidelity", arguments, monkeypatch, capsys)
    assert "argument --chunks: the walks go on to chunk 3; got 2" in said


def test_scripts_find_each_other_however_they_are_run() -> None:
    """By its bare name a script is only found by one that is run by its path."""
    files = {file.stem: ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "benchmarks").glob("*.py")}
    modules = {
        (name, module)
        for name, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert ("graphs_served", "benchmarks.arguments") in modules
    assert {(name, module) for name, module in modules if module in files} == set()


def test_a_report_says_when_and_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/full_size.py", "--options", '{"graphs": "on"}'])
    facts = provenance(torch.device("cpu"))
    assert facts["command"] == """benchmarks/full_size.py --options '{"graphs": "on"}'"""
    assert facts["device"] == "CPU"
    assert facts["date"].endswith("+00:00")
