"""The client against a scripted worker process: answers, failures, death, restart and stop.

No assertion depends on how fast anything is; the time limits in here only bound how long a failure takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from server import worker_client
from server.worker import CommittedTick, WorkerStatus
from server.worker_client import WorkerClient, WorkerPolicy
from server.worker_link import WorkerLink
from server.worker_process import worker_environment
from worldmodel.errors import LoadFailed, OutcomeUnknown, RequestRefused, TickRolledBack, WorkerUnavailable
from worldmodel.messages import (
    CloseSession,
    ImageSize,
    LoadStage,
    OpenSession,
    RequestId,
    ResetSession,
    SessionId,
    StartWorker,
    Tick,
)

SESSION = SessionId("s-1")
FAST = WorkerPolicy(restart_backoff_s=0.01, max_restart_backoff_s=0.02, stop_timeout_s=2.0)


START = StartWorker(model="scripted", checkpoint="none", width=4, height=2, fps=12)


def scripted(policy: WorkerPolicy = FAST, **options: object) -> WorkerClient:
    start = replace(START, model_options=json.dumps(options).encode())
    return WorkerClient(start, policy, module="tests.support.scripted_worker")


@contextlib.asynccontextmanager
async def running(client: WorkerClient) -> AsyncIterator[WorkerClient]:
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()
        assert client.pid is None


def seen_status(client: WorkerClient) -> WorkerStatus:
    """Read the status afresh; a type checker would remember an earlier assertion."""
    return client.status


async def reaches(client: WorkerClient, status: WorkerStatus) -> None:
    await becomes_true(client, lambda: client.status is status)


async def becomes_true(client: WorkerClient, condition: Callable[[], bool]) -> None:
    """Wait for a change of the client after which `condition` holds."""
    changed = asyncio.Event()
    unsubscribe = client.subscribe(changed.set)
    async with asyncio.timeout(30):
        while not condition():
            changed.clear()
            await changed.wait()
    unsubscribe()


def transport_of(link: WorkerLink) -> asyncio.Transport:
    assert link._transport is not None
    return link._transport


def tick(prompt: str | None = None, *, index: int = 0, request: str = "r-1") -> Tick:
    return Tick(request_id=RequestId(request), session_id=SESSION, chunk_index=index, prompt=prompt)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_requests_are_answered_in_order() -> None:
    async with running(scripted()) as client:
        assert client.status is WorkerStatus.READY
        assert client.info is not None
        assert client.info.model == "scripted"
        size = ImageSize(width=2, height=1)
        opened = await client.open_session(
            OpenSession(request_id=RequestId("o"), session_id=SESSION, prompt="p", seed=1, image=size), b"123456"
        )
        assert (opened.request_id, opened.session_id) == ("o", SESSION)
        assert client.memory == opened.memory
        assert opened.memory.rss_bytes == 6, "the scripted worker reports the size of the payload here"
        first, second = await asyncio.gather(
            client.tick(tick(index=0, request="a")), client.tick(tick(index=1, request="b"))
        )
        for expected, result in enumerate((first, second)):
            assert result.committed.chunk_index == expected
            media, payload = await result.media
            assert media.chunk_index == expected
            assert bytes(payload) == bytes([expected]) * 24
        reset = await client.reset_session(
            ResetSession(request_id=RequestId("x"), session_id=SESSION, prompt="p", seed=1), None
        )
        assert reset.memory.rss_bytes == 0
        closed = await client.close_session(CloseSession(request_id=RequestId("c"), session_id=SESSION))
        assert closed.session_id == SESSION
    assert seen_status(client) is WorkerStatus.STOPPED


@pytest.mark.parametrize(
    ("outcome", "error"),
    [("refused", RequestRefused), ("rolled_back", TickRolledBack), ("unknown", OutcomeUnknown)],
)
async def test_a_failed_request_raises_what_is_left(outcome: str, error: type[RequestRefused]) -> None:
    async with running(scripted()) as client:
        with pytest.raises(error, match="as told") as caught:
            await client.tick(tick(outcome))
        assert (caught.value.code, caught.value.field) == ("scripted", "prompt")
        if isinstance(caught.value, TickRolledBack):
            assert caught.value.transient
        assert (await client.tick(tick(request="r-2"))).committed.request_id == "r-2"
        assert client.generation == 1


async def test_sigkill_in_mid_tick_fails_everything_pending_and_a_new_process_serves() -> None:
    async with running(scripted()) as client:
        before = client.pid
        hanging = [asyncio.create_task(client.tick(tick("hang", request=f"r-{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(30):
            results = await asyncio.gather(*hanging, return_exceptions=True)
        assert [type(result) for result in results] == [WorkerUnavailable] * 3
        await reaches(client, WorkerStatus.READY)
        assert client.generation == 2
        assert client.pid != before
        assert client.failure is None
        assert isinstance(await client.tick(tick()), CommittedTick)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an exit all the time that a busy machine needs."""
    monkeypatch.setattr(worker_client, "EXIT_GRACE_S", 60.0)


