"""`--list-settings`: flag, variable and value of every setting, with the file, the environment and the flags merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import cli
from server.config_reading import settable_keys
from server.config_values import flag_of, variable_of
from server.package_files import bundled_config

CONFIG = """
[server]
tokens = ["secret-1", "secret-2"]
[session]
lead_chunks = 3
[model]
name = "fake"
checkpoint = "none"
width = 160
height = 96
start_images = [{ name = "day", file = "day.png", prompt = "a town" }]
options = { speed = 2 }
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "world.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert cli.main(argv) == 0
    return capsys.readouterr().out.splitlines()


def values(lines: list[str]) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in lines if (words := line.split(maxsplit=2))[:1] and len(words) == 3}


def test_every_setting_has_its_flag_its_variable_and_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, "demo", "--list-settings")
    assert str(bundled_config("demo")) in lines[0]
    rows = values(lines)
    assert [rows[flag_of(key)][0] for key in settable_keys()] == [variable_of(key) for key in settable_keys()]
    assert rows["--recording.folder"][1] == '""'
    assert rows["--worker.cpu-threads"][1] == "none"
    assert rows["--omni.queue-when-full"][1] == "true"
    [column] = {line.index("WORLDSERVE_") for line in lines if line.startswith("--")}
    assert lines[2].index("VARIABLE") == column


@pytest.mark.parametrize("order", [("--list-settings", "CONFIG"), ("CONFIG", "--list-settings")])
def test_the_values_are_those_in_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: str, order: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WORLDSERVE_MEDIA_CRF", "30")
    call = [config if word == "CONFIG" else word for word in order]
    lines = listed(capsys, "serve", *call, "--port", "9000")
    rows = values(lines)
    assert rows["--session.lead-chunks"] == ["WORLDSERVE_SESSION_LEAD_CHUNKS", "3"]
    assert rows["--media.crf"][1] == "30"
    assert rows["--server.port"][1] == "9000"
    assert lines[-1] == "Only in the file: model.start_images (day); model.options (speed)"


def test_tokens_are_counted_and_not_shown(capsys: pytest.CaptureFixture[str], config: str) -> None:
    lines = listed(capsys, "serve", config, "--list-settings")
    assert values(lines)["--server.tokens"][1] == "(2, not shown)"
    assert "secret" not in "\n".join(lines)


def test_verbs_with_a_config_flag_and_needs_of_their_own_list_too(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    lines = listed(capsys, "generate", "--image", "day", "--list-settings", "--config", config)
    assert values(lines)["--session.lead-chunks"][1] == "3"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("serve", "absent.toml", "--list-settings"), "absent.toml: No such file"),
        (("demo", "--list-settings", "--session.lead-chunk", "3"), "(did you mean '--session.lead-chunks'?)"),
        (("demo", "--list-settings", "--media.crf", "99"), "--media.crf: expected 1 to 51, got 99"),
    ],
)
def test_a_wrong_call_is_refused(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str) -> None:
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err
