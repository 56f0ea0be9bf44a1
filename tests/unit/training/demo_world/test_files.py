"""Files that are replaced as one: whenever the writer ends, a reader finds the old ones or the new ones, whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.demo_world import files
from training.demo_world.files import located, replacing, settle, write_tensors

NAMES = ("folder", "other", "file")


def _write(folder: Path, content: str, *, ends_early: bool = False) -> None:
    with replacing(folder) as unfinished:
        if ends_early:
            (unfinished / "file").write_text(content)
            raise KeyboardInterrupt
        for name in NAMES[:2]:
            (unfinished / name).mkdir()
            (unfinished / name / f"{content}.txt").write_text(content)
        (unfinished / "file").write_text(content)


def _read(folder: Path) -> list[str]:
    (one,), (other,) = (list(located(folder, name).iterdir()) for name in NAMES[:2])
    return [one.read_text(), other.read_text(), located(folder, "file").read_text()]


@pytest.mark.parametrize("moves", range(4))
def test_a_writer_that_ends_while_it_moves_leaves_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    _write(tmp_path, "old")
    (tmp_path / "another").write_text("stays")
    move, num_left = files._move, moves

    def dying(path: Path, place: Path) -> None:
        nonlocal num_left
        if not num_left:
            raise KeyboardInterrupt
        num_left -= 1
        move(path, place)

    monkeypatch.setattr(files, "_move", dying)
    if moves < len(NAMES):
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path, "new")
    else:
        _write(tmp_path, "new")
    assert _read(tmp_path) == ["new"] * 3
    monkeypatch.undo()
    settle(tmp_path)
    assert _read(tmp_path) == ["new"] * 3
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "another"}
    _write(tmp_path, "newest")
    assert _read(tmp_path) == ["newest"] * 3


def test_a_writer_that_ends_before_all_is_written_leaves_the_old_ones(tmp_path: Path) -> None:
    _write(tmp_path, "old")
    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path, "half", ends_early=True)
    assert _read(tmp_path) == ["old"] * 3
    # One that was killed had no time to clear up.
    (tmp_path / "unfinished" / "folder").mkdir(parents=True)
    assert _read(tmp_path) == ["old"] * 3
    _write(tmp_path, "new")
    assert _read(tmp_path) == ["new"] * 3
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)


def test_tensors_have_the_mode_of_any_new_file(tmp_path: Path) -> None:
    tensors = {"one": torch.arange(3.0), "other": torch.ones(2, 2, dtype=torch.bfloat16)}
    write_tensors(tensors, tmp_path / "weights.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
