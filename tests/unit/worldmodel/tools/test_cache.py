"""The verbs of the weight cache: what they print and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.weight_cache import WeightCache
from tests.support.weight_cache import FILES, open_entry, open_folder
from worldmodel.tools import cache


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the only entry of a cache in `tmp_path`."""
    monkeypatch.setattr(cache, "CacheFolder", open_folder)
    made = open_entry(WeightCache(open_folder(tmp_path), lock_timeout_s=1.0))
    made.close()
    return made.folder


def test_entries_are_listed(tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(entry.name[:16])
    assert "idle" in lines[0]
    assert lines[1].startswith("1 entry, ")


def test_a_damaged_entry_is_told_and_is_an_error(
    tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache.main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{entry.name[:16]}  OK\n"
    file = entry / FILES[0]
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")

    assert cache.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{entry.name[:16]}  DAMAGED: {FILES[0]} is not what was published\n"


def test_pruning_deletes_by_size_and_age(tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(["prune", str(tmp_path), "--max-age-hours", "1"]) == 0
    assert entry.is_dir()
    assert cache.main(["prune", str(tmp_path), "--max-bytes", "0"]) == 0
    assert not entry.exists()
    assert capsys.readouterr().out.splitlines()[1] == f"{entry.name[:16]}  deleted"


@pytest.mark.parametrize("call", [[], ["prune", "FOLDER"], ["list"], ["prune", "FOLDER", "--max-bytes", "-1"]])
def test_a_wrong_call_ends_with_code_2(tmp_path: Path, entry: Path, call: list[str]) -> None:
    arguments = [str(tmp_path) if word == "FOLDER" else word for word in call]
    try:
        code = cache.main(arguments)
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(["list", str(tmp_path / "missing")]) == 1
    assert "no such folder" in capsys.readouterr().err
