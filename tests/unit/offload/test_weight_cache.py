"""The weight cache in one process: what is found, what is built again, what may go."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.cache_folder import CacheFolder, file_system
from offload.cache_manifest import MANIFEST, Manifest, Validation, check_entry
from offload.cache_upkeep import list_entries, prune, verify_entry
from offload.errors import CacheBusy, CacheDamaged, CacheError, CacheRootRefused
from offload.file_lock import FileLock, OnWait
from offload.weight_cache import WeightCache
from tests.support.weight_cache import (
    FILES,
    held_by_another,
    is_locked_for_others,
    make,
    open_entry,
    open_folder,
    request,
)


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return open_folder(tmp_path / "cache")


@pytest.fixture
def cache(folder: CacheFolder) -> WeightCache:
    return WeightCache(folder, lock_timeout_s=1.0)


def test_what_was_built_is_found_and_is_a_plain_safetensors_file(cache: WeightCache) -> None:
    assert cache.find(request(), Validation.FAST) is None

    built = open_entry(cache)
    assert built.was_built
    built.close()
    found = open_entry(cache)
    assert not found.was_built

    for number, file in enumerate(FILES):
        weight, scales = make(file)
        loaded = load_file(found.folder / file)
        assert torch.equal(loaded[f"{number}.weight"], weight)
        assert torch.equal(loaded[f"{number}.scales"], scales)
        stored = found.tensors[f"{number}.weight"]
        data = stored.file.read_bytes()[stored.start_byte : stored.end_byte]
        assert data == weight.view(torch.uint8).numpy().tobytes()
        assert stored.start_byte % 256 == 0


def test_what_changes_the_bytes_is_another_request(cache: WeightCache) -> None:
    keys = {request().key, request("other").key, request(precision="fp8").key, request(tensor_parallel="0/2").key}
    assert len(keys) == 4
    assert request().key == request().key
    specs = request().files[FILES[0]]
    for other in (
        [replace(specs[0], shape=(8, 16)), specs[1]],
        [replace(specs[0], dtype=torch.float16), specs[1]],
        [replace(specs[0], name="another"), specs[1]],
        [specs[1], specs[0]],
    ):
        keys.add(replace(request(), files={**request().files, FILES[0]: other}).key)
    assert len(keys) == 8
    open_entry(cache).close()
    assert cache.find(request(precision="fp8"), Validation.FAST) is None


def test_two_requests_with_the_same_content_share_an_entry(cache: WeightCache, folder: CacheFolder) -> None:
    first = cache.open_or_build(request("a"), make, Validation.FULL)
    second = cache.open_or_build(request("b"), make, Validation.FULL)

    assert second.was_built
    assert first.folder == second.folder
    assert len(list(folder.entries.iterdir())) == 1


def test_nothing_temporary_is_left(cache: WeightCache, folder: CacheFolder) -> None:
    open_entry(cache).close()
    assert list(folder.temporary.iterdir()) == []


def flip(file: Path, position: int) -> None:
    """Flip one bit of a published file."""
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "data": lambda entry: flip(entry / FILES[1], -1),
    "first data byte": lambda entry: flip(
        entry / FILES[0], int.from_bytes((entry / FILES[0]).read_bytes()[:8], "little") + 8
    ),
    "header text": lambda entry: flip(entry / FILES[0], 20),
    "header padding": lambda entry: flip(
        entry / FILES[0], int.from_bytes((entry / FILES[0]).read_bytes()[:8], "little") + 7
    ),
    "header length, low": lambda entry: flip(entry / FILES[0], 0),
    "header length, high": lambda entry: flip(entry / FILES[0], 7),
    "manifest": lambda entry: flip(entry / MANIFEST, 40),
    "manifest's digest of a file": lambda entry: flip(
        entry / MANIFEST, (entry / MANIFEST).read_text().index('"sha256"') + 12
    ),
    "file cut off": lambda entry: os.truncate(entry / FILES[0], 100),
    "file too long": lambda entry: ((entry / FILES[0]).chmod(0o644), os.truncate(entry / FILES[0], 10**4)),
    "file missing": lambda entry: (entry / FILES[0]).unlink(),
    "file replaced by a link": lambda entry: (
        (entry / FILES[0]).rename(entry.parent / "elsewhere"),
        (entry / FILES[0]).symlink_to(entry.parent / "elsewhere"),
    ),
    "manifest missing": lambda entry: (entry / MANIFEST).unlink(),
    "manifest replaced by a pipe": lambda entry: ((entry / MANIFEST).unlink(), os.mkfifo(entry / MANIFEST)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_every_kind_is_found_and_the_entry_is_built_again(cache: WeightCache, damage: str) -> None:
    entry = open_entry(cache)
    entry.close()
    DAMAGE[damage](entry.folder)

    with pytest.raises(CacheDamaged, match=entry.folder.name):
        cache.find(request(), Validation.FULL)
    rebuilt = open_entry(cache)

    assert rebuilt.was_built
    assert rebuilt.folder == entry.folder
    check_entry(rebuilt.folder, Validation.FULL)


def test_a_damaged_entry_goes_whatever_takes_its_place_and_keeps_no_lock(
    cache: WeightCache, folder: CacheFolder
) -> None:
    entry = open_entry(cache)
    entry.close()
    DAMAGE["manifest"](entry.folder)

    with pytest.raises(CacheDamaged):
        cache.find(request(), Validation.FAST)
    assert not is_locked_for_others(entry.lock.file)

    rebuilt = cache.open_or_build(request(), lambda file: make(file, 3), Validation.FAST)
    assert rebuilt.folder != entry.folder
    assert list(folder.entries.iterdir()) == [rebuilt.folder]


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_bytes(b"\x04" + bytes(7) + b"{]}{")])
def test_an_entry_that_changes_behind_its_check_is_an_error_and_keeps_no_lock(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    address = open_entry(cache).folder.name

    def check_and_change(entry: Path, validation: Validation) -> Manifest:
        manifest = check_entry(entry, validation)
        change(entry / FILES[0])
        return manifest

    monkeypatch.setattr("offload.weight_cache.check_entry", check_and_change)
    monkeypatch.setattr("offload.weight_cache.find_mismatch", lambda *_: None)
    with pytest.raises(CacheError, match=rf"{address}: layer-\d+.safetensors has a header|can't be read"):
        cache.find(request(), Validation.FAST)
    assert not is_locked_for_others(folder.lock_file(address))


def test_an_entry_that_is_evicted_before_it_is_locked_is_a_miss(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = open_entry(cache)
    entry.close()
    take = FileLock.take

    def evicted(file: Path, *, is_shared: bool, timeout_s: float, on_wait: OnWait) -> FileLock:
        shutil.rmtree(folder.entries / file.stem)
        return take(file, is_shared=is_shared, timeout_s=timeout_s, on_wait=on_wait)

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "take", evicted)
        assert cache.find(request(), Validation.FAST) is None
    assert not is_locked_for_others(entry.lock.file)
    assert open_entry(cache).was_built


@pytest.mark.parametrize("damage", set(DAMAGE) - {"data", "first data byte"})
def test_the_fast_check_finds_all_but_flipped_data(cache: WeightCache, damage: str) -> None:
    entry = open_entry(cache)
    entry.close()
    DAMAGE[damage](entry.folder)

    with pytest.raises(CacheDamaged):
        cache.find(request(), Validation.FAST)


def test_bytes_that_cannot_be_read_are_damage(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = open_entry(cache)
    entry.close()

    def broken(file: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("offload.cache_manifest.file_sha256", broken)
    with pytest.raises(CacheDamaged, match=rf"{FILES[0]} cannot be read \(Input/output error\)"):
        cache.find(request(), Validation.FULL)


def test_the_fast_check_reads_no_data(cache: WeightCache) -> None:
    entry = open_entry(cache)
    entry.close()
    DAMAGE["data"](entry.folder)

    assert cache.find(request(), Validation.FAST) is not None


@pytest.mark.parametrize(
    "content", ["", "{", '{"address": 5}', '{"address": "../../etc"}', '{"address": "%s"}' % ("0" * 64)]
)
def test_a_request_that_leads_nowhere_is_a_miss(cache: WeightCache, folder: CacheFolder, content: str) -> None:
    open_entry(cache).close()
    pointer = folder.requests / f"{request().key}.json"
    pointer.unlink()
    pointer.write_text(content)

    assert cache.find(request(), Validation.FAST) is None
    assert open_entry(cache).was_built


def test_a_build_that_fails_leaves_nothing(cache: WeightCache, folder: CacheFolder) -> None:
    def broken(file: str) -> list[torch.Tensor]:
        if file == FILES[1]:
            raise RuntimeError("the checkpoint is gone")
        return list(make(file))

    with pytest.raises(RuntimeError, match="checkpoint is gone"):
        cache.open_or_build(request(), broken, Validation.FULL)

    assert list(folder.entries.iterdir()) == list(folder.temporary.iterdir()) == []
    assert open_entry(cache).was_built


def test_tensors_that_are_not_those_of_the_request_are_refused(cache: WeightCache) -> None:
    with pytest.raises(ValueError, match=r"0\.weight: expected"):
        cache.open_or_build(request(), lambda file: [torch.zeros(16, 8), torch.zeros(1, 16)], Validation.FULL)


def test_a_disk_that_fills_up_leaves_nothing(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("offload.tensor_file.os.write", full)
        with pytest.raises(CacheError, match=r"the entry can't be written \(No space left on device\)"):
            open_entry(cache)

    assert list(folder.entries.iterdir()) == list(folder.temporary.iterdir()) == list(folder.requests.iterdir()) == []
    assert open_entry(cache).was_built


def test_all_is_on_the_disk_before_it_gets_its_name(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('.')[0]}")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", synced)
    open_entry(WeightCache(folder, lock_timeout_s=1.0, on_step=order.append)).close()

    key = request().key
    assert order == [
        *("locked", "temporary folder made"),
        *("fsync layer-00000", "layer-00000.safetensors written"),
        *("fsync layer-00001", "layer-00001.safetensors written"),
        *("fsync manifest", "manifest written", f"fsync {key}", "temporary folder synced"),
        # The first is of what may have been in its place.
        *("fsync entries", "entry renamed", "fsync entries", "entries synced"),
        *("fsync pointer", "pointer written", "pointer renamed", "fsync requests", "requests synced"),
    ]


def test_an_entry_is_in_use_from_the_moment_it_is_there(folder: CacheFolder) -> None:
    """Others that make room would evict it before it is used."""
    seen: list[bool] = []

    def on_step(step: str) -> None:
        for entry in folder.entries.iterdir():
            seen.append(is_locked_for_others(folder.lock_file(entry.name)))

    open_entry(WeightCache(folder, lock_timeout_s=1.0, on_step=on_step))

    assert seen == [True] * 5


def test_a_publication_that_fails_late_keeps_no_lock(folder: CacheFolder) -> None:
    def on_step(step: str) -> None:
        if step == "entry renamed":
            raise OSError(5, "Input/output error")

    with pytest.raises(CacheError, match=r"the entry can't be written \(Input/output error\)"):
        open_entry(WeightCache(folder, lock_timeout_s=1.0, on_step=on_step))
    [entry] = folder.entries.iterdir()
    assert not is_locked_for_others(folder.lock_file(entry.name))


def test_a_place_is_looked_at_and_changed_under_one_lock(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with the same content have locks of their own, and one must not take the other's entry for damaged."""
    held = []

    def check(entry: Path, validation: Validation) -> Manifest:
        if validation is Validation.FULL:
            held.append(is_locked_for_others(folder.lock_file(f"{entry.name}.place")))
        return check_entry(entry, validation)

    monkeypatch.setattr("offload.weight_cache.check_entry", check)
    entry = cache.open_or_build(request(), make, Validation.FAST)
    entry.close()
    DAMAGE["manifest"](entry.folder)
    cache.open_or_build(request(), make, Validation.FAST)

    assert held == [True, True, True]
    assert not is_locked_for_others(folder.lock_file(f"{entry.folder.name}.place"))


