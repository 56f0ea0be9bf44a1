"""Upkeep of a weight cache: what is in it, whether it is whole, and what may go. Entries in use are left alone.

To list and to verify is to read: nothing is written, made or locked for it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from offload.cache_folder import CacheFolder, is_address, read_address, remove_folder, sync_folder
from offload.cache_manifest import Validation, check_entry
from offload.errors import CacheBusy, CacheDamaged, CacheError, CacheForeign
from offload.file_lock import FileLock, is_held

EVICTED = ".evicted."
"""Between address and a random word: the name under which an entry is deleted."""


class EntryKind(StrEnum):
    """What has the name of an entry.

    OURS: an entry of this format, whole or damaged. OTHER: a file, a link, or an entry of another format. UNREADABLE:
    the system does not let this user read it. The last two are never deleted.
    """

    OURS = "ours"
    OTHER = "other"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFacts:
    """One entry as `worldserve cache list` shows it. `problem`: what is wrong with it, None if nothing was seen."""

    address: str
    kind: EntryKind
    num_bytes: int
    used_s: float
    is_in_use: bool
    metadata: dict[str, str]
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What `prune` did. `stuck`: what had to go and can't be deleted, its problem being why."""

    leftovers: tuple[str, ...]
    removed: tuple[EntryFacts, ...]
    stuck: tuple[EntryFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A temporary folder of a build or an eviction, which is under way, or was killed."""

    name: str
    num_bytes: int
    is_in_use: bool


def list_entries(folder: CacheFolder, *, mine: Collection[str] = ()) -> Iterator[EntryFacts]:
    """Yield all that is named as an entry, what was used longest ago first. Raises `CacheError`.

    `mine` are the addresses that this process uses.
    """
    found = []
    for entry in _children(folder.entries):
        if is_address(entry.name):
            # Another process may evict it meanwhile.
            with suppress(FileNotFoundError):
                found.append(_facts(folder, entry, is_mine=entry.name in mine))
    yield from sorted(found, key=lambda facts: facts.used_s)


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise CacheError(f"{folder}: cannot be read ({error.strerror})") from error


def _facts(folder: CacheFolder, entry: Path, *, is_mine: bool) -> EntryFacts:
    """Describe an entry. Raises FileNotFoundError if it is not there any more."""
    lock_file = folder.lock_file(entry.name)
    found = entry.lstat()
    metadata: dict[str, str] = {}
    kind, problem = EntryKind.OURS, None
    num_bytes, is_in_use = found.st_size, is_mine
    try:
        if not stat.S_ISDIR(found.st_mode):
            kind, problem = EntryKind.OTHER, "a link" if stat.S_ISLNK(found.st_mode) else "a file"
        else:
            num_bytes = sum(file.lstat().st_size for file in entry.iterdir())
            is_in_use = is_mine or is_held(lock_file)
            metadata = dict(check_entry(entry, Validation.FAST).metadata)
    except CacheDamaged as error:
        problem = error.problem
    except CacheForeign as error:
        kind, problem = EntryKind.OTHER, f"an entry of format {error.format_name}"
    except FileNotFoundError:
        raise
    except OSError as error:
        kind, problem = EntryKind.UNREADABLE, str(error.strerror)
    # What was evicted while it was looked at is not there, rather than damaged.
    entry.lstat()
    return EntryFacts(
        address=entry.name,
        kind=kind,
        num_bytes=num_bytes,
        used_s=_used_s(lock_file, found.st_mtime),
        is_in_use=is_in_use,
        metadata=metadata,
        problem=problem,
    )


def _used_s(lock_file: Path, made_s: float) -> float:
    """Return when an entry was last used: its lock has the time. One without a lock was copied here."""
    try:
        return lock_file.stat().st_mtime
    except OSError:
        return made_s


def verify_entry(folder: CacheFolder, address: str) -> str | None:
    """Check every byte of an entry; return what is wrong with it, or None. Raises `CacheForeign`."""
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
) -> Pruned:
    """Delete entries not used for `max_age_s`, then those used longest ago until `max_bytes` hold the rest.

    Entries in use are never touched; those of this process must be in `mine`, whose own locks do not keep it away.
    None means no such limit. What is no entry of this format is neither counted nor deleted. What killed builds and
    evictions left goes first. Raises `CacheError`.
    """
    # A cache that was copied here may have no locks, without which nothing can be evicted.
    folder.make()
    leftovers = remove_leftovers(folder, mine=mine)
    entries = [entry for entry in list_entries(folder, mine=mine) if entry.kind is EntryKind.OURS]
    total_bytes = sum(entry.num_bytes for entry in entries)
    removed, stuck = [], []
    for entry in entries:
        if entry.is_in_use:
            # Should its user be killed, its age counts from here.
            with suppress(OSError):
                os.utime(folder.lock_file(entry.address), (now_s, now_s))
            continue
        is_old = max_age_s is not None and now_s - entry.used_s > max_age_s
        is_too_much = max_bytes is not None and total_bytes > max_bytes
        if not (is_old or is_too_much):
            continue
        try:
            is_gone = _evict(folder, entry.address)
        except (CacheError, OSError) as error:
            stuck.append(replace(entry, problem=f"can't be deleted: {error}"))
            continue
        if is_gone:
            total_bytes -= entry.num_bytes
            removed.append(entry)
    return Pruned(leftovers=leftovers, removed=tuple(removed), stuck=tuple(stuck))


def _evict(folder: CacheFolder, address: str) -> bool:
    """Delete an entry and the requests that lead to it; False if it is in use. Raises `CacheError` and `OSError`."""
    try:
        with FileLock.take(folder.lock_file(address), is_shared=False, timeout_s=0.0):
            return _delete(folder, address)
    except CacheBusy:
        return False


def _delete(folder: CacheFolder, address: str) -> bool:
    for pointer in folder.requests.glob("*.json"):
        if read_address(pointer) == address:
            pointer.unlink(missing_ok=True)
    # No folder is made for it: a disk that is full has no room for one.
    aside = folder.temporary / f"{address}{EVICTED}{secrets.token_hex(4)}"
    try:
        (folder.entries / address).rename(aside)
        sync_folder(folder.entries)
    except FileNotFoundError:
        # Another process was here between the list and the lock.
        return False
    finally:
        remove_folder(aside)
    return True


# ------------------------------------------------------------ what killed processes left


def list_leftovers(folder: CacheFolder) -> Iterator[Leftover]:
    """Yield the temporary folders of builds and evictions by name. Raises `CacheError`."""
    if not folder.temporary.is_dir():
        return
    for left in sorted(_children(folder.temporary)):
        lock_name = _lock_name(left)
        if lock_name is not None:
            with suppress(OSError):
                num_bytes = sum(file.lstat().st_size for file in left.rglob("*") if not file.is_dir())
                is_in_use = is_held(folder.lock_file(lock_name))
                yield Leftover(name=left.name, num_bytes=num_bytes, is_in_use=is_in_use)


def _lock_name(left: Path) -> str | None:
    """Return the request's key or the entry's address whose lock is held by whoever is at a temporary folder."""
    found = re.match(r"([0-9a-f]{64})\.", left.name)
    return None if found is None or left.is_symlink() or not left.is_dir() else found[1]


def remove_leftovers(folder: CacheFolder, *, mine: Collection[str] = ()) -> tuple[str, ...]:
    """Delete the temporary folders that nobody is at any more; return their names. Raises `CacheError`.

    `mine` are the addresses that this process uses: nobody else can evict them, and to take their locks again would be
    to lose them, see `FileLock`.
    """
    removed = []
    for left in sorted(_children(folder.temporary)) if folder.temporary.is_dir() else ():
        lock_name = _lock_name(left)
        if lock_name in mine:
            removed += _remove_leftover(left)
        elif lock_name is not None:
            # Somebody is at it, or it is another user's.
            with suppress(CacheError), FileLock.take(folder.lock_file(lock_name), is_shared=False, timeout_s=0.0):
                removed += _remove_leftover(left)
    return tuple(removed)


def _remove_leftover(left: Path) -> list[str]:
    """Delete a folder whose lock is held; return its name, nothing if it was gone already or stays."""
    was_there = left.exists()
    remove_folder(left)
    return [left.name] if was_there and not left.exists() else []
