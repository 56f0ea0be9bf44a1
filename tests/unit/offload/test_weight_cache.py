"""The weight cache in one process: what is found, and what is built again."""

from __future__ import annotations

import hashlib
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

from offload.cache_folder import CacheFolder
from offload.cache_manifest import MANIFEST, Manifest, Validation, check_entry
from offload.errors import CacheBusy, CacheDamaged, CacheError
from offload.file_lock import FileLock, OnWait
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
    "content",
    [
        *("", "{", '{"address": 5}', '{"address": "../../etc"}', '{"address": "%s"}' % ("0" * 64)),
        pytest.param("[" * 200_000, id="deep JSON"),
    ],
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


def test_an_entry_of_another_format_is_a_miss_and_stays(
    cache: WeightCache, folder: CacheFolder, caplog: pytest.LogCaptureFixture
) -> None:
    text = b'{"format": "worldserve-weights-2"}'
    theirs = folder.entries / hashlib.sha256(text).hexdigest()
    theirs.mkdir()
    (theirs / MANIFEST).write_bytes(text)
    (folder.requests / f"{request().key}.json").write_text(json.dumps({"address": theirs.name}))

    mine = open_entry(cache)

    assert mine.was_built
    assert f"{theirs.name}: is of format worldserve-weights-2" in caplog.text
    assert not is_locked_for_others(folder.lock_file(theirs.name))
    mine.close()
    assert not open_entry(cache).was_built
    assert (theirs / MANIFEST).read_bytes() == text


def test_a_cache_that_was_copied_without_its_locks_is_used(cache: WeightCache, folder: CacheFolder) -> None:
    open_entry(cache).close()
    for part in ("locks", "temporary"):
        shutil.rmtree(folder.root / part)

    found = open_entry(cache)

    assert not found.was_built
    assert is_locked_for_others(found.lock.file)


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


def test_nobody_waits_for_another_builder_longer_than_is_said(
    cache: WeightCache, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    take = FileLock.take

    def try_twice(file: Path, *, is_shared: bool, timeout_s: float, on_wait: OnWait) -> FileLock:
        times = iter([0.0, 0.0, timeout_s])
        return take(
            file,
            is_shared=is_shared,
            timeout_s=timeout_s,
            on_wait=on_wait,
            clock=lambda: next(times),
            sleep=lambda seconds: None,
        )

    monkeypatch.setattr(FileLock, "take", try_twice)
    quick = WeightCache(folder, lock_timeout_s=7.0, on_wait=told.append, clock=lambda: 0.0)
    entry = open_entry(cache)
    entry.close()
    with held_by_another(folder.lock_file(request("other").key)) as holder:
        with pytest.raises(CacheBusy, match=rf"is held by process {holder} for more than 7 s"):
            quick.open_or_build(request("other"), lambda file: pytest.fail("made"), Validation.FAST)
        assert len(told) == 1
        assert f"held by process {holder}; 7 s are left" in told[0]
        # What is there already needs no builder.
        open_entry(quick).close()
    # Neither for one who evicts.
    with held_by_another(entry.lock.file), pytest.raises(CacheBusy, match="more than 7 s"):
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


def test_pointers_are_small_json(cache: WeightCache, folder: CacheFolder) -> None:
    entry = open_entry(cache)
    assert json.loads((folder.requests / f"{request().key}.json").read_text()) == {"address": entry.folder.name}