@pytest.mark.usefixtures("patient")
async def test_the_reason_of_a_death_is_shown_while_no_worker_is_ready() -> None:
    policy = WorkerPolicy(restart_backoff_s=60, max_restart_backoff_s=60, stop_timeout_s=30)
    async with running(scripted(policy)) as client:
        with pytest.raises(WorkerUnavailable):
            await client.tick(tick("die"))
        assert seen_status(client) is WorkerStatus.RESTARTING
        with pytest.raises(WorkerUnavailable, match="the worker"):
            await client.tick(tick(request="r-2"))
        await becomes_true(client, lambda: client.failure == "the worker process was ended by SIGKILL")


async def test_death_after_the_commit_fails_the_media_only() -> None:
    async with running(scripted()) as client:
        result = await client.tick(tick("die_after_commit"))
        with pytest.raises(WorkerUnavailable):
            await result.media


async def test_lost_media_is_an_unknown_outcome_and_the_worker_lives() -> None:
    async with running(scripted()) as client:
        result = await client.tick(tick("lose_media"))
        with pytest.raises(OutcomeUnknown, match="as told"):
            await result.media
        assert (await client.tick(tick(request="r-2"))).committed.request_id == "r-2"
        assert client.generation == 1


@pytest.mark.parametrize(("what", "text"), [("garbage", "no message"), ("wrong_id", "unexpected TickCommitted")])
async def test_a_worker_that_breaks_the_protocol_is_replaced(what: str, text: str) -> None:
    async with running(scripted()) as client:
        with pytest.raises(WorkerUnavailable, match=text):
            await client.tick(tick(what))
        await reaches(client, WorkerStatus.READY)
        assert client.generation == 2


async def test_a_tick_that_takes_too_long_costs_the_process() -> None:
    policy = WorkerPolicy(restart_backoff_s=0.01, max_restart_backoff_s=0.01, tick_timeout_s=0.2)
    async with running(scripted(policy)) as client:
        before = client.pid
        assert before is not None
        with pytest.raises(WorkerUnavailable, match=r"no answer to Tick r-1 of session s-1 within 0\.2 s"):
            await client.tick(tick("hang"))
        await reaches(client, WorkerStatus.READY)
        assert client.generation == 2
        assert not is_running(before)


async def test_a_cancelled_call_leaves_the_order_intact() -> None:
    async with running(scripted()) as client:
        cancelled = asyncio.create_task(client.tick(tick(request="r-1")))
        queued = asyncio.create_task(client.tick(tick(request="r-2")))
        kept = asyncio.create_task(client.tick(tick(request="r-3", index=3)))
        await asyncio.sleep(0)
        cancelled.cancel()
        queued.cancel()
        assert (await kept).committed.request_id == "r-3"


