"""What options of the training programs take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from training.demo_world.options import count, folder_with, number


def test_numbers_within_their_bounds_are_taken() -> None:
    assert number(above=0)("0.5") == 0.5
    assert [number(least=0, most=1)(text) for text in ("0", "1")] == [0, 1]
    assert number(least=0, below=1)("0.998") == 0.998
    assert [count(least=8, most=18)(text) for text in ("8", "18")] == [8, 18]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf"])
def test_numbers_beyond_their_bounds_and_what_is_none_are_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^expected a finite number and above 0; got {text}$"):
        number(above=0)(text)


@pytest.mark.parametrize(
    ("refuses", "text", "wanted"),
    [
        (number(least=0, most=1), "2", "at least 0 and at most 1"),
        (number(least=0, most=1), "-0.1", "at least 0 and at most 1"),
        (number(least=0, below=1), "1", "at least 0 and below 1"),
        (number(), "nan", "a finite number"),
        (count(least=4), "3", "at least 4"),
        (count(least=8, most=18), "19", "at least 8 and at most 18"),
    ],
)
def test_each_bound_is_kept(refuses: Callable[[str], float], text: str, wanted: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"{wanted}; got {text}$"):
        refuses(text)


def test_what_is_no_number_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--walks", type=count(least=1))
    with pytest.raises(SystemExit):
        parser.parse_args(["--walks", "2.5"])
    assert "argument --walks: invalid whole number value: '2.5'" in capsys.readouterr().err


def test_a_folder_must_be_there_and_hold_what_is_read(tmp_path: Path) -> None:
    assert folder_with()(str(tmp_path)) == tmp_path
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"expected a folder with config\.json; .* is one without config"
    ):
        folder_with("config.json")(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert folder_with("config.json")(str(tmp_path)) == tmp_path
    with pytest.raises(argparse.ArgumentTypeError, match=r"nowhere is none$"):
        folder_with("config.json")(str(tmp_path / "nowhere"))
