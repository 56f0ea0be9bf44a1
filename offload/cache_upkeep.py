"""Upkeep of a weight cache: what is in it, whether it is whole, and what may go. Entries in use are left alone."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.cache_folder import CacheFolder, is_address, read_address, remove_folder, sync_folder
from offload.cache_manifest import Validation, check_entry
from offload.errors import CacheBusy, CacheDamaged
from offload.file_lock import FileLock

EVICTED = ".evicted."
"""Between address and a random word: the folder in which an entry is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFacts:
    """One entry as `worldserve cache list` shows it. `problem`: why its manifest can't be read, None if it can."""

    address: str
    num_bytes: int
    used_s: float
    is_in_use: bool
    metadata: dict[str, str]
    problem: str | None


def list_entries(folder: CacheFolder, *, mine: Collection[str] = ()) -> Iterator[EntryFacts]:
    """Yield all entries, the one used longest ago first. `mine` are the addresses that this process uses."""
    found = []
    for entry in folder.entries.iterdir():
        if is_address(entry.name):
            # Another process may evict it meanwhile.
            with suppress(FileNotFoundError):
                found.append(_facts(folder, entry, is_mine=entry.name in mine))
    yield from sorted(found, key=lambda facts: facts.used_s)


def _facts(folder: CacheFolder, entry: Path, *, is_mine: bool) -> EntryFacts:
    """Describe an entry. Raises FileNotFoundError if it is not there any more."""
    metadata: dict[str, str] = {}
    problem = None
    try:
        metadata = dict(check_entry(entry, Validation.FAST).metadata)
    except CacheDamaged as error:
        problem = error.problem
    lock_file = folder.lock_file(entry.name)
    used_s = lock_file.stat().st_mtime if lock_file.exists() else entry.stat().st_mtime
    return EntryFacts(
        address=entry.name,
        num_bytes=sum(file.stat().st_size for file in entry.iterdir()),
        used_s=used_s,
        is_in_use=is_mine or _is_in_use(lock_file),
        metadata=metadata,
        problem=problem,
    )


def _is_in_use(lock_file: Path) -> bool:
    try:
        FileLock.take(lock_file, is_shared=False, timeout_s=0.0).release()
    except CacheBusy:
        return True
    return False


def verify_entry(folder: CacheFolder, address: str) -> str | None:
    """Check every byte of an entry; return what is wrong with it, or None."""
    try:
        check_entry(folder.entries / address, Validation.FULL)
    except CacheDamaged as error:
        return error.problem
    return None


def prune(
    folder: CacheFolder,
    *,
    max_bytes: int | None,
    max_age_s: float | None,
    now_s: float,
    mine: Collection[str] = (),
) -> tuple[EntryFacts, ...]:
    """Delete entries not used for `max_age_s`, then those used longest ago until `max_bytes` hold the rest.

    Entries in use are never touched; those of this process must be in `mine`, whose own locks do not keep it away.
    None means no such limit. Returns what was deleted.
    """
    _remove_leftovers(folder, mine)
    entries = list(list_entries(folder, mine=mine))
    total_bytes = sum(entry.num_bytes for entry in entries)
    removed = []
    for entry in entries:
        is_old = max_age_s is not None and now_s - entry.used_s > max_age_s
        is_too_much = max_bytes is not None and total_bytes > max_bytes
        if (is_old or is_too_much) and not entry.is_in_use and _evict(folder, entry.address):
            total_bytes -= entry.num_bytes
            removed.append(entry)
    return tuple(removed)


def _evict(folder: CacheFolder, address: str) -> bool:
    """Delete an entry and the requests that lead to it, unless it is in use."""
    try:
        lock = FileLock.take(folder.lock_file(address), is_shared=False, timeout_s=0.0)
    except CacheBusy:
        return False
    with lock:
        for pointer in folder.requests.glob("*.json"):
            if read_address(pointer) == address:
                pointer.unlink(missing_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{address}{EVICTED}", dir=folder.temporary))
        try:
            (folder.entries / address).rename(aside / address)
            sync_folder(folder.entries)
        except FileNotFoundError:
            # Another process was here between the list and the lock.
            return False
        finally:
            remove_folder(aside)
    return True


def _remove_leftovers(folder: CacheFolder, mine: Collection[str]) -> None:
    """Delete what an eviction that was killed has left, unless another one is at it."""
    for aside in folder.temporary.glob(f"*{EVICTED}*"):
        address = aside.name.partition(EVICTED)[0]
        if address in mine:
            # Nobody else can evict it now, and to take its lock again would be to lose it: see `FileLock`.
            remove_folder(aside)
            continue
        try:
            lock = FileLock.take(folder.lock_file(address), is_shared=False, timeout_s=0.0)
        except CacheBusy:
            continue
        with lock:
            remove_folder(aside)
