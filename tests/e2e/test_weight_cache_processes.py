"""The weight cache among processes: one builds, others join; whoever is killed, what is published is whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from offload.cache_manifest import Validation, check_entry
from offload.cache_upkeep import list_entries, prune
from offload.errors import CacheBusy
from offload.file_lock import FileLock
from offload.weight_cache import WeightCache
from tests.support.weight_cache import FILES, open_entry, open_folder, request

REPOSITORY = Path(__file__).resolve().parents[2]

STEPS = [
    "locked",
    "temporary folder made",
    *(f"{file} written" for file in FILES),
    "manifest written",
    "temporary folder synced",
    "entry renamed",
    "entries synced",
    "pointer written",
    "pointer renamed",
    "requests synced",
]


def start(cases: list[dict[str, Any]]) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.support.weight_cache"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    program.stdin.write(json.dumps(cases))
    program.stdin.close()
    program.stdin = None
    return program


def run(cases: list[dict[str, Any]]) -> list[list[int]]:
    """Return the exit codes of every case: 0 found, 1 built, 3 refused, negative for a signal."""
    with start(cases) as program:
        out, _ = program.communicate(timeout=100)
    results: list[list[int]] = json.loads(out)
    return results


def wait_for_holders(ready: Path, num_processes: int) -> list[int]:
    """Wait until so many processes hold what they opened; return their ids."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        found = [int(file.suffix[1:]) for file in ready.parent.glob(f"{ready.name}.*")]
        if len(found) == num_processes:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {num_processes} processes are ready")


def stop(program: subprocess.Popen[str]) -> None:
    for process in psutil.Process(program.pid).children():
        process.kill()
    program.communicate()


def test_the_steps_of_a_publication_are_those_that_are_tested(tmp_path: Path) -> None:
    seen: list[str] = []
    open_entry(WeightCache(open_folder(tmp_path), lock_timeout_s=1.0, on_step=seen.append)).close()
    assert seen == STEPS


def test_processes_elect_a_writer_and_the_killed_leave_a_valid_entry_or_none(tmp_path: Path) -> None:
    roots = [tmp_path / f"killed-{index}" for index in range(len(STEPS))]
    killed = [{"root": str(root), "kill_at": index} for index, root in enumerate(roots)]
    afterwards = [{"root": str(root)} for root in roots]
    election = {"root": str(tmp_path / "election"), "processes": 4, "step_s": 0.02}

    results = run([*killed, *afterwards, election])

    assert results[: len(STEPS)] == [[-signal.SIGKILL]] * len(STEPS)
    published = STEPS.index("pointer renamed")
    for index, root in enumerate(roots):
        # A killed process has published, or the next one builds as if it had never been.
        assert results[len(STEPS) + index] == [0 if index >= published else 1], STEPS[index]
        folder = open_folder(root)
        [facts] = list_entries(folder)
        check_entry(folder.entries / facts.address, Validation.FULL)
        assert [each.name for each in folder.temporary.iterdir() if index < published] == []
    assert sorted(results[-1]) == [0, 0, 0, 1]


def test_the_killed_who_build_a_damaged_entry_again_leave_it_whole_or_none(tmp_path: Path) -> None:
    roots = [tmp_path / f"killed-{index}" for index in range(len(STEPS))]
    before = [{"root": str(root)} for root in roots]
    killed = [{"root": str(root), "damage": True, "kill_at": index} for index, root in enumerate(roots)]

    results = run([*before, *killed, *before])

    assert results[: 2 * len(STEPS)] == [[1]] * len(STEPS) + [[-signal.SIGKILL]] * len(STEPS)
    # The request leads to the address already.
    renamed = STEPS.index("entry renamed")
    assert results[2 * len(STEPS) :] == [[0 if index >= renamed else 1] for index in range(len(STEPS))]
    for root in roots:
        folder = open_folder(root)
        [facts] = list_entries(folder)
        check_entry(folder.entries / facts.address, Validation.FULL)


def test_entries_in_use_are_seen_from_other_processes_and_locks_are_waited_for(tmp_path: Path) -> None:
    root, ready = tmp_path / "cache", tmp_path / "ready"
    user = start([{"root": str(root), "hold_s": 60.0, "ready": str(ready)}])
    try:
        wait_for_holders(ready, 1)
        folder = open_folder(root)
        [facts] = list_entries(folder)
        assert facts.is_in_use
        assert prune(folder, max_bytes=0, max_age_s=0.0, now_s=facts.used_s + 100).removed == ()
        with pytest.raises(CacheBusy):
            FileLock.take(folder.lock_file(facts.address), is_shared=False, timeout_s=0.0)
        found = WeightCache(folder, lock_timeout_s=1.0).find(request(), Validation.FULL)
        assert found is not None
        found.close()
    finally:
        stop(user)
    assert len(prune(open_folder(root), max_bytes=0, max_age_s=None, now_s=0.0).removed) == 1


def test_two_processes_have_one_copy_of_a_mapped_file(tmp_path: Path) -> None:
    weights, ready = tmp_path / "weights", tmp_path / "ready"
    num_bytes = 8 * 2**20
    weights.write_bytes(bytes(range(256)) * (num_bytes // 256))
    case = {"root": str(tmp_path / "cache"), "processes": 2, "map": str(weights), "hold_s": 60.0, "ready": str(ready)}
    users = start([case])
    try:
        shares = [
            sum(area.pss for area in psutil.Process(pid).memory_maps(grouped=False) if area.path == str(weights))
            for pid in wait_for_holders(ready, 2)
        ]
    finally:
        stop(users)
    assert sum(shares) == pytest.approx(num_bytes, rel=0.01)
    assert all(share == pytest.approx(num_bytes / 2, rel=0.01) for share in shares)
