"""Random verbs and faults against the whole server in virtual time; at the end all books balance.

The short form belongs to the default set. The slow one is a million verbs, or as many as `WORLDSERVE_SOAK_VERBS` says:

    WORLDSERVE_SOAK_VERBS=100000 pytest -m slow -s tests/e2e/test_soak_virtual.py
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from server.config import RecordingSection, SessionSection
from server.recording import LOG_FILE
from server.wire.messages import ChunkHeader
from tests.support.contract_client import (
    Ledger,
    LoopClient,
    LoopServer,
    Message,
    assert_the_books_balance,
    loop_serving,
)
from tests.support.contract_worker import REQUEST_FATES, TICK_FATES, ContractWorker, Fate
from tests.support.full_disk import FullDisk, full_disk
from tests.support.server_worker import model_info
from tests.support.virtual_time import START_S, VirtualLoop, now, run_virtual, settle

CAPACITY = 4
NUM_USERS = 12
MAX_RECORDING_BYTES = 200_000
NUM_VERBS_ASKED = int(os.environ.get("WORLDSERVE_SOAK_VERBS", "1000000"))
SECTION = SessionSection(
    resume_s=5.0,
    max_queued=5,
    idle_s=60.0,
    max_session_s=600.0,
    stall_timeout_s=20.0,
    retry_rolled_back_ticks=1,
    max_pending_events=8,
)

VERBS = {
    "event": 30,
    "reset": 2,
    "pause": 3,
    "unpause": 3,
    "close": 1,
    "cut": 3,
    "takeover": 2,
    "stall": 0.5,
    "ping": 5,
    "nonsense": 3,
    "wait": 10,
    "watch": 2,
}
"""What users do once they are connected, and how often."""

FAULTS = {"tick": 12, "request": 6, "kill": 1, "jump": 1, "disk": 2}

Verbs = Counter[str]


def num_verbs(verbs: Verbs) -> int:
    """Count what users did; faults and ticks come on top."""
    return sum(number for verb, number in verbs.items() if not verb.startswith(("fault ", "(")))


class Watcher(LoopClient):
    """A spectator that reads at some speed and checks that what it sees is one stream."""

    def __init__(self, server: LoopServer, ledger: Ledger, *, watch_token: str, speed: float | None, room: int) -> None:
        super().__init__(server, ledger, speed=speed, room=room)
        self.keeps = self.reports = False
        self._place = (-1, -1)
        self._num_frames = 0
        self.send("session.watch", protocol=1, watch_token=watch_token)

    def _on_message(self, message: Message) -> None:
        assert message["type"] in ("session.watching", "session.state", "session.closed", "error"), message
        if message["type"] == "session.state":
            assert message["epoch"] == 0, "a spectator is of no epoch"

    async def _on_chunk(self, header: ChunkHeader) -> None:
        assert header.chunk_index is not None
        assert header.pts is not None
        assert (header.session_id, header.epoch) == (self.ledger.session_id, 0)
        place = (header.run, header.chunk_index)
        assert place > self._place, f"chunk {place} after {self._place}"
        assert header.pts * self.server.fps == self._num_frames * header.timescale, "a hole in a spectator's time"
        self._place, self._num_frames = place, self._num_frames + header.num_frames
        if self.speed is not None:
            await asyncio.sleep(header.num_frames / self.server.fps / self.speed)


class User:
    """Does one random thing after the other, on one socket after the other."""

    def __init__(self, server: LoopServer, rng: random.Random, verbs: Verbs) -> None:
        self._server = server
        self._rng = rng
        self._verbs = verbs
        self._ledger = Ledger()
        self._client: LoopClient | None = None
        self._watcher: Watcher | None = None

    async def act(self) -> None:
        client = self._client
        for one in (client, self._watcher):
            if one is not None:
                one.check()
        if client is None or client.is_over:
            self._connect()
        else:
            self._do_something(client)
        await asyncio.sleep(self._rng.choice([0.0, 0.0, 0.1, 1.0, 3.0]) * self._rng.random())

    def leave(self) -> None:
        if self._client is not None:
            self._client.check()
            self._client.cut()
            self._client = None

    def leave_for_good(self) -> None:
        self.leave()
        if self._watcher is not None:
            self._watcher.cut()

    def _connect(self) -> None:
        rng = self._rng
        speed, room = rng.choice([(None, 10_000), (1.0, 10_000), (5.0, 100), (0.2, 3)])
        if self._ledger.resume_token and rng.random() < 0.7:
            self._verbs["resume"] += 1
            self._client = self._new_client(speed, room)
            self._client.resume()
            return
        self._verbs["start"] += 1
        self._ledger = Ledger()
        self._client = self._new_client(speed, room)
        self._client.start(pacing=rng.choice(["playback", "playback", "free", "clock"]))

    def _new_client(self, speed: float | None, room: int) -> LoopClient:
        client = self._server.client(self._ledger, speed=speed, room=room)
        client.keeps = False
        return client

    def _do_something(self, client: LoopClient) -> None:
        rng = self._rng
        (verb,) = rng.choices([*VERBS], [*VERBS.values()])
        if self._ledger.state in ("failed", "paused") and rng.random() < 0.3:
            verb = "reset" if self._ledger.state == "failed" else "unpause"
        self._verbs[verb] += 1
        match verb:
            case "event":
                for _ in range(rng.randrange(1, 4)):
                    client.event()
            case "reset" | "pause" | "unpause" | "close":
                client.send(f"session.{verb}")
            case "cut":
                self.leave()
            case "takeover" if self._ledger.resume_token:
                client.stop_reading()
                self._connect_again()
            case "stall":
                client.stop_reading()
            case "ping":
                client.send("ping", t=1.0)
            case "nonsense":
                client.send(rng.choice(["session.dance", "session.start", "playback", "session.event"]))

            case "watch" if self._ledger.watch_token:
                self._watch()

    def _watch(self) -> None:
        if self._watcher is not None:
            self._watcher.check()
            self._watcher.cut()
        speed, room = self._rng.choice([(None, 10_000), (0.2, 3)])
        self._watcher = Watcher(
            self._server, self._ledger, watch_token=self._ledger.watch_token, speed=speed, room=room
        )

    def _connect_again(self) -> None:
        self._client = self._new_client(None, 10_000)
        self._client.resume()


async def spoil(server: LoopServer, disk: FullDisk, rng: random.Random, verbs: Verbs, done: asyncio.Event) -> None:
    """Let ticks and requests fail, the worker die, the clock jump, and the disk be full for a while."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    while not done.is_set():
        await asyncio.sleep(rng.random())
        (fault,) = rng.choices([*FAULTS], [*FAULTS.values()])
        verbs[f"fault {fault}"] += 1
        match fault:
            # One at a time: faults that pile up would leave no tick to succeed.
            case "tick" if not server.worker.tick_fates:
                server.worker.tick_fates.append(rng.choice(TICK_FATES))
            case "request" if not server.worker.request_fates:
                server.worker.request_fates.append(rng.choice(REQUEST_FATES))
            case "kill":
                server.worker.dies()
            case "jump":
                loop.now += rng.choice([0.5, 10.0, 100.0])
            case "disk":
                disk.is_full = True
        if fault != "disk" and rng.random() < 0.3:
            disk.is_full = False
    disk.is_full = False


