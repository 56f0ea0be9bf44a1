"""`inspect` on a DreamZero folder: its memory against hand arithmetic, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.dreamzero_checkpoint import write_checkpoint
from worldmodel.dreamzero.inspection import inspect_dreamzero, is_dreamzero
from worldmodel.tools.inspect import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dreamzero"))


def test_a_folder_is_told_by_its_settings(folder: Path, tmp_path: Path) -> None:
    assert is_dreamzero(str(folder))
    assert not is_dreamzero(str(tmp_path))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert not is_dreamzero(str(tmp_path))


def test_memory_of_a_session(folder: Path) -> None:
    found = inspect_dreamzero(str(folder), precision="bf16", cards_gb=(0.001, 80.0))
    assert (found.width, found.height, found.problems) == (64, 32, ())
    parts = {part.name: part for part in found.components}
    assert parts.keys() == {"transformer", "vae", "text_encoder", "image_encoder"}
    assert found.memory["transformer_weights_bytes"] == 2 * parts["transformer"].num_parameters
    assert all(part.dtypes == ("F32",) and part.num_bytes == 4 * part.num_parameters for part in parts.values())
    # Keys and values of 64 numbers in three layers: 512 text rows for both branches, 257 of the picture for one.
    per_token = 2 * 64 * 2 * 3
    assert found.memory["text_and_image_kv_per_session_bytes"] == per_token * (2 * 512 + 257)
    # Nine frames of 8 tokens for both branches in two layers, once in the first, and 25 registers as well.
    assert found.memory["kv_per_session_bytes"] > 2 * 64 * 2 * 5 * 9 * 8
    assert [card.sessions for card in found.capacity] == [0, 64]


def test_the_command_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["geometry"]["embodiment"] == "oxe_droid"
    assert found["geometry"]["actions"] == "24 rows of 8"
    assert main([str(folder)]) == 0
    assert "image encoder weights" in capsys.readouterr().out


def test_a_size_it_was_not_trained_for_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--width", "128"]) == 2
    assert "trained with views of 32 x 16: set width to 64 and height to 32" in capsys.readouterr().err


def test_what_is_wrong_is_named_and_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["action_head.model.head.modulation"]
    save_file(tensors, file)
    assert main([str(folder)]) == 1
    assert "transformer: 1 missing tensor (head.modulation)" in " ".join(capsys.readouterr().out.split())
    (folder / "experiment_cfg/conf.yaml").unlink()
    assert main([str(folder)]) == 1
    assert "experiment_cfg/conf.yaml is missing" in capsys.readouterr().err
