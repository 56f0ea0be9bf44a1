"""Long runs of real servers: memory, threads and files stay where they were. No rate is asserted here.

The rate of the same ten minutes is measured by `benchmarks/demo_rate.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.demo_process import DemoProcess, ProcessUse, demo_process
from clients.python import WorldClient
from tests.support.demo_server import Start, Watched
from tests.support.server_client import WorldSocket, png
from tests.support.server_process import server_process

pytestmark = pytest.mark.slow

DAY = Start(image="day", prompt="a small town, day", seed=1)
TEN_MINUTES_CHUNKS = 600
TWO_MINUTES_CHUNKS = 120
MAX_GROWTH = 1.05

WARM_UP_VISITS = 100
NUM_VISITS = 200
MAX_BYTES_A_VISIT = 4_000
"""A visit leaves 0.3 kB for a while, the memory of how it ended, and malloc's heap is never quite the same. Less than
the smallest thing that could be left: one encoded chunk has 10 kB, its pixels have 276 kB, an encoder megabytes."""


@pytest.mark.timeout(2400)
async def test_ten_minutes_of_walking_leave_memory_flat(tmp_path: Path) -> None:
    keys = (("w",), ("w", "l"), ("d",), ("j",), ())
    server, worker, receipts = [], [], []
    with demo_process(tmp_path / "server.log") as demo:
        async with DAY.client(demo.world_url) as world:
            watched = Watched(start=DAY, world=world)
            for index in range(TEN_MINUTES_CHUNKS):
                await watched.take(1)
                watched.chunks.clear()
                server.append(demo.server_use().rss_bytes)
                worker.append(demo.worker_use().rss_bytes)
                if index % 3 == 0:
                    receipts.append((index, await watched.hold(*keys[index // 3 % len(keys)])))
            distances = [(await receipt.applied).chunk_index - index for index, receipt in receipts]
        assert demo.metrics()["worldserve_chunks_total"] >= TEN_MINUTES_CHUNKS
    for rss_bytes in (server, worker):
        assert max(rss_bytes[TWO_MINUTES_CHUNKS:]) < MAX_GROWTH * rss_bytes[TWO_MINUTES_CHUNKS]
    assert max(distances) <= 2


@pytest.mark.timeout(1800)
async def test_two_hundred_lost_connections_leave_nothing(tmp_path: Path) -> None:
    """Half of the sessions are closed, half lose their socket and are found parked or evicted."""
    with demo_process(tmp_path / "server.log", "--session.resume-s", "1") as demo:
        for number in range(WARM_UP_VISITS):
            await _visit(demo, number)
        await _until_empty(demo)
        before = demo.server_use(), demo.worker_use()
        for number in range(NUM_VISITS):
            await _visit(demo, number)
        await _until_empty(demo)
        after = demo.server_use(), demo.worker_use()
        capacity = demo.info()["capacity"]
        metrics = demo.metrics()
    assert capacity["free_pages"] == capacity["total_pages"]
    assert metrics["worldserve_sessions_started_total"] == WARM_UP_VISITS + NUM_VISITS
    assert metrics["worldserve_connections"] == 0
    assert metrics["worldserve_worker_generation"] == 1
    assert {name: value for name, value in metrics.items() if name.startswith("worldserve_sessions{") and value} == {}
    print(f"before: {before}\nafter:  {after}")
    for use_before, use_after in zip(before, after, strict=True):
        _assert_no_more(use_before, use_after)


async def _visit(demo: DemoProcess, number: int) -> None:
    """Start a session, take its first chunk and leave, every second time without a word."""
    async with await WorldSocket.open(demo.url) as socket:
        await socket.start(prompt=DAY.prompt, image={"name": "day"}, seed=number)
        await socket.media()
        if number % 2:
            await socket.drop()
        else:
            await socket.send("session.close")
            assert await socket.closed() == 1000


async def _until_empty(demo: DemoProcess) -> None:
    """Wait until no session is left; the time-out only ends a test that hangs."""
    async with asyncio.timeout(60):
        while demo.metrics()["worldserve_resident_sessions"]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _assert_no_more(before: ProcessUse, after: ProcessUse) -> None:
    assert after.num_fds <= before.num_fds
    assert after.num_threads <= before.num_threads
    assert after.own_bytes < before.own_bytes + NUM_VISITS * MAX_BYTES_A_VISIT


@pytest.mark.timeout(1200)
async def test_two_thousand_chunks_of_one_session_leave_memory_flat(tmp_path: Path) -> None:
    with server_process(tmp_path, chunk_ms=0.0) as server:
        async with WorldClient(server.url, prompt="a town", image=png(), seed=1, pacing="free") as world:
            rss_bytes, used_pages, num_chunks = [], set(), 0
            async for chunk in world.chunks():
                assert chunk.chunk_index == num_chunks
                num_chunks += 1
                if num_chunks % 5 == 0:
                    await world.hold(*"wd"[: num_chunks % 3])
                if num_chunks % 100 == 0:
                    rss_bytes.append((server.ps.memory_info().rss, server.worker().memory_info().rss))
                    used_pages.add(server.metric('worldserve_pages{state="used"}'))
                if num_chunks == 2000:
                    break
        server.until_empty()
    assert len(used_pages) == 1
    for process in range(2):
        seen = [sample[process] for sample in rss_bytes]
        assert max(seen[5:]) < MAX_GROWTH * seen[4]
