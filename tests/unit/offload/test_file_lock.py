"""Locks between processes: had at once, waited for, refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.errors import CacheBusy, CacheError
from offload.file_lock import FileLock


def test_a_lock_that_is_free_is_had_at_once_and_can_be_had_again(tmp_path: Path) -> None:
    for _ in range(2):
        with FileLock.take(tmp_path / "lock", is_shared=False, timeout_s=0.0) as lock:
            assert num_open(tmp_path / "lock") == 1
            lock.release()
        assert num_open(tmp_path / "lock") == 0


def num_open(file: Path) -> int:
    """Count how often this process has a file open."""
    descriptors = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    # The folder itself was open while it was listed.
    return sum(each.is_symlink() and each.readlink() == file for each in descriptors)


def test_the_wait_is_bounded_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    told: list[str] = []
    times = iter([0.0, 0.4, 30.3, 30.4, 60.0])

    def held(descriptor: int, kind: int) -> None:
        raise BlockingIOError(11, "held")

    monkeypatch.setattr("offload.file_lock.fcntl.lockf", held)
    with pytest.raises(CacheBusy, match=r"lock is held by another process for more than 60 s"):
        FileLock.take(
            tmp_path / "lock",
            is_shared=False,
            timeout_s=60.0,
            on_wait=told.append,
            clock=lambda: next(times),
            sleep=waits.append,
        )
    assert len(waits) == 3
    assert told == [f"waiting for lock, held by another process; {left} s are left" for left in (60, 30)]
    assert num_open(tmp_path / "lock") == 0


def test_a_lock_the_system_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("offload.file_lock.fcntl.lockf", refused)
    with pytest.raises(CacheError, match="cannot be locked"):
        FileLock.take(tmp_path / "lock", is_shared=False, timeout_s=1.0)
    with pytest.raises(CacheError, match="cannot be opened"):
        FileLock.take(tmp_path / "missing" / "lock", is_shared=False, timeout_s=1.0)
