"""The runtime weight cache: final weights on a local disk, made once, mapped by every process of the host.

Looking up is free of writes: request, address, entry, check. Who finds nothing takes the request's lock, looks again
(somebody may have built meanwhile), builds in a temporary folder, and publishes by renaming. At every moment an entry
is there as a whole or not at all, whoever is killed when.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from offload.cache_folder import CacheFolder, read_address, remove_folder, sync_folder, write_synced
from offload.cache_manifest import MANIFEST, CacheRequest, Manifest, Validation, check_entry
from offload.errors import CacheDamaged, CacheError
from offload.file_lock import FileLock
from offload.host_plan import StoredTensor
from offload.tensor_file import FileDigest, read_header, stored_tensors, write_tensor_file

logger = logging.getLogger(__name__)

MakeFile = Callable[[str], Iterable[Tensor]]
"""Return the tensors of one file of a request, by its name and in the request's order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheEntry:
    """An entry that was checked and is in use until `close`: until then nobody evicts it. `was_built`: by this call."""

    folder: Path
    manifest: Manifest
    was_built: bool
    lock: FileLock

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by name, with its place in a file."""
        files = [self.folder / name for name in self.manifest.files]
        return {name: tensor for file in files for name, tensor in stored_tensors(file, read_header(file)).items()}

    def close(self) -> None:
        """Allow eviction. Mappings of the files stay valid."""
        self.lock.release()


class WeightCache:
    """A cache in a folder of this host. Several processes may use it at the same time, one thread in each.

    `on_step` is told what is about to be done; tests end the process there.
    """

    def __init__(
        self, folder: CacheFolder, *, lock_timeout_s: float, on_step: Callable[[str], None] = lambda step: None
    ) -> None:
        self._folder = folder
        self._lock_timeout_s = lock_timeout_s
        self._on_step = on_step

    def find(self, request: CacheRequest, validation: Validation) -> CacheEntry | None:
        """Return the entry of a request, None if there is none. Raises `CacheDamaged` for one that fails its check."""
        return self._find(request, validation, was_built=False)

    def open_or_build(self, request: CacheRequest, make: MakeFile, validation: Validation) -> CacheEntry:
        """Return the entry of a request, made by `make` where there is none that passes.

        Raises:
            CacheBusy: if another process builds for longer than the lock's time-out.
            CacheError: if the entry can't be written.
        """
        try:
            found = self.find(request, validation)
        except CacheDamaged as error:
            logger.warning("weight cache: %s; it is built again", error)
            found = None
        if found is not None:
            return found
        key = request.key
        self._folder.make()
        with FileLock.take(self._folder.lock_file(key), is_shared=False, timeout_s=self._lock_timeout_s):
            self._on_step("locked")
            for stale in self._folder.temporary.glob(f"{key}.*"):
                remove_folder(stale)
            try:
                found = self.find(request, validation)
            except CacheDamaged as error:
                self._set_aside(key, error.entry)
                found = None
            if found is None:
                self._publish(request, make)
                found = self._find(request, Validation.FAST, was_built=True)
        if found is None:
            raise CacheError(f"the entry of request {key} is gone right after it was published")
        return found

    def _find(self, request: CacheRequest, validation: Validation, *, was_built: bool) -> CacheEntry | None:
        address = read_address(self._folder.requests / f"{request.key}.json")
        if address is None or not (self._folder.entries / address).is_dir():
            return None
        lock = FileLock.take(self._folder.lock_file(address), is_shared=True, timeout_s=self._lock_timeout_s)
        try:
            folder = self._folder.entries / address
            # Eviction may have come first.
            if not folder.is_dir():
                lock.release()
                return None
            manifest = check_entry(folder, validation)
            os.utime(lock.file)
        except BaseException:
            lock.release()
            raise
        return CacheEntry(folder=folder, manifest=manifest, was_built=was_built, lock=lock)

    def _set_aside(self, key: str, address: str) -> None:
        """Take a damaged entry out of the way; who has its files mapped keeps them."""
        aside = Path(tempfile.mkdtemp(prefix=f"{key}.damaged.", dir=self._folder.temporary))
        with suppress(FileNotFoundError):
            (self._folder.entries / address).rename(aside / address)
        sync_folder(self._folder.entries)
        remove_folder(aside)

    # ------------------------------------------------------------ publication

    def _publish(self, request: CacheRequest, make: MakeFile) -> None:
        self._check_room(request)
        temporary = Path(tempfile.mkdtemp(prefix=f"{request.key}.", dir=self._folder.temporary))
        try:
            address = self._write_entry(request, make, temporary)
            self._rename(request.key, temporary, address)
            self._point(request.key, address)
        except OSError as error:
            raise CacheError(f"{self._folder.root}: the entry can't be written ({error.strerror or error})") from error
        finally:
            remove_folder(temporary)

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

    def _rename(self, key: str, temporary: Path, address: str) -> None:
        entry = self._folder.entries / address
        try:
            # Another request may have led to the same content, or a process was killed before it pointed to it.
            check_entry(entry, Validation.FULL)
        except CacheDamaged:
            self._set_aside(key, address)
            temporary.rename(entry)
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
