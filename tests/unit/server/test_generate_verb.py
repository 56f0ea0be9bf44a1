"""The `generate` verb: every wrong call is one sentence that names the flag, before a worker is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from PIL import Image

from server import cli, generate_verb
from server.clip_arguments import partial_of

CONFIG = """
[model]
name = "fake"
checkpoint = "none"
width = 160
height = 96
"""


class WorkerStarted(Exception):
    """Says that the call was accepted and a model would be loaded now."""


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> NoReturn:
        raise WorkerStarted

    monkeypatch.setattr(generate_verb, "ready_worker", start)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "fake.toml").write_text(CONFIG, encoding="utf-8")
    Image.new("RGB", (64, 48)).save(tmp_path / "image.png")
    folder = tmp_path / "walk"
    folder.mkdir()
    np.save(folder / "poses.npy", np.tile(np.eye(4), (33, 1, 1)))
    np.save(folder / "intrinsics.npy", np.array([[500.0, 500.0, 416.0, 240.0]]))
    files = ["--config", str(tmp_path / "fake.toml"), "--image", str(tmp_path / "image.png")]
    return ["generate", *files, "--prompt", "a town", "--out", str(tmp_path / "x.mp4")]


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("--frames 32", "--frames: expected 9 + 12 k, for example 21 or 33, got 32"),
        ("--frames 0", "--frames: expected at least 9"),
        ("--frames 100005", "--frames: expected at most 100000, got 100005"),
        ("--frames 45 --camera WALK", "--camera: expected at least 45 poses, one a frame, got 33"),
        ("--frames 33 --camera WALK --keys w", "--camera and --keys: expected one of them"),
        ("--frames 33 --camera NONE", "--camera: {NONE}: 'none' cannot be opened: No such file"),
        ("--frames 33 --camera BARE", "--camera: {BARE}: poses.npy: cannot be opened: No such file"),
        ("--frames 9 --keys w*4", "--keys: expected at most 3 latent frames, the whole clip, got 4"),
        ("--frames 9 --keys x", "--keys: key script, column 1: unknown key 'x'"),
        ("--frames 9 --size 100x96", "--size: expected a multiple of 16 pixels, got 100"),
        ("--frames 9 --size large", "--size: expected WIDTHxHEIGHT or official, got 'large'"),
        ("--frames 9 --seed -1", "--seed: expected a number from 0"),
        (
            f"--frames 9 --prompt {'x' * 2001}",
            "--prompt has 2001 characters: expected at most 2000 (limits.max_prompt_chars)",
        ),
        ("--frames 9 --prompt \udce4", "--prompt: expected a text in UTF-8, got other bytes"),
    ],
)
def test_a_wrong_call_ends_before_a_worker_starts(
    arguments: list[str], extra: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"WALK": str(tmp_path / "walk"), "NONE": str(tmp_path / "none"), "BARE": str(tmp_path)}
    assert cli.main([*arguments, *(places.get(word, word) for word in extra.split())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"worldserve: {text.format(**places)}")


@pytest.mark.parametrize("flag", ["--out", "--latents"])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        (".", "expected the name of a file, got a folder"),
        ("none/x.mp4", "the folder {tmp_path}/none does not exist"),
        ("image.png/x.mp4", "the folder {tmp_path}/image.png does not exist"),
        ("pipe", "expected a new or a regular file"),
        ("x" * 250, "cannot be written: File name too long"),
    ],
    ids=["folder", "no folder", "a file as folder", "pipe", "long name"],
)
def test_a_target_that_cannot_be_written_is_named_by_its_flag(
    arguments: list[str], flag: str, path: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    target = tmp_path / path
    assert cli.main([*arguments, "--frames", "9", flag, str(target)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"worldserve: {flag}: {target}: {text.format(tmp_path=tmp_path)}"


@pytest.mark.parametrize("name", ["x.txt", "x.mov", "x", "x.mp4.gz"])
def test_a_video_is_not_written_under_the_name_of_something_else(
    arguments: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--frames", "9", "--out", str(tmp_path / name)]) == 2
    expected = f"--out: {tmp_path / name}: expected a name that ends in .mp4, which is what it will be"
    assert capsys.readouterr().err == f"worldserve: {expected}\n"


def test_a_file_system_that_takes_no_files_is_noticed_before_a_worker_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--frames", "9", "--out", "/proc/x.mp4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("worldserve: --out: /proc/x.mp4: ")


def test_looking_whether_a_target_can_be_written_leaves_nothing(arguments: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    (tmp_path / "x.mp4").write_bytes(b"an earlier clip")
    with pytest.raises(WorkerStarted):
        cli.main([*arguments, "--frames", "9"])
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "x.mp4"]
    assert (tmp_path / "x.mp4").read_bytes() == b"an earlier clip"


def test_what_another_process_makes_under_the_same_name_is_left_alone(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 0)
        theirs = partial_of(tmp_path / "x.mp4")
    theirs.write_bytes(b"half a clip")
    with pytest.raises(WorkerStarted):
        cli.main([*arguments, "--frames", "9"])
    assert theirs.read_bytes() == b"half a clip"


@pytest.mark.parametrize(
    "extra",
    [
        "--frames 33 --keys w*6",
        "--frames 33 --camera WALK",
        "--frames 45 --camera WALK --trim",
        "--frames 32 --trim --size 208x112",
        "--frames 32 --trim --keys w*8",
        "--frames 9 --size official",
    ],
)
def test_a_right_call_starts_a_worker(arguments: list[str], extra: str, tmp_path: Path) -> None:
    words = [str(tmp_path / "walk") if word == "WALK" else word for word in extra.split()]
    with pytest.raises(WorkerStarted):
        cli.main([*arguments, *words])
