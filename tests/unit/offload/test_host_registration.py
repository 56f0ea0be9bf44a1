"""Page-locking: which ranges, all or nothing, and what happens when the driver refuses, lies or hangs."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from offload.errors import OffloadError, RegistrationFailed, RollbackFailed
from offload.host_registration import EXIT_STUCK, PAGE_BYTES, RegistrationLimits, page_ranges, register_pages
from offload.host_weights import HostPiece
from offload.mapped_memory import MappedMemory
from tests.support.offload_cuda import FakeCudaRuntime, hang_in_the_driver

NO_LIMITS = RegistrationLimits()


@pytest.fixture
def memory(tmp_path: Path) -> MappedMemory:
    file = tmp_path / "weights"
    file.write_bytes(bytes(16 * PAGE_BYTES))
    return MappedMemory.of_file(file)


def piece(memory: MappedMemory, start_byte: int, num_bytes: int) -> HostPiece:
    return HostPiece(memory=memory, start_byte=start_byte, num_bytes=num_bytes, buffer_start_byte=0)


def three_ranges(memory: MappedMemory) -> list[HostPiece]:
    return [piece(memory, number * 4 * PAGE_BYTES, 10) for number in range(3)]


@pytest.mark.parametrize(
    ("pieces", "ranges"),
    [
        ([(10, 20)], [(0, 1)]),
        ([(10, 20), (50, PAGE_BYTES)], [(0, 2)]),
        ([(0, PAGE_BYTES), (PAGE_BYTES, 1)], [(0, 2)]),
        ([(3 * PAGE_BYTES, 1), (0, 1)], [(0, 1), (3, 1)]),
        ([(PAGE_BYTES - 1, 2), (4 * PAGE_BYTES + 5, 3 * PAGE_BYTES), (6 * PAGE_BYTES, 1)], [(0, 2), (4, 4)]),
    ],
)
def test_pieces_become_whole_pages_and_neighbours_one_range(
    memory: MappedMemory, pieces: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> None:
    found = page_ranges(piece(memory, start, size) for start, size in pieces)

    assert [(each.start_byte // PAGE_BYTES, each.num_bytes // PAGE_BYTES) for each in found] == ranges
    assert all(each.address % PAGE_BYTES == 0 for each in found)


def test_ranges_of_two_mappings_are_never_joined(memory: MappedMemory) -> None:
    other = MappedMemory.own(PAGE_BYTES)

    found = page_ranges([piece(memory, 0, PAGE_BYTES), piece(other, 0, 5)])

    assert [each.memory for each in found] == [memory, other]


def test_files_are_locked_read_only_and_own_memory_is_not(memory: MappedMemory) -> None:
    runtime = FakeCudaRuntime()

    registration = register_pages(runtime, [piece(memory, 0, 5), piece(MappedMemory.own(PAGE_BYTES), 0, 5)], NO_LIMITS)

    assert runtime.read_only == [True, False]
    assert registration.num_bytes == 2 * PAGE_BYTES
    registration.close()
    assert runtime.locked == {}


@pytest.mark.parametrize("budget", [0, 3 * PAGE_BYTES - 1])
def test_a_budget_that_is_too_small_locks_nothing(memory: MappedMemory, budget: int) -> None:
    runtime = FakeCudaRuntime()

    with pytest.raises(
        RegistrationFailed, match=f"{3 * PAGE_BYTES} bytes would be page-locked, the budget is {budget}"
    ):
        register_pages(runtime, three_ranges(memory), RegistrationLimits(max_bytes=budget))

    assert runtime.calls == []


def test_a_budget_that_is_just_enough_is_enough(memory: MappedMemory) -> None:
    register_pages(FakeCudaRuntime(), three_ranges(memory), RegistrationLimits(max_bytes=3 * PAGE_BYTES))


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_range_that_is_refused_unlocks_those_before(memory: MappedMemory, refused: int) -> None:
    runtime = FakeCudaRuntime()
    runtime.refuse_register = {refused}

    with pytest.raises(RegistrationFailed, match=r"can't be page-locked read-only \(CUDA error 801; limit on locked"):
        register_pages(runtime, three_ranges(memory), NO_LIMITS)

    assert runtime.locked == {}
    assert sum(call[0] == "register" for call in runtime.calls) == refused + 1


def test_success_that_locked_nothing_is_found(memory: MappedMemory) -> None:
    runtime = FakeCudaRuntime()
    runtime.is_blind = True

    with pytest.raises(RegistrationFailed, match="the memory is not page-locked"):
        register_pages(runtime, three_ranges(memory), NO_LIMITS)

    assert runtime.locked == {}


def test_a_range_of_which_only_the_beginning_was_locked_is_found(
    memory: MappedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeCudaRuntime()
    monkeypatch.setattr(runtime, "is_locked", lambda address: address == memory.address)

    with pytest.raises(RegistrationFailed, match="the memory is not page-locked"):
        register_pages(runtime, [piece(memory, 0, 3 * PAGE_BYTES)], NO_LIMITS)

    assert runtime.locked == {}


def test_a_rollback_that_fails_says_what_stays_locked(memory: MappedMemory) -> None:
    runtime = FakeCudaRuntime()
    runtime.refuse_register = {2}
    runtime.refuse_unregister = {0}

    with pytest.raises(RollbackFailed, match="then host memory could not be unlocked: bytes 16384 to 20480"):
        register_pages(runtime, three_ranges(memory), NO_LIMITS)

    # The other range was tried all the same.
    assert list(runtime.locked) == [memory.address + 4 * PAGE_BYTES]


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_closing_unlocks_what_it_can_and_closing_again_the_rest(memory: MappedMemory, stuck: int) -> None:
    runtime = FakeCudaRuntime()
    registration = register_pages(runtime, three_ranges(memory), NO_LIMITS)
    runtime.refuse_unregister = {stuck}

    with pytest.raises(RollbackFailed, match="could not be unlocked"):
        registration.close()
    assert len(runtime.locked) == 1
    assert registration.num_bytes == PAGE_BYTES

    registration.close()
    assert runtime.locked == {}
    assert registration.num_bytes == 0


def test_a_driver_that_hangs_is_given_up_and_undone_when_it_answers(
    memory: MappedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeCudaRuntime()
    hang_in_the_driver(runtime, monkeypatch)

    with pytest.raises(RegistrationFailed, match="has not page-locked"):
        register_pages(runtime, three_ranges(memory), RegistrationLimits(timeout_s=0.0))
    # The addresses must not be given to anybody else while the driver may still lock them.
    with pytest.raises(OffloadError, match="still in use"):
        memory.close()

    wait_for_the_driver(runtime)
    # It locked what it was at, no more, and undid it.
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]
    assert runtime.locked == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    memory.close()


def test_an_error_in_the_thread_is_the_callers(memory: MappedMemory) -> None:
    runtime = FakeCudaRuntime()
    runtime.is_locked = lambda address: 1 // 0  # type: ignore[method-assign,assignment,return-value]

    with pytest.raises(ZeroDivisionError):
        register_pages(runtime, three_ranges(memory), NO_LIMITS)
    assert runtime.locked == {}


def test_an_error_in_the_thread_that_leaves_memory_locked_says_so(memory: MappedMemory) -> None:
    runtime = FakeCudaRuntime()
    runtime.is_locked = lambda address: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    runtime.refuse_unregister = {0}

    with pytest.raises(RollbackFailed, match="by zero; then host memory could not be unlocked"):
        register_pages(runtime, three_ranges(memory), NO_LIMITS)


def wait_for_the_driver(runtime: FakeCudaRuntime) -> None:
    """Let a driver that hangs answer, and the attempt that was given up end."""
    runtime.resume.set()
    for thread in threading.enumerate():
        if thread.name == "page locking":
            thread.join()


@pytest.mark.parametrize("trouble", ["refuses to unlock", "and has locked nothing to its knowledge", "breaks"])
def test_what_a_late_driver_does_not_unlock_stays_mapped_and_ends_the_process(
    memory: MappedMemory, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its late answer was no success, so that the rollback is the thread's."""
    runtime = FakeCudaRuntime()
    hang_in_the_driver(runtime, monkeypatch)
    runtime.refuse_unregister = {0}
    runtime.is_blind = "nothing" in trouble
    if trouble == "breaks":
        monkeypatch.setattr(runtime, "unregister", lambda address: 1 // 0)
    told: list[RollbackFailed] = []

    with pytest.raises(RegistrationFailed, match="has not page-locked"):
        register_pages(runtime, three_ranges(memory), RegistrationLimits(timeout_s=0.0), on_stuck=told.append)
    assert told == []
    wait_for_the_driver(runtime)
    if trouble == "breaks":
        # Takes long; whatever had only the attempt to hold it is gone now.
        gc.collect()

    assert len(runtime.locked) == 1
    [error] = told
    assert "could not be unlocked: bytes 0 to 4096" in str(error)
    with pytest.raises(OffloadError, match="still in use"):
        memory.close()


def test_who_says_nothing_else_has_the_process_ended_and_the_reason_logged(
    memory: MappedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeCudaRuntime()
    hang_in_the_driver(runtime, monkeypatch)
    runtime.refuse_unregister = {0}
    codes: list[int] = []
    monkeypatch.setattr("offload.host_registration.os._exit", codes.append)
    monkeypatch.setattr("offload.host_registration.logging.shutdown", lambda: codes.append(0))

    with pytest.raises(RegistrationFailed):
        register_pages(runtime, three_ranges(memory), RegistrationLimits(timeout_s=0.0))
    wait_for_the_driver(runtime)

    assert codes == [0, EXIT_STUCK]
    [record] = caplog.records
    assert record.levelname == "CRITICAL"
    assert "this process stops: page-locking took longer" in record.message
    assert "could not be unlocked: bytes 0 to 4096" in record.message
