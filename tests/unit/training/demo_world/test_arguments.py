"""What the transformer's training refuses before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from training.demo_world.arguments import read_arguments
from training.demo_world.files import write_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    write_tensors({"weight": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    return tmp_path


def _given(monkeypatch: pytest.MonkeyPatch, folder: Path, options: str) -> None:
    words = ("--out", str(folder / "run"), "--vae", str(folder), "--seconds", "9", *options.split())
    monkeypatch.setattr(sys, "argv", ["transformer", *words])


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--walks 0", "--walks: expected a finite number and at least 4; got 0"),
        ("--seen 0", "--seen: expected a finite number and above 0; got 0"),
        ("--own-share 2", "--own-share: expected a finite number and at least 0 and at most 1; got 2"),
        ("--copies 0", "--copies: expected a finite number and at least 1; got 0"),
        ("--ema 2", "--ema: expected a finite number and at least 0 and below 1; got 2"),
        ("--peak nan", "--peak: expected a finite number and above 0; got nan"),
        ("--seconds 0", "--seconds: expected a finite number and above 0; got 0"),
        ("--horizon 5", "--horizon: expected a finite number and at least 8 and at most 18; got 5"),
        ("--resume nowhere", "--resume: expected a folder; nowhere is none"),
        ("--vae nowhere", "--vae: expected a folder with config.json; nowhere is none"),
        ("--poplars 2", "--poplars: expected a finite number and at least 0 and at most 1; got 2"),
        ("--cutaway nan", "--cutaway: expected a finite number and at least 0; got nan"),
        ("--own-from 0.5 --seen 2.5", "which renew up to 1152 of 1024: expected more --walks"),
    ],
)
def test_what_no_run_can_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, options: str, refused: str
) -> None:
    _given(monkeypatch, folder, options)
    with pytest.raises(SystemExit) as ended:
        read_arguments()
    assert ended.value.code == 2
    assert refused in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_a_vae_without_weights_and_an_out_that_is_no_folder_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "run").touch()
    _given(monkeypatch, folder, "")
    with pytest.raises(SystemExit, match="2"):
        read_arguments()
    assert "argument --out: expected a folder to write to" in capsys.readouterr().err
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(SystemExit, match="2"):
        read_arguments()
    assert f"argument --vae: {folder}: has no weights" in capsys.readouterr().err


def test_few_clips_of_a_walk_are_allowed_without_own_histories(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    _given(monkeypatch, folder, "--seen 2.5")
    assert read_arguments().seen == 2.5


def test_a_smoke_run_compiles_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    _given(monkeypatch, folder, "--smoke")
    for has_gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert read_arguments().compile is has_gpu
