"""Twelve minutes of a real server and a real worker with a tiny model, and sixteen sessions that nobody treats well.

    WORLDSERVE_SOAK_MINUTES=2 pytest -m slow -s tests/e2e/test_soak_real.py

Nothing here is asserted about time; a machine with less to offer does fewer things in the same minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, running_command
from tests.support.soak_user import SoakUser

pytestmark = pytest.mark.slow

MINUTES = float(os.environ.get("WORLDSERVE_SOAK_MINUTES", "12"))
NUM_SESSIONS = 16
NUM_USERS = 17
SEED = 5
MAX_GROWTH = 1.25
"""Of the server's memory between a third and the end. A leaked encoder a start would be many times that."""

CONFIG = f"""\
[model]
name = "lingbot_world_v2"
checkpoint = "package:worldmodel/data/demo_world"
width = 48
height = 32
fps = 12
precision = "fp32"
start_images = [{{ name = "day", file = "examples/day.png", prompt = "a small town, day" }}]

[server]
port = 0

[session]
resume_s = 5.0
stall_timeout_s = 20.0
idle_s = 60.0

[kvcache]
requested_sessions = {NUM_SESSIONS}

[worker]
cpu_threads = 1
restart_backoff_s = 0.1
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    config = tmp_path / "tiny.toml"
    config.write_text(CONFIG, encoding="utf-8")
    with running_command("tests.support.tiny_world_server", str(config)) as server:
        server.until_ready()
        yield server


@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_sixteen_sessions_for_twelve_minutes(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    verbs: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    users = [SoakUser(server.url, random.Random(SEED + number), verbs, outcomes) for number in range(NUM_USERS)]
    files_before = server.ps.num_fds()
    rss_mib: list[float] = []
    most_resident = 0.0
    async with asyncio.TaskGroup() as group:
        for user in users:
            group.create_task(user.live())
        end = time.monotonic() + MINUTES * 60
        kills_at = [time.monotonic() + MINUTES * 30]
        while time.monotonic() < end:
            await asyncio.sleep(5.0)
            rss_mib.append(server.ps.memory_info().rss / 2**20)
            most_resident = max(most_resident, await asyncio.to_thread(server.metric, "worldserve_resident_sessions"))
            if kills_at and time.monotonic() > kills_at[0]:
                kills_at.pop()
                server.worker().send_signal(signal.SIGKILL)
        for user in users:
            user.stops = True
    await asyncio.to_thread(server.end_all_sessions)
    with capsys.disabled():
        print(f"\n{sum(verbs.values())} verbs, {outcomes['chunk']} chunks, {most_resident:.0f} sessions at most,")
        print(f"server memory {rss_mib[0]:.0f} MiB at first, {rss_mib[-1]:.0f} MiB at last, {max(rss_mib):.0f} at most")
        print(dict(sorted(verbs.items())), dict(sorted(outcomes.items())))
    assert most_resident == NUM_SESSIONS
    await asyncio.to_thread(assert_all_balances, server)
    assert outcomes["error worker_unavailable"] > 0
    assert outcomes["error session_lost"] > 0
    assert max(rss_mib) < MAX_GROWTH * rss_mib[len(rss_mib) // 3]
    # The connection that asked for the last number is closed a moment later.
    await asyncio.to_thread(server.until, lambda: server.ps.num_fds() <= files_before, what="files are closed")


def assert_all_balances(server: ServerProcess) -> None:
    """Check that everything that was counted up was counted down, and every event answered."""
    answered = sum(
        server.metric(f'worldserve_events_total{{result="{result}"}}')
        for result in ("applied", "dropped_failed", "dropped_reset", "dropped_closed")
    )
    assert server.metric('worldserve_events_total{result="queued"}') == answered
    server.until(lambda: server.metric("worldserve_connections") == 0, what="no connection is left")
    for name in ("worldserve_resident_sessions", "worldserve_queued_sessions", 'worldserve_pages{state="used"}'):
        assert server.metric(name) == 0
    assert server.metric("worldserve_worker_generation") == 2
    assert server.metric("worldserve_ready") == 1
