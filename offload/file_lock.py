"""POSIX record locks with a bounded wait. The system gives them back when a process ends, however it ends.

A process has one lock on a file, whoever in it asked: open a lock's file once in a process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from offload.errors import CacheBusy, CacheError

POLL_S = 0.05


class FileLock:
    """A lock that is held, shared or exclusive, until `release`."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self.file = file
        self._descriptor: int | None = descriptor

    @classmethod
    def take(
        cls,
        file: Path,
        *,
        is_shared: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> FileLock:
        """Wait for the lock. Raises `CacheBusy` after `timeout_s`, which may be 0, `CacheError`."""
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CacheError(f"{file}: cannot be opened ({error.strerror})") from error
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        ends_s = clock() + timeout_s
        while True:
            try:
                fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
            except OSError as error:
                is_held = error.errno in (errno.EAGAIN, errno.EACCES)
                if is_held and clock() < ends_s:
                    sleep(POLL_S)
                    continue
                os.close(descriptor)
                if is_held:
                    raise CacheBusy(file.name, waited_s=timeout_s) from None
                raise CacheError(f"{file}: cannot be locked ({error.strerror})") from error
            return cls(file, descriptor)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
