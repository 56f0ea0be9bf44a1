"""A CUDA runtime that page-locks nothing and remembers everything, and a queue that writes down what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offload import host_registration

INVALID, NOT_SUPPORTED = 1, 801


class FakeCudaRuntime:
    """Knows what is locked. `refuse_register` and `refuse_unregister` hold the numbers of the calls that fail, from 0.

    `is_blind`: the runtime reports success, but knows no memory as locked. While `resume` is not set calls wait for it.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.read_only: list[bool] = []
        self.refuse_register: set[int] = set()
        self.refuse_unregister: set[int] = set()
        self.is_blind = False
        self.asked = threading.Event()
        self.resume = threading.Event()
        self.resume.set()
        self._num_registers = 0
        self._num_unregisters = 0

    def register(self, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        self.asked.set()
        self.resume.wait()
        number, self._num_registers = self._num_registers, self._num_registers + 1
        self.calls.append(("register", address, num_bytes))
        self.read_only.append(is_read_only)
        if number in self.refuse_register or address in self.locked:
            return NOT_SUPPORTED
        self.locked[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        number, self._num_unregisters = self._num_unregisters, self._num_unregisters + 1
        self.calls.append(("unregister", address, 0))
        if number in self.refuse_unregister or address not in self.locked:
            return INVALID
        del self.locked[address]
        return 0

    def is_locked(self, address: int) -> bool:
        return not self.is_blind and any(start <= address < start + size for start, size in self.locked.items())

    def error_text(self, code: int) -> str:
        return f"CUDA error {code}"


def hang_in_the_driver(runtime: FakeCudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver hang, and no attempt waited for, however short, before its thread is inside the driver."""
    runtime.resume.clear()
    start = host_registration._Attempt.start

    def start_and_ask(attempt: host_registration._Attempt) -> None:
        start(attempt)
        runtime.asked.wait()

    monkeypatch.setattr(host_registration._Attempt, "start", start_and_ask)


class RecordingQueue:
    """Does no ordering, but writes down what was asked for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def copying(self, slot: int) -> Iterator[None]:
        self.events.append(f"copy {slot}")
        yield

    def wait_copied(self, slot: int) -> None:
        self.events.append(f"wait {slot}")

    def mark_used(self, slot: int) -> None:
        self.events.append(f"used {slot}")

    def drain(self) -> None:
        self.events.append("drain")
