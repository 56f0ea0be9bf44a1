"""What else may lie in a weight cache, and who keeps the time of an entry. Evicting is in `test_weight_cache.py`."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload import cache_upkeep
from offload.cache_folder import CacheFolder
from offload.cache_manifest import MANIFEST
from offload.cache_upkeep import (
    EntryKind,
    list_entries,
    list_leftovers,
    prune,
    remove_leftovers,
    verify_entry,
)
from offload.errors import CacheError, CacheForeign
from offload.file_lock import is_held
from offload.weight_cache import WeightCache
from tests.support.weight_cache import FILES, held_by_another, open_entry, open_folder, request

OTHER_FORMAT = b'{"format": "worldserve-weights-2", "parts": {}}'


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return open_folder(tmp_path / "cache")


@pytest.fixture
def cache(folder: CacheFolder) -> WeightCache:
    return WeightCache(folder, lock_timeout_s=1.0)


def snapshot(folder: CacheFolder) -> dict[str, tuple[int, int]]:
    """Return everything that is there, with its time and size."""
    found = {str(path.relative_to(folder.root)): path.lstat() for path in folder.root.rglob("*")}
    return {name: (each.st_mtime_ns, each.st_size) for name, each in found.items()}


def put_file(folder: CacheFolder) -> str:
    (folder.entries / ("a" * 64)).write_bytes(b"abc")
    return "a" * 64


def put_link(folder: CacheFolder) -> str:
    (folder.entries / ("b" * 64)).symlink_to(folder.root)
    return "b" * 64


def put_other_format(folder: CacheFolder, text: bytes = OTHER_FORMAT) -> str:
    address = hashlib.sha256(text).hexdigest()
    (folder.entries / address).mkdir()
    (folder.entries / address / MANIFEST).write_bytes(text)
    return address


def put_no_json(folder: CacheFolder) -> str:
    return put_other_format(folder, b"rubbish")


def put_no_files(folder: CacheFolder) -> str:
    return put_other_format(folder, b'{"format": "worldserve-weights-1", "metadata": {}}')


def put_other_keys(folder: CacheFolder) -> str:
    return put_other_format(folder, b'{"format": "worldserve-weights-1", "metadata": {}, "files": {"a": {"size": 1}}}')


def put_unreadable(folder: CacheFolder) -> str:
    (folder.entries / ("c" * 64)).mkdir()
    return "c" * 64


ODD: dict[str, tuple[Callable[[CacheFolder], str], EntryKind, str]] = {
    "file": (put_file, EntryKind.OTHER, "a file"),
    "link": (put_link, EntryKind.OTHER, "a link"),
    "format": (put_other_format, EntryKind.OTHER, "an entry of format worldserve-weights-2"),
    "no JSON": (put_no_json, EntryKind.OTHER, "an entry of format unknown"),
    "no files": (put_no_files, EntryKind.OTHER, "an entry of format worldserve-weights-1 with other keys"),
    "other keys": (put_other_keys, EntryKind.OTHER, "an entry of format worldserve-weights-1 with other keys"),
    "another user's": (put_unreadable, EntryKind.UNREADABLE, "Permission denied"),
}


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse to read the folder that stands for another user's."""
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "c" * 64:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.usefixtures("refusing")
def test_what_only_has_the_name_of_an_entry_is_told_and_left_alone(
    cache: WeightCache, folder: CacheFolder, odd: str
) -> None:
    put, kind, problem = ODD[odd]
    address = put(folder)
    ours = open_entry(cache)
    ours.close()

    facts = {each.address: each for each in list_entries(folder)}
    assert (facts[address].kind, facts[address].problem) == (kind, problem)
    assert (facts[ours.folder.name].kind, facts[ours.folder.name].problem) == (EntryKind.OURS, None)

    # It is not counted either: what is ours does not go for it.
    removed = prune(folder, max_bytes=facts[ours.folder.name].num_bytes, max_age_s=None, now_s=1e12)
    assert removed == ()
    removed = prune(folder, max_bytes=0, max_age_s=0.0, now_s=1e12)
    assert [each.address for each in removed] == [ours.folder.name]
    assert [entry.name for entry in folder.entries.iterdir()] == [address]


def test_an_entry_of_another_format_is_not_called_damaged(folder: CacheFolder) -> None:
    with pytest.raises(CacheForeign, match="is of format worldserve-weights-2"):
        verify_entry(folder, put_other_format(folder))


