"""What a model refuses of a configuration is found in the server, by key, before a worker is started for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server import cli
from server.config import ModelSection, ServerConfig
from server.config_values import ConfigError
from server.model_check import check_model
from worldmodel.catalog import ENTRIES


def config(name: str = "fake", **changed: Any) -> ServerConfig:
    settings: dict[str, Any] = {"checkpoint": "nowhere", "width": 160, "height": 96, **changed}
    return ServerConfig(model=ModelSection(name=name, **settings))


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_every_model_of_the_catalog_takes_a_plain_configuration(name: str) -> None:
    check_model(config(name))


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_every_model_of_the_catalog_refuses_a_precision_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.precision: unknown 'fp99': expected one of fp32, bf16, ") as caught:
        check_model(config(name, precision="fp99"))
    assert caught.value.key == "model.precision"


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("lingbot_world_v2", {"width": 7}, r"^model\.width: expected a multiple of 16 pixels, got 7$"),
        ("lingbot_world_v2", {"height": 104}, r"^model\.height: expected a multiple of 16 pixels, got 104$"),
        ("fake", {"width": 12}, r"^model\.width: expected a multiple of 8 pixels, got 12$"),
        ("dreamzero", {"height": 95}, r"^model\.height: expected a multiple of 2 pixels, got 95$"),
        (
            "dreamzero",
            {"precision": "official"},
            r"^model\.precision: unknown 'official': expected one of fp32, bf16, fp8$",
        ),
        ("lingbot_world_v2", {"options": {"sampler": "x"}}, r"^model\.options\.sampler: expected one of "),
        ("lingbot_world_v2", {"options": {"samplr": "x"}}, r"^model\.options\.samplr: unknown key"),
        ("fake_robot", {"options": {"chunk_ms": -1}}, r"^model\.options\.chunk_ms: expected a finite number"),
        ("nope", {}, r"^model\.name: unknown model 'nope': expected one of lingbot_world_v2, "),
    ],
)
def test_what_a_model_refuses_is_named(name: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_model(config(name, **settings))


def test_a_checkpoint_that_is_a_file_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match=rf"^model\.checkpoint: expected a folder, got the file {file}$"):
        check_model(config(checkpoint=str(file)))
    check_model(config(checkpoint=str(tmp_path)))


@pytest.mark.parametrize("checkpoint", ["~no_such_user_here/x", "a\0b"])
def test_a_checkpoint_that_is_no_path_is_one_sentence(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.checkpoint: .* is no path: "):
        check_model(config(checkpoint=checkpoint))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--device", "cudaa"), "--worker.device: expected cpu, cuda or cuda:N, got 'cudaa'"),
        (("--model.width", "7"), "model.width: expected a multiple of 16 pixels, got 7"),
        (
            ("--model.precision", "fp99"),
            "model.precision: unknown 'fp99': expected one of fp32, bf16, official, fp8, fp8_kv\n",
        ),
        (("--model.name", "nope"), "model.name: unknown model 'nope'"),
        (("--model.checkpoint", __file__), f"model.checkpoint: expected a folder, got the file {__file__}"),
        (("--server.shutdown-s", "inf"), "--server.shutdown-s: expected a finite number"),
    ],
)
def test_the_command_line_ends_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], complaint: str
) -> None:
    def start_nothing(*_: object, **__: object) -> None:
        raise AssertionError("a server was started for it")

    monkeypatch.setattr(cli, "_run_server", start_nothing)
    assert cli.main(["demo", *flags]) == 2
    text = capsys.readouterr().err
    assert complaint in text
    assert text.count("\n") == 1
