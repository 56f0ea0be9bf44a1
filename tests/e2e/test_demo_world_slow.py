"""Long runs of real servers: memory, threads and files stay where they were. No rate is asserted here.

The rate of the same ten minutes is measured by `benchmarks/demo_rate.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
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

NUM_VISITS = 100
"""Three times: to warm up, and twice to compare. A leak would show in both."""

MAX_SERVER_BYTES = 400_000
"""A visit leaves 0.3 kB for a while, the memory of how it ended, and malloc's heap is never quite the same. Less than
the smallest thing that visits could leave: an encoded chunk has 10 kB, its pixels have 276 kB, an encoder megabytes."""

NOISE = 3
"""Thread pools grow to their bound, and the connection of a question just asked may be open."""

MAX_WORKER_STEP_BYTES = 8_000_000
"""The worker keeps freed memory on purpose: its heap is as large as the sessions that were once together made it. The
test fills all places first. Blocks of the decoder, 3.9 MB each, may still come to lie elsewhere, but rarely."""


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


@pytest.mark.timeout(2400)
async def test_two_hundred_lost_connections_leave_nothing(tmp_path: Path) -> None:
    """Half of the sessions are closed, half lose their socket and are found parked or evicted."""
    with demo_process(tmp_path / "server.log", "--session.resume-s", "1") as demo:
        server, worker = [], []
        await _fill_all_places(demo)
        for _ in range(3):
            for number in range(NUM_VISITS):
                await _visit(demo, number)
            await _until_empty(demo)
            server.append(demo.server_use())
            worker.append(demo.worker_use())
        capacity = demo.info()["capacity"]
        metrics = demo.metrics()
    print(f"server: {server}\nworker: {worker}")
    assert capacity["free_pages"] == capacity["total_pages"]
    assert metrics["worldserve_sessions_started_total"] == capacity["sessions"] + 3 * NUM_VISITS
    assert metrics["worldserve_connections"] == 0
    assert metrics["worldserve_worker_generation"] == 1
    assert {name: value for name, value in metrics.items() if name.startswith("worldserve_sessions{") and value} == {}
    for uses in (server, worker):
        assert uses[-1].num_fds <= uses[0].num_fds + NOISE
        assert uses[-1].num_threads <= uses[0].num_threads + NOISE
    assert max(_growth(server)) < MAX_SERVER_BYTES
    assert min(_growth(worker)) < MAX_SERVER_BYTES
    assert max(_growth(worker)) < MAX_WORKER_STEP_BYTES


def _growth(uses: list[ProcessUse]) -> list[int]:
    """Return by how much memory grew from one look to the next."""
    return [after.own_bytes - before.own_bytes for before, after in pairwise(uses)]


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


async def _fill_all_places(demo: DemoProcess) -> None:
    """Have as many sessions as there may be at the same time, each with a few chunks."""
    async with AsyncExitStack() as stack:
        sockets = []
        for number in range(demo.info()["capacity"]["sessions"]):
            sockets.append(await stack.enter_async_context(await WorldSocket.open(demo.url)))
            await sockets[-1].start(prompt=DAY.prompt, image={"name": "day"}, seed=number)
        for _ in range(4):
            for socket in sockets:
                await socket.media()
        for socket in sockets:
            await socket.send("session.close")
            assert await socket.closed() == 1000
    await _until_empty(demo)


async def _until_empty(demo: DemoProcess) -> None:
    """Wait until no session and no connection is left; the time-out only ends a test that hangs."""

    def is_empty() -> bool:
        metrics = demo.metrics()
        return metrics["worldserve_resident_sessions"] == metrics["worldserve_connections"] == 0

    async with asyncio.timeout(60):
        while not is_empty():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


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
