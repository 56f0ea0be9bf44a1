"""What is in a weight cache, what else may lie there, who keeps the time of an entry, and what is evicted."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.cache_folder import CacheFolder
from offload.cache_manifest import MANIFEST, Validation, check_entry
from offload.cache_upkeep import (
    EntryKind,
    list_entries,
    list_leftovers,
    prune,
    remove_leftovers,
    verify_entry,
)
from offload.errors import CacheError, CacheForeign
from offload.file_lock import FileLock, is_held
from offload.weight_cache import WeightCache
from tests.support.cache_damage import DAMAGE
from tests.support.weight_cache import (
    FILES,
    held_by_another,
    is_locked_for_others,
    make,
    open_entry,
    request,
)

OTHER_FORMAT = b'{"format": "worldserve-weights-2", "parts": {}}'


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


def put_deep_json(folder: CacheFolder) -> str:
    return put_other_format(folder, b"[" * 200_000)


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
    "deep JSON": (put_deep_json, EntryKind.OTHER, "an entry of format unknown"),
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
    removed = prune(folder, max_bytes=facts[ours.folder.name].num_bytes, max_age_s=None, now_s=1e12).removed
    assert removed == ()
    removed = prune(folder, max_bytes=0, max_age_s=0.0, now_s=1e12).removed
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
        assert prune(folder, max_bytes=None, max_age_s=None, now_s=0.0).removed == ()
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
        assert prune(folder, max_bytes=0, max_age_s=0.0, now_s=1000.0, mine=mine).removed == ()
    [facts] = list_entries(folder)
    assert facts.used_s == 1000


def test_what_the_system_does_not_let_us_delete_stays_and_is_told(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Path:
        raise PermissionError(13, "Permission denied")

    first = open_entry(cache)
    first.close()
    monkeypatch.setattr(Path, "rename", refused)
    pruned = prune(folder, max_bytes=0, max_age_s=None, now_s=0.0)
    [stuck] = pruned.stuck
    assert (stuck.address, stuck.problem) == (first.folder.name, "can't be deleted: [Errno 13] Permission denied")
    assert pruned.removed == ()
    assert first.folder.is_dir()


def test_a_disk_that_is_full_can_be_pruned(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str | Path, mode: int = 0o777, **_: object) -> None:
        if Path(path).is_dir():
            raise FileExistsError(17, "File exists")
        raise OSError(28, "No space left on device")

    entry = open_entry(cache)
    entry.close()
    monkeypatch.setattr(os, "mkdir", full)
    pruned = prune(folder, max_bytes=0, max_age_s=None, now_s=0.0)
    assert ([each.address for each in pruned.removed], pruned.stuck) == ([entry.folder.name], ())
    assert list(folder.entries.iterdir()) == list(folder.temporary.iterdir()) == []


def test_a_cache_of_which_only_the_entries_were_copied_can_be_pruned(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    entry.close()
    for part in ("locks", "temporary", "requests"):
        shutil.rmtree(folder.root / part)
    assert [each.address for each in prune(folder, max_bytes=0, max_age_s=None, now_s=0.0).removed] == [
        entry.folder.name
    ]
    assert list(folder.entries.iterdir()) == []


def test_a_cache_that_cannot_be_read_is_an_error(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(CacheError, match=r"entries: cannot be read \(Permission denied\)"):
        list(list_entries(folder))


# ------------------------------------------------------------ eviction


def build_three(cache: WeightCache, folder: CacheFolder) -> list[str]:
    """Build entries last used 300, 200 and 100 s before second 1000; return their addresses."""
    addresses = []
    for number in range(3):
        entry = cache.open_or_build(
            request(f"source {number}", number=str(number)), lambda file, seed=number: make(file, seed), Validation.FAST
        )
        entry.close()
        os.utime(folder.lock_file(entry.folder.name), (0, 700 + 100 * number))
        addresses.append(entry.folder.name)
    return addresses


def test_entries_are_listed_by_their_last_use(cache: WeightCache, folder: CacheFolder) -> None:
    addresses = build_three(cache, folder)

    found = list(list_entries(folder))

    assert [facts.address for facts in found] == addresses
    for number, address in enumerate(addresses):
        os.utime(folder.lock_file(address), (0, 500 - number))
    assert [facts.address for facts in list_entries(folder)] == addresses[::-1]
    assert [facts.used_s for facts in found] == [700, 800, 900]
    assert [facts.metadata["number"] for facts in found] == ["0", "1", "2"]
    assert all(facts.problem is None and not facts.is_in_use and facts.num_bytes > 640 for facts in found)


def test_an_entry_is_used_when_it_is_opened(cache: WeightCache, folder: CacheFolder) -> None:
    addresses = build_three(cache, folder)
    cache.open_or_build(request("source 0", number="0"), make, Validation.FAST).close()
    assert [facts.address for facts in list_entries(folder)] == [addresses[1], addresses[2], addresses[0]]


@pytest.mark.parametrize(
    ("max_entries", "max_age_s", "num_removed"),
    [(None, None, 0), (2, None, 1), (0, None, 3), (None, 150.0, 2), (2, 50.0, 3)],
)
def test_what_is_old_or_too_much_goes_and_its_requests_with_it(
    cache: WeightCache, folder: CacheFolder, max_entries: int | None, max_age_s: float | None, num_removed: int
) -> None:
    addresses = build_three(cache, folder)
    entry_bytes = next(list_entries(folder)).num_bytes
    max_bytes = None if max_entries is None else max_entries * (entry_bytes + 1)

    removed = prune(folder, max_bytes=max_bytes, max_age_s=max_age_s, now_s=1000.0).removed

    assert [facts.address for facts in removed] == addresses[:num_removed]
    assert len(list(folder.requests.iterdir())) == len(list(folder.entries.iterdir())) == 3 - num_removed
    assert list(folder.temporary.iterdir()) == []


def test_entries_of_this_process_stay(cache: WeightCache, folder: CacheFolder) -> None:
    addresses = build_three(cache, folder)

    removed = prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0, mine=addresses[:1]).removed

    assert [facts.address for facts in removed] == addresses[1:]


def test_an_eviction_that_was_killed_is_finished_by_the_next(cache: WeightCache, folder: CacheFolder) -> None:
    address = build_three(cache, folder)[0]
    aside = folder.temporary / f"{address}.evicted.x"
    aside.mkdir()
    (folder.entries / address).rename(aside / address)

    prune(folder, max_bytes=None, max_age_s=None, now_s=1000.0)

    assert not aside.exists()
    assert cache.find(request("source 0", number="0"), Validation.FAST) is None


def test_what_an_eviction_left_of_an_entry_in_use_goes_and_its_lock_stays(
    cache: WeightCache, folder: CacheFolder
) -> None:
    entry = open_entry(cache)
    aside = folder.temporary / f"{entry.folder.name}.evicted.x"
    aside.mkdir()

    prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0, mine=[entry.folder.name])

    assert not aside.exists()
    assert is_locked_for_others(entry.lock.file)
    entry.close()
    assert not is_locked_for_others(entry.lock.file)


def test_entries_that_another_process_evicts_meanwhile_are_passed_over(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = build_three(cache, folder)

    def evicted(entry: Path, validation: Validation) -> object:
        if entry.name == addresses[1]:
            shutil.rmtree(entry)
        return check_entry(entry, validation)

    with monkeypatch.context() as patch:
        patch.setattr("offload.cache_upkeep.check_entry", evicted)
        # The lock of an entry stays where it is.
        assert [facts.address for facts in list_entries(folder)] == [addresses[0], addresses[2]]

    def take(file: Path, *, is_shared: bool, timeout_s: float) -> FileLock:
        lock = real_take(file, is_shared=is_shared, timeout_s=timeout_s)
        if file.stem == addresses[0] and (folder.entries / addresses[0]).exists() and is_listed:
            shutil.rmtree(folder.entries / addresses[0])
        return lock

    real_take, is_listed = FileLock.take, False
    facts = list(list_entries(folder))
    is_listed = True
    monkeypatch.setattr("offload.cache_upkeep.list_entries", lambda folder, mine: facts)
    monkeypatch.setattr(FileLock, "take", take)
    removed = prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0).removed

    assert [each.address for each in removed] == [addresses[2]]
    assert list(folder.temporary.iterdir()) == []


def test_what_another_process_takes_or_evicts_meanwhile_is_left_to_it(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = build_three(cache, folder)
    facts = list(list_entries(folder))
    aside = folder.temporary / f"{addresses[0]}.evicted.x"
    aside.mkdir()
    # Nobody was seen to use it when the list was made.
    monkeypatch.setattr("offload.cache_upkeep.list_entries", lambda folder, mine: facts)

    with held_by_another(folder.lock_file(addresses[0])):
        removed = prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0).removed

    assert [each.address for each in removed] == addresses[1:]
    assert [entry.name for entry in folder.entries.iterdir()] == addresses[:1]
    assert [each.name for each in folder.requests.iterdir()] == [f"{request('source 0', number='0').key}.json"]
    assert aside.exists()


def test_folders_that_are_no_entries_are_left_alone(cache: WeightCache, folder: CacheFolder) -> None:
    open_entry(cache).close()
    (folder.entries / "lost+found").mkdir()
    (folder.entries / "note").touch()

    assert len(list(list_entries(folder))) == 1
    assert len(prune(folder, max_bytes=0, max_age_s=0.0, now_s=1e12).removed) == 1
    assert sorted(path.name for path in folder.entries.iterdir()) == ["lost+found", "note"]


def test_every_byte_is_verified_on_request(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    assert verify_entry(folder, entry.folder.name) is None
    DAMAGE["data"](entry.folder)
    assert verify_entry(folder, entry.folder.name) == f"{FILES[1]} is not what was published"


def test_a_damaged_manifest_is_listed_with_its_problem(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    entry.close()
    DAMAGE["manifest"](entry.folder)
    [facts] = list_entries(folder)
    assert facts.problem == "the manifest is not the one that was published"
