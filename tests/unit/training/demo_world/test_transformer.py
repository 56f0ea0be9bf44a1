"""How long a run lasts, and whole runs of a tiny model in a tiny picture, as the command starts them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file
from torch import Tensor

from training.demo_world import judge, model, scene, transformer, vae_model
from training.demo_world.transformer import Clock, learning_rate_at


@pytest.mark.parametrize(("seconds", "until"), [(40.0, None), (None, 1140.0)])
def test_a_run_is_over_after_its_time_or_at_its_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, until: float | None
) -> None:
    now = 1000.0
    monkeypatch.setattr(transformer.time, "time", lambda: now)
    clock = Clock(seconds, until, torch.device("cpu"))
    now = 1100.0
    clock.read()
    assert clock.progress == 0
    clock.start()
    now = 1110.0
    assert clock.progress == 0
    clock.read()
    assert (clock.elapsed_s, clock.progress) == (10, 0.25)
    now = 1140.0
    clock.read()
    assert clock.progress == 1


def test_the_rate_stays_and_falls_over_the_last_share_of_the_run() -> None:
    rates = [learning_rate_at(2.0, 1000, progress, 0.5, 0.1) for progress in (0, 0.5, 0.75, 1)]
    assert rates == pytest.approx([2.0, 2.0, 1.1, 0.2])
    assert learning_rate_at(2.0, 0, 0, 0.5, 0.1) == pytest.approx(0.02)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make everything as small as it can be, and a VAE that has learnt nothing; returns the VAE's folder."""
    config = replace(model.CONFIG, num_layers=2, num_heads=2, head_dim=16, ffn_dim=32, freq_dim=32)
    monkeypatch.setattr(model, "CONFIG", config)
    monkeypatch.setattr(model, "GEOMETRY", replace(model.GEOMETRY, latent_height=2, latent_width=2))
    monkeypatch.setattr(transformer, "HISTORY_POSE_LAYERS", 0)
    monkeypatch.setattr(transformer, "CHUNK_POSE_LAYERS", 1)
    monkeypatch.setattr(judge, "DRIFT_CHUNKS", ())
    for name in ("HEIGHT", "WIDTH"):
        monkeypatch.setattr(scene, name, 16)
    torch.manual_seed(0)
    folder = tmp_path / "vae"
    AutoencoderKLWan(**{**vae_model.CONFIG, "base_dim": 4, "dim_mult": [1, 1, 1, 1]}).save_pretrained(folder)
    return folder


def _run(monkeypatch: pytest.MonkeyPatch, out: Path, vae_folder: Path, *options: str) -> None:
    arguments = ("--out", str(out), "--vae", str(vae_folder), "--seconds", "100", "--smoke", *options)
    monkeypatch.setattr(sys, "argv", ["transformer", *arguments])
    transformer.main()


def _weights(run: Path) -> dict[str, Tensor]:
    return {name: tensor for file in run.rglob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_run_looks_and_saves_and_the_next_one_goes_on_until_it_has_lost_its_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _run(monkeypatch, first, tiny)
    said = capsys.readouterr().out
    assert "2 steps, learnt from: error by chunk" in said
    assert "2 steps, held out: error by chunk" in said
    assert "walks renewed, for which" in said
    assert (first / "closed_loop.png").exists()
    report = json.loads((first / "report.json").read_text())
    assert (report["steps"], report["chunks"]) == (5, [1, 2, 3])
    before = _weights(first)

    loss_of, num_losses = transformer.loss_of, 0

    def loss_that_is_lost(*arguments: object) -> tuple[Tensor, Tensor]:
        nonlocal num_losses
        num_losses += 1
        loss, watched = loss_of(*arguments)
        return loss * (float("nan") if num_losses == 3 else 1.0), watched

    monkeypatch.setattr(transformer, "loss_of", loss_that_is_lost)
    with pytest.raises(
        FloatingPointError, match=r"finite weights after 4 steps; .*second keeps what was saved before$"
    ):
        _run(monkeypatch, second, tiny, "--resume", str(first), "--peak", "1e-9")
    assert f"from {first}, with 0 new tensors" in capsys.readouterr().out
    assert not (second / "report.json").exists()
    after = _weights(second)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=1 / 128, msg=name)
