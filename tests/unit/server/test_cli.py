"""The command line: one sentence and an exit code for what is wrong, settings from everywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(arguments)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "absent.toml"), "absent.toml: No such file"),
        (("demo", "--port", "x"), "--server.port: expected int, got 'x'"),
        (("demo", "--server.prot", "1"), "unknown arguments: --server.prot 1 (did you mean '--server.port'?)"),
        (("demo", "--session.leadchunks=2"), "(did you mean '--session.lead-chunks'?)"),
        (("demo", "--session.lead-chunk", "3"), "3 (did you mean '--session.lead-chunks'?)"),
        (("demo", "--rec", "x"), "unknown arguments: --rec x (did you mean '--recording.folder'?)"),
        (("demo", "--zzz"), "unknown arguments: --zzz\n"),
        (("demo", "--port", "70000"), "worldserve: --server.port: expected 0 to 65535, got 70000"),
        (("demo", "--media.crf", "0"), "media.crf: expected 1 to 51, got 0"),
        (
            ("generate", "--image", "nowhere.png", "--frames", "9", "--out", "x.mp4"),
            "--image: 'nowhere.png' is no start image (day, night, snow, desert, sunset, autumn) and no file: No such",
        ),
        (
            ("generate", "--image", "day", "--keys", "w*2 x", "--frames", "9", "--out", "x.mp4"),
            "key script, column 5: unknown key 'x'",
        ),
        (
            ("generate", "--image", "day", "--seed", "-1", "--frames", "9", "--out", "x.mp4"),
            "--seed: expected a number from 0 to 9007199254740991, got -1",
        ),
        (
            ("generate", "--image", "day", "--seed", "9" * 23, "--frames", "9", "--out", "x.mp4"),
            "--seed: expected a number from 0 to 9007199254740991, got 9999",
        ),
        (
            ("generate", "--image", "day", "--frames", "-5", "--out", "x.mp4"),
            "--frames: expected at least 9, the first chunk, got -5",
        ),
        (("generate", "--image", "day", "--frames", "9", "--out", "."), ".: expected the name of a file, got a folder"),
        (
            ("generate", "--image", "day", "--frames", "9", "--out", "x.mp4", "--latents", "./x.mp4"),
            "--out and --latents: expected two files, got x.mp4 twice",
        ),
        (
            ("generate", "--image", "day", "--frames", "9", "--out", "no/such/folder/x.mp4"),
            "the folder no/such/folder does not exist",
        ),
    ],
)
def test_wrong_call_is_one_sentence_and_exit_code_2(capsys, arguments: tuple[str, ...], message: str):
    code, text = run(capsys, *arguments)
    assert code == 2
    assert text.startswith("worldserve: ")
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "--image", "day", "--frames", "abc", "--out", "x.mp4"),
            "--frames: invalid int value: 'abc' (see worldserve generate --help)",
        ),
        (("bench", "--chunk", "9", "--chunks", "x"), "--chunks: invalid int value: 'x' (see worldserve bench --help)"),
        ((), "the following arguments are required: VERB (see worldserve --help)"),
    ],
)
def test_what_argparse_refuses_is_one_sentence_too(capsys, arguments: tuple[str, ...], message: str):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert (left.value.code, capsys.readouterr().err) == (2, f"worldserve: {message}\n")


def test_image_file_needs_a_prompt(capsys, tmp_path: Path):
    image = Path(cli.bundled_config("demo")).parents[1] / "worldmodel/data/demo_world/examples/day.png"
    code, text = run(capsys, "generate", "--image", str(image), "--frames", "9", "--out", str(tmp_path / "x.mp4"))
    assert (code, "--prompt: expected a text" in text) == (2, True)


def test_damaged_image_is_named(capsys, tmp_path: Path):
    image = tmp_path / "damaged.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\nnot a picture")
    code, text = run(
        capsys, "generate", "--image", str(image), "--prompt", "x", "--frames", "9", "--out", str(tmp_path / "x.mp4")
    )
    assert (code, "--image: the image" in text) == (2, True)


def test_a_reader_that_leaves_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = (sys.executable, "-m", "server", "demo", "--list-settings")
    with os.fdopen(writer, "wb") as nobody:
        ended = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_packages_of_a_stranger_stop_the_start(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "offload", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, text = run(capsys, "demo")
    assert code == 2
    assert "come from different places" in text
    assert str(tmp_path) in text