async def test_an_oversized_message_is_refused_before_it_is_sent() -> None:
    async with running(scripted()) as client:
        with pytest.raises(RequestRefused, match="header of"):
            await client.tick(tick("x" * (17 * 1024**2)))
        assert (await client.tick(tick())).committed.request_id == "r-1"


async def test_progress_of_the_load_is_seen() -> None:
    client = scripted()
    seen: list[tuple[LoadStage, float]] = []

    def note() -> None:
        if client.progress is not None:
            seen.append((client.progress.stage, client.progress.fraction))

    client.subscribe(note)
    async with running(client):
        assert seen == [(LoadStage.SPAWN, 0.0), (LoadStage.CHECKPOINT, 0.5), (LoadStage.READY, 1.0)]


async def test_a_model_that_can_not_be_loaded_is_final() -> None:
    client = scripted(load="fail")
    await client.start()
    with pytest.raises(LoadFailed, match=r"lacks vae/config\.json") as caught:
        await client.wait_ready()
    assert caught.value.code == "bad_checkpoint"
    with pytest.raises(WorkerUnavailable, match="lacks vae"):
        await client.tick(tick())
    await client.stop()
    assert client.generation == 1
    assert client.status is WorkerStatus.FAILED
    assert client.pid is None


@pytest.mark.usefixtures("patient")
async def test_what_a_process_said_is_read_although_its_exit_is_known_already() -> None:
    client = scripted(load="fail")
    links: list[WorkerLink] = []

    def hold_back() -> None:
        """Read nothing more than that the load has begun."""
        if client._link is not None and not links and client.progress is not None and client.progress.fraction == 0.5:
            links.append(client._link)
            transport_of(client._link).pause_reading()

    client.subscribe(hold_back)
    await client.start()
    await becomes_true(client, lambda: bool(links))
    assert client._process is not None
    await client._process.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    transport_of(links[0]).resume_reading()
    with pytest.raises(LoadFailed, match=r"lacks vae/config\.json"):
        await client.wait_ready()
    await client.stop()
    assert client.generation == 1


@pytest.mark.parametrize("start", [replace(START, checkpoint="\udcff"), replace(START, requested_sessions=2**70)])
async def test_a_start_that_can_not_be_said_is_final(start: StartWorker) -> None:
    client = WorkerClient(start, FAST, module="tests.support.scripted_worker")
    await client.start()
    with pytest.raises(LoadFailed, match="can't be kept running"):
        await client.wait_ready()
    await client.stop()
    assert client.status is WorkerStatus.FAILED
    assert client.pid is None


async def test_a_crash_while_loading_is_tried_again(tmp_path: Path) -> None:
    async with running(scripted(load="crash_once", marker=str(tmp_path / "crashed"))) as client:
        assert client.generation == 2


@pytest.mark.usefixtures("patient")
async def test_too_many_crashes_while_loading_are_final() -> None:
    policy = WorkerPolicy(restart_backoff_s=0.01, max_restart_backoff_s=0.01, max_load_crashes=2, stop_timeout_s=30)
    client = scripted(policy, load="crash")
    await client.start()
    with pytest.raises(LoadFailed, match=r"2 times in a row while loading.*exit code 7"):
        await client.wait_ready()
    await client.stop()
    assert client.generation == 2


async def deaths(client: WorkerClient, num: int) -> None:
    """Let the process die as often, each time after it was ready."""
    for death in range(num):
        with pytest.raises(WorkerUnavailable):
            await client.tick(tick("die", request=f"r-{death}"))
        await reaches(client, WorkerStatus.READY)


