"""Page-lock the host memory of streamed layers, all of it or none, so that copies run at the speed of the link.

    mapping     |....[tensor]..[tensor]......[tensor]....|
    pages       |  [     one range    ]    [  range  ]   |     outward to pages, neighbours become one

Mapped files are locked read-only: the driver must not ask for pages of its own. Locking is bounded in bytes and time.
Whatever goes wrong is rolled back. What can't be rolled back ends the worker, since its addresses must never be reused:
by `RollbackFailed` while somebody waits, through `OnStuck` where a driver answers late and nobody does.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.cuda_runtime import SUCCESS, CudaHostRuntime
from offload.errors import RegistrationFailed, RollbackFailed
from offload.host_weights import HostPiece
from offload.mapped_memory import MappedMemory

PAGE_BYTES = mmap.PAGESIZE

EXIT_STUCK = 5
"""Exit code of a process whose memory stays page-locked."""

OnStuck = Callable[[RollbackFailed], None]
"""Called, in the thread of an attempt that was given up, with what can't be unlocked and is mapped still."""

logger = logging.getLogger(__name__)


def end_process(error: RollbackFailed) -> None:
    """Say why and end this process at once, whatever it computes: only that gives its addresses back safely."""
    logger.critical("this process stops: %s", error)
    logging.shutdown()
    os._exit(EXIT_STUCK)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageRange:
    """Whole pages of one mapping; the last page may reach past its end."""

    memory: MappedMemory
    start_byte: int
    num_bytes: int

    @property
    def address(self) -> int:
        return self.memory.address + self.start_byte

    def __str__(self) -> str:
        return f"bytes {self.start_byte} to {self.start_byte + self.num_bytes} of {self.memory.name}"


def page_ranges(pieces: Iterable[HostPiece]) -> tuple[PageRange, ...]:
    """Round pieces outward to pages, and join those of a mapping that touch or overlap."""
    by_memory: dict[int, list[HostPiece]] = {}
    for piece in pieces:
        by_memory.setdefault(id(piece.memory), []).append(piece)
    return tuple(each for group in by_memory.values() for each in _ranges_of(group))


