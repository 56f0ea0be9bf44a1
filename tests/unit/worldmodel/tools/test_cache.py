"""The verbs of the weight cache: what they print and how they end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from offload.cache_folder import CacheFolder
from offload.weight_cache import WeightCache
from tests.support.weight_cache import FILES, MOUNTS, held_by_another, open_entry, open_folder
from worldmodel.tools import cache


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the only entry of a cache in `tmp_path`."""
    mounts = tmp_path.with_name(f"{tmp_path.name}-mounts")
    mounts.write_text(MOUNTS, encoding="utf-8")
    monkeypatch.setattr(cache, "CacheFolder", partial(CacheFolder, mounts=mounts))
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


def test_an_entry_that_cannot_be_deleted_is_told_and_makes_pruning_fail(
    tmp_path: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    assert cache.main(["prune", str(tmp_path), "--max-bytes", "0"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{entry.name[:16]}  STAYS: can't be deleted: [Errno 13] Permission denied",
        "0 deleted, 0.0 MB",
    ]
    assert entry.is_dir()


def test_prune_says_what_it_expects(tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(["prune", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "cache: expected --max-bytes, --max-age-hours, or both\n"
    assert entry.is_dir()


def put_leftover(root: Path) -> str:
    name = f"{'d' * 64}.abc"
    (root / "temporary" / name).mkdir()
    (root / "temporary" / name / "layer").write_bytes(bytes(2_000_000))
    return name


def test_what_killed_builds_left_is_listed_and_pruned(
    tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = put_leftover(tmp_path)

    assert cache.main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"temporary            2.0 MB  left by a process that was killed, prune deletes it: {name}"
    with held_by_another(tmp_path / "locks" / f"{'d' * 64}.lock"):
        assert cache.main(["list", str(tmp_path)]) == 0
    assert f"being written or deleted: {name}" in capsys.readouterr().out

    assert cache.main(["prune", str(tmp_path), "--max-age-hours", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{name}  left by a process that was killed, deleted"
    assert not (tmp_path / "temporary" / name).exists()


def test_what_is_left_in_a_cache_that_was_copied_without_its_locks_is_told_when_it_goes(
    tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = put_leftover(tmp_path)
    shutil.rmtree(tmp_path / "locks")
    assert cache.main(["prune", str(tmp_path), "--max-age-hours", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{name}  left by a process that was killed, deleted"
    assert not (tmp_path / "temporary" / name).exists()
    assert entry.is_dir()


def test_what_is_no_entry_is_told_and_survives_every_verb(
    tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "entries" / ("a" * 64)
    odd.write_bytes(b"abc")
    for verb, code in (["list"], 0), (["verify"], 0), (["prune", "--max-bytes", "0"], 0):
        assert cache.main([verb[0], str(tmp_path), *verb[1:]]) == code
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("a" * 16) and line.endswith("NO ENTRY OF OURS: a file") for line in lines) == 2
    assert "1 entry, " in lines[2]
    assert odd.exists()
    assert not entry.exists()


def test_an_entry_that_cannot_be_read_is_not_called_whole(
    tmp_path: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path == entry:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert cache.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{entry.name[:16]}  CAN'T BE READ: Permission denied\n"


def test_an_entry_that_is_evicted_while_it_is_verified_is_passed_over(
    tmp_path: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(folder: CacheFolder, address: str) -> str:
        shutil.rmtree(folder.entries / address)
        return "the manifest cannot be read"

    monkeypatch.setattr(cache, "verify_entry", verify)
    assert cache.main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert not entry.exists()


@pytest.mark.parametrize("verb", [["list"], ["verify"], ["prune", "--max-bytes", "0"]])
def test_a_folder_that_is_no_cache_is_an_error_and_stays_as_it_is(
    tmp_path: Path, entry: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "note").touch()
    assert cache.main([verb[0], str(plain), *verb[1:]]) == 1
    assert capsys.readouterr().err == f"cache: {plain}: is no weight cache, expected a folder with entries/ in it\n"
    assert [each.name for each in plain.iterdir()] == ["note"]


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_reading_verbs_write_nothing(tmp_path: Path, entry: Path, verb: str) -> None:
    for lock in (tmp_path / "locks").iterdir():
        lock.unlink()
    (tmp_path / "temporary").rmdir()
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cache.main([verb, str(tmp_path)]) == 0
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    "call",
    [[], ["prune", "FOLDER"], ["list"], *(["prune", "FOLDER", "--max-bytes", text] for text in ("-1", "\uff12"))],
)
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


def test_a_damaged_entry_in_use_is_told_as_both(
    tmp_path: Path, entry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry / FILES[0]).unlink()
    with held_by_another(tmp_path / "locks" / f"{entry.name}.lock"):
        assert cache.main(["list", str(tmp_path)]) == 0
    assert f"  DAMAGED, in use: {FILES[0]} " in capsys.readouterr().out
