"""The folder of a weight cache: its parts, the file systems it may be on, and writes that survive a crash.

entries/ADDRESS/manifest.json, *.safetensors     published, never changed
requests/KEY.json                                the address that a request led to
locks/KEY.lock, locks/ADDRESS.lock               who builds; who uses
locks/ADDRESS.place.lock                         who puts an entry there, or takes a damaged one away
temporary/KEY.*                                  not published yet; removed by whoever next holds KEY's lock
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from offload.errors import CacheRootRefused

MOUNTS = Path("/proc/self/mountinfo")

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
"""File systems whose pages are memory: a cache there would hold the weights a second time."""

KERNEL = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "bpf", "configfs"}
)
"""File systems that show the kernel and keep no files."""

NETWORKED = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs"),
        *("ocfs2", "gfs2", "orangefs", "pvfs2", "coda", "vboxsf", "virtiofs"),
    )
)
"""File systems that other machines change, whose locks and mappings can't be relied on. FUSE counts as one."""


PARTS = ("entries", "requests", "locks", "temporary")


class CacheFolder:
    """The parts of a cache. To look is to write nothing: whoever is about to write calls `make` first.

    Raises `CacheRootRefused` for a place that can't hold a cache, also where nothing is there yet.
    """

    def __init__(self, root: Path, *, mounts: Path = MOUNTS) -> None:
        nearest = nearest_folder(root)
        kind = file_system(nearest.resolve(), mounts)
        if kind in IN_MEMORY:
            raise CacheRootRefused(f"{root}: is on {kind}, in memory; expected a disk of this machine")
        if kind in KERNEL:
            raise CacheRootRefused(f"{root}: is on {kind}, which keeps no files; expected a disk of this machine")
        if kind in NETWORKED or kind.startswith("fuse"):
            raise CacheRootRefused(f"{root}: is on {kind}, shared between machines; expected a disk of this machine")
        self.root = root
        self.entries = root / "entries"
        self.requests = root / "requests"
        self.temporary = root / "temporary"
        if not self.is_there and not os.access(nearest, os.W_OK | os.X_OK):
            raise CacheRootRefused(f"{root}: cannot be made (nothing may be written in {nearest})")
        self._check_parts()

    @property
    def is_there(self) -> bool:
        """Tell whether anybody has made a cache here."""
        return self.entries.is_dir()

    def make(self) -> None:
        """Make what is not there yet. Raises `CacheRootRefused`."""
        try:
            for part in PARTS:
                (self.root / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheRootRefused(f"{self.root}: cannot be made ({error.strerror})") from error
        self._check_parts()

    def _check_parts(self) -> None:
        parts = [part for part in (self.entries, self.requests, self.temporary) if part.is_dir()]
        if len({os.stat(part).st_dev for part in parts}) > 1:
            raise CacheRootRefused(
                f"{self.root}: its parts are on several file systems, so that nothing can be renamed"
            )

    def lock_file(self, name: str) -> Path:
        """Return the lock of a request's key or an entry's address."""
        return self.root / "locks" / f"{name}.lock"


def nearest_folder(root: Path) -> Path:
    """Return the folder itself, or the one in which it would be made. Raises `CacheRootRefused`."""
    if "\0" in str(root):
        raise CacheRootRefused(f"{str(root)!r}: cannot be made (a zero byte is in its name)")
    try:
        nearest = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    except OSError as error:
        raise CacheRootRefused(f"{root}: cannot be made ({error.strerror})") from error
    if not nearest.is_dir():
        raise CacheRootRefused(f"{root}: cannot be made ({nearest} is no folder)")
    return nearest


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that holds a path. Raises `CacheRootRefused` where that can't be told."""
    found = ("", "")
    try:
        # Names of folders are bytes: what is no UTF-8, and blanks other than these, may be in them.
        lines = os.fsdecode(mounts.read_bytes()).split("\n")
    except OSError as error:
        raise CacheRootRefused(f"{path}: its file system is unknown ({mounts}: {error.strerror})") from error
    for line in filter(None, lines):
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        # Later lines lie over earlier ones.
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, after.split(" ")[0])
    if not found[1]:
        raise CacheRootRefused(f"{path}: its file system is unknown")
    return found[1]


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(file: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def read_address(pointer: Path) -> str | None:
    """Return the address a request's file names; None if there is no such file, or nothing that can be one in it."""
    try:
        # Whatever else has the name could be a pipe, which would be waited for.
        content = json.loads(pointer.read_bytes()) if pointer.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    match content:
        case {"address": str(address)} if is_address(address):
            return address
        case _:
            return None


def is_address(name: str) -> bool:
    """Tell whether a name can be that of an entry; other folders beside entries are none of ours."""
    return re.fullmatch(r"[0-9a-f]{64}", name) is not None


def remove_folder(folder: Path) -> None:
    """Delete a temporary folder. What can't be deleted is left to the next owner of its lock."""
    shutil.rmtree(folder, ignore_errors=True)