def _ranges_of(pieces: Sequence[HostPiece]) -> Iterator[PageRange]:
    memory = pieces[0].memory
    start = end = 0
    for piece in sorted(pieces, key=lambda piece: piece.start_byte):
        first = piece.start_byte // PAGE_BYTES * PAGE_BYTES
        last = -(-(piece.start_byte + piece.num_bytes) // PAGE_BYTES) * PAGE_BYTES
        if first > end:
            if end > start:
                yield PageRange(memory=memory, start_byte=start, num_bytes=end - start)
            start = first
        end = max(end, last)
    yield PageRange(memory=memory, start_byte=start, num_bytes=end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationLimits:
    """Bounds of page-locking. `max_bytes` of None: as much as the weights are. `timeout_s`: of all ranges together."""

    max_bytes: int | None = None
    timeout_s: float = 60.0


class HostRegistration:
    """Ranges that are page-locked until `close`. Build it with `register_pages`."""

    def __init__(self, runtime: CudaHostRuntime, ranges: Sequence[PageRange]) -> None:
        self._runtime = runtime
        self._ranges = list(ranges)

    @property
    def num_bytes(self) -> int:
        """Bytes that are locked now."""
        return sum(each.num_bytes for each in self._ranges)

    def close(self) -> None:
        """Unlock everything. Call it when no copy is under way, before unmapping and before leaving a process group.

        Raises `RollbackFailed` naming what stays locked; all other ranges are unlocked then, and closing again tries
        those that are left.
        """
        self._ranges, problems = _unlock(self._runtime, self._ranges)
        if problems:
            raise RollbackFailed(f"host memory could not be unlocked: {'; '.join(problems)}")


def register_pages(
    runtime: CudaHostRuntime,
    pieces: Iterable[HostPiece],
    limits: RegistrationLimits,
    *,
    on_stuck: OnStuck = end_process,
    clock: Callable[[], float] = time.monotonic,
) -> HostRegistration:
    """Page-lock all pages of the pieces and check that they are.

    Raises:
        RegistrationFailed: for a budget or a limit of the system that is too small, a refusal of the driver, or no
            answer in time. Nothing is locked then; after a time-out, nothing is once the driver answers, or `on_stuck`
            is called.
        RollbackFailed: if a range can neither be used nor unlocked.
    """
    ranges = page_ranges(pieces)
    total_bytes = sum(each.num_bytes for each in ranges)
    if limits.max_bytes is not None and total_bytes > limits.max_bytes:
        raise RegistrationFailed(f"{total_bytes} bytes would be page-locked, the budget is {limits.max_bytes}")
    started_s = clock()
    attempt = _Attempt(runtime, ranges, on_stuck)
    attempt.start()
    if not attempt.wait(limits.timeout_s):
        raise RegistrationFailed(
            f"the driver has not page-locked {total_bytes} bytes within {limits.timeout_s:g} s "
            f"({attempt.num_locked} of {len(ranges)} ranges are)"
        )
    if attempt.error is not None:
        raise attempt.error
    logger.info("page-locked %d bytes in %d ranges in %.2f s", total_bytes, len(ranges), clock() - started_s)
    return HostRegistration(runtime, ranges)


_stuck: list[Tensor] = []
"""Views of memory that can't be unlocked: its mapping must not be closed for as long as this process lives."""


class _Attempt(threading.Thread):
    """Lock ranges in a thread of its own, since a driver may hang. Given up, it undoes what it did when it can."""

    def __init__(self, runtime: CudaHostRuntime, ranges: Sequence[PageRange], on_stuck: OnStuck) -> None:
        super().__init__(name="page locking", daemon=True)
        self._runtime = runtime
        self._on_stuck = on_stuck
        self._ranges = ranges
        # While the driver may still answer, these keep the mappings from being closed.
        self._views = [each.memory.bytes for each in ranges]
        self._given_up = False
        self._is_done = threading.Event()
        self._turn = threading.Lock()
        self._locked: list[PageRange] = []
        self.error: Exception | None = None

    @property
    def num_locked(self) -> int:
        return len(self._locked)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; on a time-out the attempt is given up, and False is returned."""
        if self._is_done.wait(timeout_s):
            return True
        with self._turn:
            self._given_up = not self._is_done.is_set()
        return not self._given_up

    def run(self) -> None:
        try:
            self._lock_all()
        except Exception as error:
            self.error = self._undo(error)
        with self._turn:
            is_late = self._given_up
            self._is_done.set()
        if is_late:
            self._end_late()
        self._views.clear()

    def _undo(self, error: Exception) -> Exception:
        """Unlock what was locked before an error; return what the caller is told."""
        self._locked, problems = _unlock(self._runtime, self._locked)
        if not problems:
            return error
        stuck = RollbackFailed(f"{error}; then host memory could not be unlocked: {'; '.join(problems)}")
        stuck.__cause__ = error
        _stuck.extend(self._views)
        return stuck

    def _end_late(self) -> None:
        """Undo what a driver did after nobody waited for it. Where that fails, who can end the process is told."""
        said = self.error or self._undo(RegistrationFailed("page-locking took longer than it was waited for"))
        if isinstance(said, RollbackFailed):
            self._on_stuck(said)
        else:
            logger.warning("page-locking ended after it was given up, and nothing stays locked: %s", said)

    def _lock_all(self) -> None:
        for each in self._ranges:
            if self._given_up:
                break
            refusal = self._refusal(each)
            if refusal is not None:
                raise RegistrationFailed(refusal)

    def _refusal(self, each: PageRange) -> str | None:
        """Lock one range; return what is wrong with it, or None."""
        read_only = each.memory.is_read_only
        code = self._runtime.register(each.address, each.num_bytes, is_read_only=read_only)
        if code != SUCCESS:
            how = " read-only" if read_only else ""
            return f"{each} can't be page-locked{how} ({self._runtime.error_text(code)}; {_memlock_text()})"
        self._locked.append(each)
        ends = (each.address, each.address + each.num_bytes - 1)
        if not all(self._runtime.is_locked(address) for address in ends):
            return f"{each}: the driver reports success, but the memory is not page-locked"
        return None


def _unlock(runtime: CudaHostRuntime, ranges: Sequence[PageRange]) -> tuple[list[PageRange], list[str]]:
    """Unlock ranges, the last one first; return those that stay locked and why."""
    left, problems = [], []
    for each in reversed(ranges):
        problem = _unlock_problem(runtime, each)
        if problem is not None:
            left.append(each)
            problems.append(f"{each} ({problem})")
    left.reverse()
    return left, problems


def _unlock_problem(runtime: CudaHostRuntime, each: PageRange) -> str | None:
    """Unlock a range; return why it stays locked, None if it does not. The others are tried whatever one raises."""
    try:
        code = runtime.unregister(each.address)
        return None if code == SUCCESS else runtime.error_text(code)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _memlock_text() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "none" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return f"limit on locked memory: {shown}"
