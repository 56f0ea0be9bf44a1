"""`inspect` on a DreamZero folder: its memory against hand arithmetic, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.dreamzero_checkpoint import TAG, training_config, write_checkpoint
from tests.support.dreamzero_golden import manifest
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


def test_cameras_that_a_checkpoint_does_not_order_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = training_config()
    ours = said["modality_configs"].pop(TAG)
    cameras = [key.removeprefix("video.") for key in ours.pop("video")["modality_keys"]]
    training = said | {"modality_configs": {"yam": ours}, "transforms": said["transforms"][TAG]}
    folder = write_checkpoint(tmp_path, metadata={"yam": manifest()["metadata_json_example"]}, training=training)
    assert main([str(folder)]) == 1
    assert "or set model.options.cameras = [" in capsys.readouterr().err
    assert main([str(folder), "--json", "--option", f"cameras={json.dumps(cameras)}"]) == 0
    assert json.loads(capsys.readouterr().out)["geometry"]["embodiment"] == "yam"


def test_graphs_take_memory_of_a_worker(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shared_bytes(*options: str) -> int:
        assert main([str(folder), "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["memory"]["shared_by_all_sessions_bytes"])

    assert shared_bytes() == shared_bytes("--option", "graphs=on") > shared_bytes("--option", "graphs=off")


def test_the_format_of_the_vae_can_be_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def vae_bytes(*options: str) -> int:
        assert main([str(folder), "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["memory"]["vae_weights_bytes"])

    assert vae_bytes("--option", "vae_precision=float32") == 2 * vae_bytes()
    assert vae_bytes("--option", 'vae_precision = "float32"', "--option", "computed_steps=5") == 2 * vae_bytes()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("cameras", "--option: expected KEY=VALUE, got 'cameras'"),
        ("=1", "--option: expected KEY=VALUE, got '=1'"),
        ('cameras=["a"', "cameras: expected a value as in TOML"),
        ("cameras=a,b", "inspect: --option: cameras: expected a list of names, got 'a,b'"),
        ("camera=[]", "camera"),
        ("computed_steps=9", "computed_steps: expected one of 5, 6, 7, 8, 16"),
    ],
)
def test_a_wrong_option_is_named(folder: Path, option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([str(folder), "--option", option])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert said in capsys.readouterr().err


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
    (folder / "experiment_cfg/metadata.json").unlink()
    assert main([str(folder)]) == 1
    said = capsys.readouterr().err
    assert "metadata.json: cannot be read" in said
    assert "experiment_cfg/conf.yaml is missing" in said