def test_to_list_and_to_verify_is_to_read(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    entry.close()
    entry.lock.file.unlink()
    os.utime(entry.folder, (0, 500))
    before = snapshot(folder)

    [facts] = list_entries(folder)
    assert list(list_leftovers(folder)) == []
    assert verify_entry(folder, entry.folder.name) is None

    # A cache that was copied here has no locks: its entries are as old as they are.
    assert (facts.used_s, facts.is_in_use) == (500, False)
    assert snapshot(folder) == before


def test_who_uses_an_entry_is_seen_without_a_lock_of_ones_own(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    entry.close()
    assert not is_held(entry.lock.file)
    assert not is_held(folder.lock_file("missing"))
    with held_by_another(entry.lock.file):
        assert is_held(entry.lock.file)
        assert [facts.is_in_use for facts in list_entries(folder)] == [True]


@pytest.mark.parametrize("name", ["{key}.abc", "{key}.damaged.abc", "{key}.pointer.abc", "{key}.evicted.abc"])
def test_what_killed_processes_left_is_listed_and_deleted(folder: CacheFolder, name: str) -> None:
    key = request().key
    left = folder.temporary / name.format(key=key)
    (left / "deeper").mkdir(parents=True)
    (left / "deeper" / FILES[0]).write_bytes(b"x" * 1000)
    (folder.temporary / "note").mkdir()

    with held_by_another(folder.lock_file(key)):
        [seen] = list_leftovers(folder)
        assert (seen.name, seen.num_bytes, seen.is_in_use) == (left.name, 1000, True)
        assert prune(folder, max_bytes=None, max_age_s=None, now_s=0.0) == ()
        assert left.exists()
    [seen] = list_leftovers(folder)
    assert not seen.is_in_use

    assert remove_leftovers(folder) == (left.name,)
    assert [each.name for each in folder.temporary.iterdir()] == ["note"]
    assert remove_leftovers(folder) == ()


def test_a_start_prunes_what_killed_builds_left(folder: CacheFolder) -> None:
    left = folder.temporary / f"{request('gone').key}.abc"
    left.mkdir()
    prune(folder, max_bytes=None, max_age_s=None, now_s=0.0)
    assert not left.exists()


def test_an_entry_was_last_used_when_its_use_ended(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    os.utime(entry.lock.file, (0, 500))
    entry.close()
    [facts] = list_entries(folder)
    assert facts.used_s > 10**9
    # A second call ends nothing.
    os.utime(entry.lock.file, (0, 500))
    entry.close()
    assert next(list_entries(folder)).used_s == 500


@pytest.mark.parametrize("is_mine", [False, True])
def test_an_entry_that_was_seen_in_use_was_used_then(cache: WeightCache, folder: CacheFolder, is_mine: bool) -> None:
    """Whose user is killed has nobody who says when its use ended."""
    entry = open_entry(cache)
    entry.close()
    os.utime(entry.lock.file, (0, 500))
    mine = [entry.folder.name] if is_mine else []
    with held_by_another(entry.lock.file):
        assert prune(folder, max_bytes=0, max_age_s=0.0, now_s=1000.0, mine=mine) == ()
    [facts] = list_entries(folder)
    assert facts.used_s == 1000


def test_what_the_system_does_not_let_us_delete_stays_and_is_told(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(**_: object) -> str:
        raise PermissionError(13, "Permission denied")

    first = open_entry(cache)
    first.close()
    monkeypatch.setattr(cache_upkeep.tempfile, "mkdtemp", refused)
    assert prune(folder, max_bytes=0, max_age_s=None, now_s=0.0) == ()
    assert f"{first.folder.name} stays, it can't be deleted: [Errno 13] Permission denied" in caplog.text
    assert first.folder.is_dir()


def test_a_cache_of_which_only_the_entries_were_copied_can_be_pruned(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    entry.close()
    for part in ("locks", "temporary", "requests"):
        shutil.rmtree(folder.root / part)
    assert [each.address for each in prune(folder, max_bytes=0, max_age_s=None, now_s=0.0)] == [entry.folder.name]
    assert list(folder.entries.iterdir()) == []


def test_a_cache_that_cannot_be_read_is_an_error(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(CacheError, match=r"entries: cannot be read \(Permission denied\)"):
        list(list_entries(folder))