def test_a_whole_entry_that_took_a_damaged_ones_place_meanwhile_stays(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = open_entry(cache)
    entry.close()
    published = entry.folder.stat().st_ino

    def find(*_: object) -> None:
        raise CacheDamaged(entry.folder.name, "was damaged a moment ago")

    monkeypatch.setattr(cache, "_find", find)
    assert cache.open_or_build(request(), make, Validation.FAST).folder.stat().st_ino == published


@pytest.mark.parametrize("name", ["tempfile.mkdtemp", "shutil.disk_usage", "os.utime", "sync_folder"])
def test_whatever_the_system_refuses_is_an_error_of_the_cache(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(f"offload.weight_cache.{name}", refuse)
        with pytest.raises(CacheError, match=r"cache: the entry can't be written \(Read-only file system\)"):
            open_entry(cache)
    open_entry(cache).close()
    monkeypatch.setattr("offload.weight_cache.os.utime", refuse)
    with pytest.raises(CacheError, match=r"cache: the entry can't be read \(Read-only file system\)"):
        open_entry(cache)


WRONG_ENTRIES = {
    "metadata": (request(precision="fp8"), r"precision is 'fp8_kv', asked for was 'fp8'"),
    "no such metadata": (request(), r"precision is 'fp8_kv', asked for was None"),
    "files": (
        replace(request(precision="fp8_kv"), files={FILES[0]: request().files[FILES[0]]}),
        r"its files are layer-00000\.safetensors, layer-00001\.safetensors, asked for were layer-00000",
    ),
    "tensors": (
        replace(
            request(precision="fp8_kv"), files={**request().files, FILES[1]: tuple(reversed(request().files[FILES[1]]))}
        ),
        r"layer-00001\.safetensors has other tensors than were asked for",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
def test_an_entry_that_is_not_what_the_request_is_for_is_a_miss(
    cache: WeightCache, folder: CacheFolder, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is whole: what led to it is another request's."""
    asked, problem = WRONG_ENTRIES[wrong]
    theirs = cache.open_or_build(request(precision="fp8_kv"), lambda file: make(file, 2), Validation.FULL)
    theirs.close()
    shutil.copy(folder.requests / f"{request(precision='fp8_kv').key}.json", folder.requests / f"{asked.key}.json")

    assert cache.find(asked, Validation.FULL) is None
    assert re.search(problem, caplog.text)
    assert not is_locked_for_others(theirs.lock.file)

    def made(file: str) -> list[torch.Tensor]:
        tensors = list(make(file, 1))
        return tensors[::-1] if wrong == "tensors" and file == FILES[1] else tensors

    mine = cache.open_or_build(asked, made, Validation.FULL)
    assert mine.was_built
    assert mine.folder != theirs.folder
    check_entry(theirs.folder, Validation.FULL)
    mine.close()
    again = cache.find(asked, Validation.FULL)
    assert again is not None
    assert again.folder == mine.folder


def test_what_was_written_is_renamed_not_copied(folder: CacheFolder) -> None:
    written: dict[str, set[int]] = {}

    def on_step(step: str) -> None:
        if step in ("manifest written", "pointer written"):
            written[step] = {path.stat().st_ino for path in folder.temporary.rglob("*")}

    entry = open_entry(WeightCache(folder, lock_timeout_s=1.0, on_step=on_step))

    assert entry.folder.stat().st_ino in written["manifest written"]
    assert (folder.requests / f"{request().key}.json").stat().st_ino in written["pointer written"]


def test_an_entry_in_its_place_already_is_read_whole_before_it_is_taken(
    cache: WeightCache, folder: CacheFolder
) -> None:
    """Whoever wrote it was killed before the request led to it, and since then a bit was flipped."""
    entry = open_entry(cache)
    entry.close()
    (folder.requests / f"{request().key}.json").unlink()
    DAMAGE["data"](entry.folder)

    check_entry(open_entry(cache, Validation.FAST).folder, Validation.FULL)


def test_what_a_killed_process_left_goes_with_its_own_lock_only(cache: WeightCache, folder: CacheFolder) -> None:
    mine = [folder.temporary / f"{request().key}.{word}" for word in ("x", "damaged.x", "pointer.x")]
    other = folder.temporary / f"{request('other').key}.x"
    for stale in (*mine, other):
        stale.mkdir()
        (stale / "file").touch()

    open_entry(cache).close()

    assert list(folder.temporary.iterdir()) == [other]
    assert (other / "file").exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.weight_cache.shutil.disk_usage", lambda path: type("Usage", (), {"free": 639})())

    with pytest.raises(CacheError, match="the weights take 640 bytes, the disk has 639 free"):
        cache.open_or_build(request(), lambda file: pytest.fail("made"), Validation.FULL)


# ------------------------------------------------------------ file systems


def mount_table(tmp_path: Path, *lines: tuple[str, str]) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text("".join(f"1 0 8:1 / {point} rw - {kind} dev rw\n" for point, kind in lines), encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "proc", "nfs4", "cifs", "fuse.sshfs", "fuseblk", "9p"])
def test_memory_and_network_are_refused(tmp_path: Path, kind: str) -> None:
    mounts = mount_table(tmp_path, ("/", "ext4"), (str(tmp_path), kind))

    with pytest.raises(CacheRootRefused, match=rf"is on {kind}, .*expected a disk of this machine"):
        CacheFolder(tmp_path / "cache", mounts=mounts)
    assert not (tmp_path / "cache").exists()


def test_a_link_to_memory_is_refused(tmp_path: Path) -> None:
    mounts = mount_table(tmp_path, ("/", "ext4"), (str(tmp_path.resolve() / "memory"), "tmpfs"))
    (tmp_path / "memory").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "memory")

    with pytest.raises(CacheRootRefused, match="is on tmpfs"):
        CacheFolder(tmp_path / "cache", mounts=mounts)


def test_parts_on_several_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def elsewhere(path: Path, **flags: bool) -> os.stat_result:
        mode, inode, device, *rest = stat(path, **flags)
        return os.stat_result((mode, inode, device + (Path(path).name == "temporary"), *rest))

    monkeypatch.setattr("os.stat", elsewhere)
    with pytest.raises(CacheRootRefused, match="on several file systems, so that nothing can be renamed"):
        CacheFolder(tmp_path / "cache", mounts=mount_table(tmp_path, ("/", "ext4"))).make()
    with pytest.raises(CacheRootRefused, match="on several file systems"):
        CacheFolder(tmp_path / "cache", mounts=mount_table(tmp_path, ("/", "ext4")))


def test_the_nearest_and_latest_mount_decides(tmp_path: Path) -> None:
    mounts = mount_table(tmp_path, ("/", "ext4"), ("/a", "nfs"), ("/a/b", "xfs"), ("/a/b", "tmpfs"))

    found = {path: file_system(Path(path), mounts) for path in ("/x", "/a/c", "/a/b/c", "/ab")}
    spaced = mount_table(tmp_path, ("/", "ext4"), ("/with\\040space\\134", "nfs"))
    assert file_system(Path("/with space\\/c"), spaced) == "nfs"

    assert found == {"/x": "ext4", "/a/c": "nfs", "/a/b/c": "tmpfs", "/ab": "ext4"}


def test_a_file_system_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheRootRefused, match="its file system is unknown"):
        file_system(tmp_path, tmp_path / "missing")


@pytest.mark.parametrize("name", ["file/cache", "a\0b", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheRootRefused, match="cannot be made"):
        CacheFolder(tmp_path / name, mounts=mount_table(tmp_path, ("/", "ext4")))


def test_a_folder_in_which_nothing_may_be_made_is_refused_and_a_cache_in_it_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This user may be the system's, who may write anywhere."""
    mounts = mount_table(tmp_path, ("/", "ext4"))
    monkeypatch.setattr("offload.cache_folder.os.access", lambda path, mode: False)
    with pytest.raises(CacheRootRefused, match=rf"cannot be made \(nothing may be written in {tmp_path}\)"):
        CacheFolder(tmp_path / "cache", mounts=mounts)
    (tmp_path / "cache" / "entries").mkdir(parents=True)
    assert CacheFolder(tmp_path / "cache", mounts=mounts).is_there


def test_looking_at_a_folder_writes_nothing_and_the_first_use_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CacheFolder(tmp_path / "new" / "cache", mounts=mount_table(tmp_path, ("/", "ext4")))
    cache = WeightCache(folder, lock_timeout_s=1.0)
    assert cache.find(request(), Validation.FAST) is None
    assert (folder.is_there, (tmp_path / "new").exists()) == (False, False)
    open_entry(cache).close()
    assert folder.is_there

    def refused(path: Path, **options: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(CacheRootRefused, match=r"cannot be made \(Permission denied\)"):
        folder.make()


# ------------------------------------------------------------ upkeep


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

    removed = prune(folder, max_bytes=max_bytes, max_age_s=max_age_s, now_s=1000.0)

    assert [facts.address for facts in removed] == addresses[:num_removed]
    assert len(list(folder.requests.iterdir())) == len(list(folder.entries.iterdir())) == 3 - num_removed
    assert list(folder.temporary.iterdir()) == []


def test_entries_of_this_process_stay(cache: WeightCache, folder: CacheFolder) -> None:
    addresses = build_three(cache, folder)

    removed = prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0, mine=addresses[:1])

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
    removed = prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0)

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
        removed = prune(folder, max_bytes=0, max_age_s=None, now_s=1000.0)

    assert [each.address for each in removed] == addresses[1:]
    assert [entry.name for entry in folder.entries.iterdir()] == addresses[:1]
    assert [each.name for each in folder.requests.iterdir()] == [f"{request('source 0', number='0').key}.json"]
    assert aside.exists()


def test_folders_that_are_no_entries_are_left_alone(cache: WeightCache, folder: CacheFolder) -> None:
    open_entry(cache).close()
    (folder.entries / "lost+found").mkdir()
    (folder.entries / "note").touch()

    assert len(list(list_entries(folder))) == 1
    assert len(prune(folder, max_bytes=0, max_age_s=0.0, now_s=1e12)) == 1
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


# ------------------------------------------------------------ locks


def test_a_lock_that_is_free_is_had_at_once_and_can_be_had_again(tmp_path: Path) -> None:
    for _ in range(2):
        with FileLock.take(tmp_path / "lock", is_shared=False, timeout_s=0.0) as lock:
            lock.release()


def test_the_wait_is_bounded_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    told: list[str] = []
    times = iter([0.0, 0.4, 30.3, 30.4, 60.0])

    def held(descriptor: int, kind: int) -> None:
        raise BlockingIOError(11, "held")

    monkeypatch.setattr("offload.file_lock.fcntl.lockf", held)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CacheBusy, match=r"lock is held by another process for more than 60 s"):
        FileLock.take(
            tmp_path / "lock",
            is_shared=False,
            timeout_s=60.0,
            on_wait=told.append,
            clock=lambda: next(times),
            sleep=waits.append,
        )
    assert len(waits) == 3
    assert told == [f"waiting for lock, held by another process; {left} s are left" for left in (60, 30)]
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_nobody_waits_for_another_builder_longer_than_is_said(cache: WeightCache, folder: CacheFolder) -> None:
    told: list[str] = []
    quick = WeightCache(folder, lock_timeout_s=0.01, on_wait=told.append)
    entry = open_entry(cache)
    entry.close()
    with held_by_another(folder.lock_file(request("other").key)) as holder:
        with pytest.raises(CacheBusy, match=rf"is held by process {holder} for more than 0\.0\d* s"):
            quick.open_or_build(request("other"), lambda file: pytest.fail("made"), Validation.FAST)
        assert f"held by process {holder}; 0 s are left" in told[0]
        # What is there already needs no builder.
        open_entry(quick).close()
    # Neither for one who evicts.
    with held_by_another(entry.lock.file), pytest.raises(CacheBusy, match=r"more than 0\.0\d* s"):
        quick.find(request(), Validation.FAST)


def test_all_waits_of_one_call_have_one_bound(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """For who builds the entry, evicts it, has its place, in turn; the time of building in between doesn't count."""
    bounds: list[float] = []
    times = iter([100.0, 103.0, 104.0, 204.0, 209.0, 209.5])
    take = FileLock.take

    def taken(file: Path, *, is_shared: bool, timeout_s: float, on_wait: OnWait) -> FileLock:
        bounds.append(timeout_s)
        return take(file, is_shared=is_shared, timeout_s=timeout_s, on_wait=on_wait)

    monkeypatch.setattr(FileLock, "take", taken)
    open_entry(WeightCache(folder, lock_timeout_s=10.0, clock=lambda: next(times))).close()
    assert bounds == [7.0, 1.0, 0.5]


def test_a_lock_the_system_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("offload.file_lock.fcntl.lockf", refused)
    with pytest.raises(CacheError, match="cannot be locked"):
        FileLock.take(tmp_path / "lock", is_shared=False, timeout_s=1.0)
    with pytest.raises(CacheError, match="cannot be opened"):
        FileLock.take(tmp_path / "missing" / "lock", is_shared=False, timeout_s=1.0)


def test_pointers_are_small_json(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    assert json.loads((folder.requests / f"{request().key}.json").read_text()) == {"address": entry.folder.name}