@pytest.mark.parametrize(("healthy_s", "expected"), [(3600.0, [1, 2, 3]), (0.0, [1, 1, 1])])
async def test_crashes_in_a_row_are_counted_until_a_process_was_healthy(
    healthy_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def pause_s(self: WorkerPolicy, crashes_in_a_row: int) -> float:
        counted.append(crashes_in_a_row)
        return 0.0

    monkeypatch.setattr(WorkerPolicy, "pause_s", pause_s)
    async with running(scripted(replace(FAST, healthy_s=healthy_s))) as client:
        await deaths(client, len(expected))
    assert counted == expected


async def test_a_process_that_was_ready_starts_the_count_of_crashes_while_loading_again(tmp_path: Path) -> None:
    marker = tmp_path / "crashed"
    policy = replace(FAST, max_load_crashes=2)
    async with running(scripted(policy, load="crash_once", marker=str(marker))) as client:
        for generation in (2, 4, 6):
            assert client.generation == generation
            marker.unlink()
            await deaths(client, 1)


async def test_a_load_that_takes_too_long_is_final_and_killed() -> None:
    client = scripted(WorkerPolicy(start_timeout_s=0.5), load="hang")
    await client.start()
    with pytest.raises(LoadFailed, match=r"not ready within 0\.5 s"):
        await client.wait_ready()
    await client.stop()
    assert client.pid is None


@pytest.mark.parametrize("load", ["ready", "hang"])
async def test_stop_kills_a_process_that_will_not_leave(load: str) -> None:
    client = scripted(WorkerPolicy(stop_timeout_s=0.4), stubborn=True, load=load)
    await client.start()
    if load == "ready":
        await client.wait_ready()
    else:
        await becomes_true(
            client, lambda: client.progress is not None and client.progress.stage is LoadStage.CHECKPOINT
        )
    pid = client.pid
    assert pid is not None
    await client.stop()
    assert not is_running(pid)
    assert client.status is WorkerStatus.STOPPED


async def test_stop_fails_what_is_pending_and_can_be_repeated() -> None:
    client = scripted(WorkerPolicy(stop_timeout_s=0.4))
    await client.start()
    await client.wait_ready()
    hanging = asyncio.create_task(client.tick(tick("hang")))
    await asyncio.sleep(0)
    await asyncio.gather(client.stop(), client.stop())
    with pytest.raises(WorkerUnavailable, match="stopped"):
        await hanging
    with pytest.raises(LoadFailed):
        await client.wait_ready()
    await client.stop()


async def test_stop_before_start_and_during_a_pause_return_at_once() -> None:
    await scripted().stop()
    client = scripted(WorkerPolicy(restart_backoff_s=3600, max_restart_backoff_s=3600), load="crash")
    await client.start()
    await reaches(client, WorkerStatus.RESTARTING)
    async with asyncio.timeout(30):
        await client.stop()
    assert client.status is WorkerStatus.STOPPED


async def test_cancelling_the_supervisor_kills_the_process() -> None:
    client = scripted()
    await client.start()
    await client.wait_ready()
    pid = client.pid
    assert pid is not None
    supervisor = next(task for task in asyncio.all_tasks() if task.get_name() == "worker supervisor")
    supervisor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervisor
    assert not is_running(pid)


def test_the_pause_doubles_up_to_its_limit() -> None:
    policy = WorkerPolicy(restart_backoff_s=0.5, max_restart_backoff_s=30.0)
    assert [policy.pause_s(n) for n in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert policy.pause_s(10_000) == 30.0


def test_the_environment_tells_openmp_to_wait_passively_and_malloc_to_keep_memory() -> None:
    environment = worker_environment(3)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["MALLOC_MMAP_THRESHOLD_"]) == 32 * 1024**2
    assert int(environment["MALLOC_TRIM_THRESHOLD_"]) > int(environment["MALLOC_MMAP_THRESHOLD_"])
    assert environment["OMP_NUM_THREADS"] == "3"


def test_importing_the_client_leaves_torch_out() -> None:
    code = "import sys, server.worker_client; sys.exit('torch' in sys.modules or 'kvcache' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=False)
    assert result.returncode == 0
