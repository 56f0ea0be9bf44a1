"""A disk that is full while a test says so. Only `os.pwrite`, which recordings write with, notices."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def full_disk() -> Iterator[FullDisk]:
    """Put the disk in place of the real one."""
    disk = FullDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", disk.pwrite)
        yield disk
