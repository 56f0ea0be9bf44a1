"""POSIX record locks with a bounded wait. The system gives them back when a process ends, however it ends.

A process has one lock on a file, whoever in it asked: open a lock's file once in a process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offload.errors import CacheBusy, CacheError

POLL_S = 0.05
_FLOCK = "hhlli4x"
"""`struct flock` of Linux: kind, whence, start, length, process."""

TELL_S = 30.0
"""How often a wait is told of."""

OnWait = Callable[[str], None]
"""Called at the begin of a wait for a lock and every `TELL_S`, with whom it is for and how much time is left."""

logger = logging.getLogger(__name__)


def log_wait(text: str) -> None:
    """Tell the log of a wait."""
    logger.info("%s", text)


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
        on_wait: OnWait = log_wait,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> FileLock:
        """Wait for the lock. Raises `CacheBusy` after `timeout_s`, which may be 0, `CacheError`."""
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CacheError(f"{file}: cannot be opened ({error.strerror})") from error
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        now_s = told_s = clock()
        ends_s = now_s + timeout_s
        while True:
            try:
                fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
            except OSError as error:
                is_held = error.errno in (errno.EAGAIN, errno.EACCES)
                now_s = clock()
                if is_held and now_s < ends_s:
                    if now_s >= told_s:
                        on_wait(f"waiting for {file.name}, {_holder(descriptor)}; {ends_s - now_s:.0f} s are left")
                        told_s = now_s + TELL_S
                    sleep(POLL_S)
                    continue
                holder = _holder(descriptor)
                os.close(descriptor)
                if is_held:
                    raise CacheBusy(file.name, holder=holder, waited_s=timeout_s) from None
                raise CacheError(f"{file}: cannot be locked ({error.strerror})") from error
            return cls(file, descriptor)

    def touch(self) -> None:
        """Set the file's time to now, while the lock is held; a file system that refuses keeps the time it has."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.utime(self._descriptor)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_held(file: Path) -> bool:
    """Tell whether another process has a lock on a file; nothing is written or locked. Raises OSError.

    A process that asks about a file of its own loses its lock there.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return _holder_pid(descriptor) is not None
    finally:
        os.close(descriptor)


def _holder_pid(descriptor: int) -> int | None:
    """Return the process that keeps others from an exclusive lock on a file, None without one. Raises OSError.

    A process of another container has no number here: 0.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(int(pid), 0)


def _holder(descriptor: int) -> str:
    """Say who keeps others from an exclusive lock on a file."""
    try:
        pid = _holder_pid(descriptor)
    except OSError:
        pid = None
    return f"held by process {pid}" if pid else "held by another process"
