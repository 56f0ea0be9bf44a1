"""The runtime weight cache: final weights on a local disk, made once, mapped by every process of the host.

Looking up takes the lock of an entry and writes nothing else: request, address, entry, check. Who finds nothing takes
the request's lock, looks again (somebody may have built meanwhile), builds in a temporary folder, and publishes by
renaming. At every moment an entry is there as a whole or not at all, whoever is killed when.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from offload.cache_folder import CacheFolder, read_address, remove_folder, sync_folder, write_synced
from offload.cache_manifest import (
    MANIFEST,
    CacheRequest,
    Manifest,
    Validation,
    check_entry,
    find_mismatch,
    read_tensors,
)
from offload.errors import CacheDamaged, CacheError, CacheForeign
from offload.file_lock import FileLock, OnWait, log_wait
from offload.host_plan import StoredTensor
from offload.tensor_file import FileDigest, write_tensor_file

logger = logging.getLogger(__name__)

MakeFile = Callable[[str], Iterable[Tensor]]
"""Return the tensors of one file of a request, by its name and in the request's order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheEntry:
    """An entry that was checked and is in use until `close`: until then nobody evicts it.

    `stored`: its tensors by file and name. `was_built`: by this call.
    """

    folder: Path
    manifest: Manifest
    stored: Mapping[str, Mapping[str, StoredTensor]]
    was_built: bool
    lock: FileLock

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by name, with its place in a file."""
        return {name: tensor for tensors in self.stored.values() for name, tensor in tensors.items()}

    def close(self) -> None:
        """Allow eviction; what was used until now was last used now. Mappings of the files stay valid."""
        self.lock.touch()
        self.lock.release()


class WeightCache:
    """A cache in a folder of this host. Several processes may use it at the same time, one thread in each.

    `lock_timeout_s` bounds all that one call waits for others; `on_wait` is told whom it waits for. `on_step` is told
    what is about to be done; tests end the process there.
    """

    def __init__(
        self,
        folder: CacheFolder,
        *,
        lock_timeout_s: float,
        on_wait: OnWait = log_wait,
        on_step: Callable[[str], None] = lambda step: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._lock_timeout_s = lock_timeout_s
        self._on_wait = on_wait
        self._on_step = on_step
        self._clock = clock

    def find(self, request: CacheRequest, validation: Validation) -> CacheEntry | None:
        """Return the entry of a request, None if there is none.

        Raises `CacheDamaged` for one that fails its check, `CacheBusy`, `CacheError` for what can't be read.
        """
        with self._naming("read"):
            return self._find(request, validation, self._ends_s())

    def open_or_build(self, request: CacheRequest, make: MakeFile, validation: Validation) -> CacheEntry:
        """Return the entry of a request, made by `make` where there is none that passes.

        Raises:
            CacheBusy: if others build or evict for longer than the lock's time-out.
            CacheError: if the entry can't be read or written.
        """
        ends_s = self._ends_s()
        with self._naming("read"):
            try:
                found = self._find(request, validation, ends_s)
            except CacheDamaged as error:
                logger.warning("weight cache: %s; it is built again", error)
                found = None
        if found is not None:
            return found
        with self._naming("written"):
            self._folder.make()
            with self._lock(request.key, ends_s, is_shared=False):
                return self._build(request, make, validation, ends_s)

    def _build(self, request: CacheRequest, make: MakeFile, validation: Validation, ends_s: float) -> CacheEntry:
        """Look again, and build where nobody has meanwhile. The request's lock is held."""
        key = request.key
        self._on_step("locked")
        for stale in self._folder.temporary.glob(f"{key}.*"):
            remove_folder(stale)
        try:
            found = self._find(request, validation, ends_s)
        except CacheDamaged as error:
            with self._lock(_place(error.entry), ends_s, is_shared=False):
                self._clear(key, error.entry)
            found = None
        return self._publish(request, make, ends_s) if found is None else found

    def _find(self, request: CacheRequest, validation: Validation, ends_s: float) -> CacheEntry | None:
        address = read_address(self._folder.requests / f"{request.key}.json")
        if address is None or not (self._folder.entries / address).is_dir():
            return None
        # A cache that was copied here may have no folder for locks.
        self._folder.make()
        lock = self._lock(address, ends_s, is_shared=True)
        try:
            folder = self._folder.entries / address
            # Eviction may have come first.
            if not folder.is_dir():
                lock.release()
                return None
            manifest = check_entry(folder, validation)
            stored = read_tensors(folder, manifest)
            problem = find_mismatch(request, manifest, stored)
            if problem is not None:
                logger.warning("weight cache: %s is not what request %s is for: %s", address, request.key, problem)
                lock.release()
                return None
            os.utime(lock.file)
        except CacheForeign as error:
            logger.warning("weight cache: request %s led to another program's entry: %s", request.key, error)
            lock.release()
            return None
        except BaseException:
            lock.release()
            raise
        return CacheEntry(folder=folder, manifest=manifest, stored=stored, was_built=False, lock=lock)

    def _clear(self, key: str, address: str) -> bool:
        """Take a damaged entry out of the way; tell whether a whole one is there, every byte of it.

        The lock of its place is held: what another request put there since anybody looked is not damaged.
        """
        try:
            check_entry(self._folder.entries / address, Validation.FULL)
        except CacheDamaged:
            self._set_aside(key, address)
            return False
        return True

    def _set_aside(self, key: str, address: str) -> None:
        """Take a damaged entry out of the way; who has its files mapped keeps them."""
        aside = Path(tempfile.mkdtemp(prefix=f"{key}.damaged.", dir=self._folder.temporary))
        with suppress(FileNotFoundError):
            (self._folder.entries / address).rename(aside / address)
        sync_folder(self._folder.entries)
        remove_folder(aside)

    def _ends_s(self) -> float:
        return self._clock() + self._lock_timeout_s

    def _lock(self, name: str, ends_s: float, *, is_shared: bool) -> FileLock:
        left_s = max(0.0, ends_s - self._clock())
        file = self._folder.lock_file(name)
        return FileLock.take(file, is_shared=is_shared, timeout_s=left_s, on_wait=self._on_wait)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn errors of the system into `CacheError`, which says what could not be done with the entry."""
        try:
            yield
        except OSError as error:
            text = f"{self._folder.root}: the entry can't be {what} ({error.strerror or error})"
            raise CacheError(text) from error

    # ------------------------------------------------------------ publication

    def _publish(self, request: CacheRequest, make: MakeFile, ends_s: float) -> CacheEntry:
        """Build an entry and use it. It is locked before it is there, so that nobody evicts it in between."""
        self._check_room(request)
        temporary = Path(tempfile.mkdtemp(prefix=f"{request.key}.", dir=self._folder.temporary))
        try:
            began_s = self._clock()
            address = self._write_entry(request, make, temporary)
            # Building is no waiting.
            ends_s += self._clock() - began_s
            lock = self._lock(address, ends_s, is_shared=True)
            try:
                self._rename(request.key, temporary, address, ends_s)
                self._point(request.key, address)
                folder = self._folder.entries / address
                manifest = check_entry(folder, Validation.FAST)
                stored = read_tensors(folder, manifest)
                os.utime(lock.file)
            except BaseException:
                lock.release()
                raise
        finally:
            remove_folder(temporary)
        return CacheEntry(folder=folder, manifest=manifest, stored=stored, was_built=True, lock=lock)

    def _check_room(self, request: CacheRequest) -> None:
        free_bytes = shutil.disk_usage(self._folder.root).free
        if free_bytes < request.num_bytes:
            raise CacheError(
                f"{self._folder.root}: the weights take {request.num_bytes} bytes, the disk has {free_bytes} free"
            )

    def _write_entry(self, request: CacheRequest, make: MakeFile, temporary: Path) -> str:
        self._on_step("temporary folder made")
        digests: dict[str, FileDigest] = {}
        for name, specs in request.files.items():
            digests[name] = write_tensor_file(temporary / name, specs, make(name))
            self._on_step(f"{name} written")
        manifest = Manifest(metadata=request.metadata, files=digests)
        write_synced(temporary / MANIFEST, manifest.to_json())
        self._on_step("manifest written")
        sync_folder(temporary)
        self._on_step("temporary folder synced")
        return manifest.address

    def _rename(self, key: str, temporary: Path, address: str, ends_s: float) -> None:
        """Publish what was built, unless another request has led to it, or somebody killed before he pointed to it."""
        with self._lock(_place(address), ends_s, is_shared=False):
            if not self._clear(key, address):
                temporary.rename(self._folder.entries / address)
        self._on_step("entry renamed")
        sync_folder(self._folder.entries)
        self._on_step("entries synced")

    def _point(self, key: str, address: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{key}.pointer.", dir=self._folder.temporary))
        write_synced(folder / "pointer", json.dumps({"address": address}).encode())
        self._on_step("pointer written")
        (folder / "pointer").replace(self._folder.requests / f"{key}.json")
        self._on_step("pointer renamed")
        sync_folder(self._folder.requests)
        self._on_step("requests synced")
        remove_folder(folder)


def _place(address: str) -> str:
    """Name the lock under which an entry is put to its place or taken from it as damaged. Who uses it has another."""
    return f"{address}.place"
