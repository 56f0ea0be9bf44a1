"""Thousands of random verbs and faults against the whole server in virtual time; at the end all books balance."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import pytest

from server.config import SessionSection
from tests.support.contract_client import Ledger, LoopClient, LoopServer, assert_the_books_balance, loop_serving
from tests.support.contract_worker import REQUEST_FATES, TICK_FATES, ContractWorker
from tests.support.server_worker import model_info
from tests.support.virtual_time import VirtualLoop, run_virtual, settle

CAPACITY = 4
NUM_USERS = 12
SECTION = SessionSection(
    resume_s=5.0,
    max_queued=5,
    idle_s=60.0,
    max_session_s=600.0,
    stall_timeout_s=20.0,
    retry_rolled_back_ticks=1,
    max_pending_events=8,
)

Verbs = Counter[str]


class User:
    """Does one random thing after the other, on one socket after the other."""

    def __init__(self, server: LoopServer, rng: random.Random, verbs: Verbs) -> None:
        self._server = server
        self._rng = rng
        self._verbs = verbs
        self._ledger = Ledger()
        self._client: LoopClient | None = None

    async def act(self) -> None:
        client = self._client
        if client is not None:
            client.check()
        if client is None or client.is_over:
            self._connect()
        else:
            self._do_something(client)
        await asyncio.sleep(self._rng.choice([0.0, 0.0, 0.01, 0.1, 1.0]) * self._rng.random())

    def leave(self) -> None:
        if self._client is not None:
            self._client.check()
            self._client.cut()
            self._client = None

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
        verb = rng.choices(
            ["event", "reset", "pause", "unpause", "close", "cut", "takeover", "stall", "ping", "nonsense", "wait"],
            [30, 3, 3, 6, 1, 3, 2, 0.5, 5, 3, 10],
        )[0]
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

    def _connect_again(self) -> None:
        self._client = self._new_client(None, 10_000)
        self._client.resume()


async def spoil(server: LoopServer, rng: random.Random, verbs: Verbs, done: asyncio.Event) -> None:
    """Let ticks and requests fail, the worker die, and the clock jump."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    while not done.is_set():
        await asyncio.sleep(rng.random() * 0.4)
        fault = rng.choices(["tick", "request", "kill", "jump"], [20, 6, 1, 1])[0]
        verbs[f"fault {fault}"] += 1
        match fault:
            case "tick":
                server.worker.tick_fates.append(rng.choice(TICK_FATES))
            case "request":
                server.worker.request_fates.append(rng.choice(REQUEST_FATES))
            case "kill":
                server.worker.dies()
            case "jump":
                loop.now += rng.choice([0.5, 10.0, 100.0])


async def soak(num_verbs: int, seed: int) -> Verbs:
    rng = random.Random(seed)
    verbs: Verbs = Counter()
    info = model_info(width=2, height=2, capacity_sessions=CAPACITY)
    worker = ContractWorker(info, tick_s=0.05, keeps_ticks=False)
    tasks_before = len(asyncio.all_tasks())
    async with loop_serving(worker, session=SECTION) as server:
        done = asyncio.Event()
        spoiler = asyncio.ensure_future(spoil(server, rng, verbs, done))
        users = [User(server, random.Random(rng.random()), verbs) for _ in range(NUM_USERS)]

        async def live(user: User) -> None:
            while sum(verbs.values()) < num_verbs:
                await user.act()
                assert server.table.num_resident <= CAPACITY
            user.leave()

        await asyncio.gather(*(live(user) for user in users))
        done.set()
        await spoiler
        await end_all(server)
        await assert_the_books_balance(server)
        assert len(asyncio.all_tasks()) <= tasks_before + 2 + num_readers(), "only scheduler and timers are left"
    return verbs


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
    assert sum(verbs.values()) >= at_least
    for verb in ("event", "reset", "cut", "takeover", "resume", "fault tick", "fault kill", "fault jump"):
        assert verbs[verb], f"no {verb} in {dict(verbs)}"


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Any:
    """The server logs every spoiled tick."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_few_thousand_random_verbs(seed: int) -> None:
    check(run_virtual(soak(3000, seed), limit_s=1e6), at_least=3000)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(10))
def test_many_random_verbs(seed: int) -> None:
    check(run_virtual(soak(30_000, seed), limit_s=1e7), at_least=30_000)
