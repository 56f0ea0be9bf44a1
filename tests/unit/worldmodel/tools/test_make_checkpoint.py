"""`make-checkpoint`: what it writes, what it lists, and how it says no."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldmodel.checkpoint.plan import PlannedTensor, shard
from worldmodel.lingbot.empty_model import open_any
from worldmodel.tools import inspect
from worldmodel.tools.make_checkpoint import main


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_a_tiny_checkpoint_can_be_opened(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made"
    assert main(["--like", "lingbot-world-v2", "--layout", layout, "--dtype", "bf16", str(out)]) == 0
    assert "576,159 parameters, 1.64 MB (random weights)" in capsys.readouterr().out
    transformer = open_any(out).component("transformer")
    assert {info.dtype for info in transformer.tensors.values()} == {"BF16"}


@pytest.mark.parametrize("name", ["dreamzero-droid", "dreamzero-droid-5b"])
def test_a_tiny_robot_checkpoint_says_its_picture_size(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--like", name, str(tmp_path / "made")]) == 0
    assert inspect.main([str(tmp_path / "made")]) == 0
    assert "memory at 64x32" in capsys.readouterr().out


def test_the_full_plan_is_listed_without_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--like", "lingbot-world-v2", "--scale", "full", "--plan", str(tmp_path / "none")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["86046722252", "bytes", "of", "24352135731", "parameters"]
    assert sum("diffusion_pytorch_model-0000" in line and "(180 tensors)" in line for line in lines) == 7
    assert not (tmp_path / "none").exists()


def test_a_folder_in_use_is_one_sentence_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--like", "lingbot-world-v2", str(tmp_path)]) == 1
    assert "must be a new or empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", str(2**53), "1" * 5000, "one", "1.0", ""])
def test_a_seed_that_is_none_is_exit_code_2(tmp_path: Path, seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--like", "lingbot-world-v2", f"--seed={seed}", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "make-checkpoint: --seed: expected a number from 0 to 9007199254740991, got" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file/out", "n" * 300])
def test_a_place_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--like", "lingbot-world-v2", str(tmp_path / out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"make-checkpoint: {tmp_path / out}")
    assert "cannot be written (" in line


def test_an_unknown_model_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--like", "other", str(tmp_path)])
    assert caught.value.code == 2
    assert "invalid choice: 'other'" in capsys.readouterr().err


def test_shards_end_before_they_pass_their_size() -> None:
    tensors = [PlannedTensor(name=f"t{n}", key=f"t{n}", shape=(n,), dtype="F32") for n in (5, 3, 4, 20, 1)]
    files, index = shard(tensors, "net", "model", gains={}, max_shard_bytes=32)
    assert [[tensor.name for tensor in file.tensors] for file in files] == [["t5", "t3"], ["t4"], ["t20"], ["t1"]]
    content = index["net/model.safetensors.index.json"]
    assert isinstance(content, dict)
    assert content["metadata"] == {"total_size": 4 * 33}
    assert content["weight_map"]["t20"] == "model-00003-of-00004.safetensors"