async def soak(num_verbs_asked: int, seed: int, folder: Path) -> Verbs:
    rng = random.Random(seed)
    verbs: Verbs = Counter()
    info = model_info(width=2, height=2, capacity_sessions=CAPACITY)
    worker = ContractWorker(info, tick_s=0.03, keeps_ticks=False)
    recording = RecordingSection(folder=str(folder), max_bytes=MAX_RECORDING_BYTES)
    # Files that earlier tests left to the collector are none of these.
    gc.collect()
    tasks_before, files_before = len(asyncio.all_tasks()), num_open_files()
    with full_disk() as disk:
        async with loop_serving(worker, session=SECTION, recording=recording) as server:
            done = asyncio.Event()
            spoiler = asyncio.ensure_future(spoil(server, disk, rng, verbs, done))
            users = [User(server, random.Random(rng.random()), verbs) for _ in range(NUM_USERS)]

            async def live(user: User) -> None:
                while num_verbs(verbs) < num_verbs_asked:
                    await user.act()
                    assert server.table.num_resident <= CAPACITY
                user.leave_for_good()

            await asyncio.gather(*(live(user) for user in users))
            done.set()
            await spoiler
            await end_all(server)
            await assert_the_books_balance(server)
            assert_the_recordings_are_whole(server, folder, disk)
            assert len(asyncio.all_tasks()) <= tasks_before + 3 + num_readers(), (
                "only scheduler and both tables' timers are left"
            )
            # What is of earlier tests may be closed meanwhile.
            assert num_open_files() <= files_before
            verbs["fault disk refused a write"] = disk.num_refusals
            verbs["(ticks done)"] = worker.num_ticks[Fate.DONE]
    return verbs


