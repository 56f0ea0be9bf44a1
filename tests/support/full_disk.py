"""Disks that are full while a test says so, or by what is on them. Only `os.pwrite` of recordings notices."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class FullDisk:
    """While `is_full`, a write takes half of what it is given, and the next one nothing, as on a real disk."""

    def __init__(self) -> None:
        self.is_full = False
        self.num_refusals = 0
        self._took_half = False
        self._pwrite = os.pwrite

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Stand in for `os.pwrite`."""
        if not self.is_full:
            return self._pwrite(descriptor, data, offset)
        self._took_half = not self._took_half
        if self._took_half and len(data) > 1:
            return self._pwrite(descriptor, data[: len(data) // 2], offset)
        self._took_half = False
        self.num_refusals += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SmallDisk(FullDisk):
    """Is full once the files below `folder` would have more than `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__()
        self._folder = folder
        self._max_bytes = max_bytes

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        used = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        self.is_full = used + len(data) > self._max_bytes
        return super().pwrite(descriptor, data, offset)


@contextmanager
def full_disk(disk: FullDisk | None = None) -> Iterator[FullDisk]:
    """Put a disk in place of the real one."""
    disk = disk or FullDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", disk.pwrite)
        yield disk