def num_open_files() -> int:
    return psutil.Process().num_fds()


def assert_the_recordings_are_whole(server: LoopServer, folder: Path, disk: FullDisk) -> None:
    """Check that each log that was kept is whole as far as it goes, and that bytes and failures are counted."""
    total_bytes = 0
    for path in folder.iterdir():
        total_bytes += sum(file.stat().st_size for file in path.iterdir())
        if (path / LOG_FILE).exists():
            assert_the_log_is_whole((path / LOG_FILE).read_text(encoding="utf-8"))
    assert total_bytes <= MAX_RECORDING_BYTES
    assert server.counter("worldserve_recording_bytes") == total_bytes
    # A recording that meets a full disk twice, the second time with room made, stops; others stop because all of the
    # allowed bytes are in use.
    assert 2 * server.counter("worldserve_recording_failures_total") >= disk.num_refusals


def assert_the_log_is_whole(text: str) -> None:
    assert text == "" or text.endswith("\n"), "half a line"
    lines = [json.loads(line) for line in text.splitlines()]
    ticks = [(line["run"], line["chunk_index"]) for line in lines if "chunk_index" in line]
    for (run, index), after in itertools.pairwise([(0, -1), *ticks]):
        assert after == (run, index + 1) or (after[0] > run and after[1] == 0), f"{after} after {(run, index)}"


def num_readers() -> int:
    """Count clients that were left waiting for what never comes; they are of the test."""
    return sum("LoopClient._read" in repr(task) for task in asyncio.all_tasks())


async def end_all(server: LoopServer) -> None:
    server.worker.tick_fates.clear()
    server.worker.request_fates.clear()
    await asyncio.sleep(SECTION.stall_timeout_s + 2 * SECTION.resume_s + 5.0)
    await settle()
    for actor in server.table.all():
        await actor.begin_close("end")
    for client in tuple(server.open_clients):
        client.cut()
    await settle()


def check(verbs: Verbs, *, at_least: int) -> None:
    assert num_verbs(verbs) >= at_least
    for verb in ("event", "reset", "cut", "takeover", "resume", "stall", "watch"):
        assert verbs[verb], f"no {verb} in {dict(verbs)}"
    assert verbs["(ticks done)"] > num_verbs(verbs) / 20, "hardly anything went on"
    for fault in ("tick", "request", "kill", "jump", "disk", "disk refused a write"):
        assert verbs[f"fault {fault}"], f"no {fault} in {dict(verbs)}"


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The server logs every spoiled tick; in a long soak nobody could even keep it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_few_thousand_random_verbs(seed: int, tmp_path: Path) -> None:
    check(run_virtual(soak(7000, seed, tmp_path), limit_s=1e6), at_least=7000)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_million_random_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def timed() -> tuple[Verbs, float]:
        verbs = await soak(NUM_VERBS_ASKED, 3, tmp_path)
        return verbs, now() - START_S

    started_at = time.monotonic()
    verbs, simulated_s = run_virtual(timed(), limit_s=1e9, max_turns=math.inf)
    took_s = time.monotonic() - started_at
    check(verbs, at_least=NUM_VERBS_ASKED)
    memory_mib = psutil.Process().memory_info().rss / 2**20
    with capsys.disabled():
        print(
            f"\n{num_verbs(verbs)} verbs in {took_s:.0f} s, {simulated_s:.0f} s of virtual time, {memory_mib:.0f} MiB"
        )
        print(dict(sorted(verbs.items())))
