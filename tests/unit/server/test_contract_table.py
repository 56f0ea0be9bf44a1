"""The session contract as a machine: users, sockets, a worker that fails in every way, and the whole server between.

Everything but the port is real (endpoint, dialect, table, actors, scheduler); time is virtual. What a client can see is
checked by the clients themselves, what the worker can see by the worker, and the books of the server after every step.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from server.actor import SessionActor
from server.config import SessionSection
from server.session import Phase
from tests.support.contract_client import Ledger, LoopClient, LoopServer, assert_the_books_balance, loop_serving
from tests.support.contract_worker import REQUEST_FATES, TICK_FATES, ContractWorker, Fate
from tests.support.server_worker import model_info
from tests.support.virtual_time import VirtualLoop, settle

CAPACITY = 2
NUM_USERS = 4
RESUME_S = 5.0

users = st.integers(0, NUM_USERS - 1)


class TableContract(RuleBasedStateMachine):
    """Four users share two places."""

    @initialize(retries=st.integers(0, 1), max_queued=st.integers(0, 3))
    def opens_the_server(self, retries: int, max_queued: int) -> None:
        self.runner = asyncio.Runner(loop_factory=VirtualLoop, debug=False)
        self.clients: list[LoopClient | None] = [None] * NUM_USERS
        self.ledgers = [Ledger() for _ in range(NUM_USERS)]
        self.old: list[LoopClient] = []
        section = SessionSection(resume_s=RESUME_S, retry_rolled_back_ticks=retries, max_queued=max_queued)
        self.server: LoopServer = self.runner.run(self._open(section))

    async def _open(self, section: SessionSection) -> LoopServer:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=CAPACITY))
        self.serving = loop_serving(worker, session=section)
        return await self.serving.__aenter__()

    def act(self, user: int, type: str, **fields: Any) -> None:
        """Send something, and let the server do what it can without time passing."""
        client = self.clients[user]
        if client is not None and not client.is_over:
            client.send(type, **fields)
        self.runner.run(settle())

    # ------------------------------------------------------------ users

    @rule(user=users, pacing=st.sampled_from(["playback", "free", "clock"]))
    def starts(self, user: int, pacing: str) -> None:
        async def start() -> None:
            self._abandon(user)
            self.ledgers[user] = Ledger()
            client = self.clients[user] = self.server.client(self.ledgers[user])
            client.start(pacing=pacing)
            await settle()

        self.runner.run(start())

    @rule(user=users, num_events=st.integers(1, 3))
    def sends_events(self, user: int, num_events: int) -> None:
        client = self.clients[user]
        for _ in range(num_events):
            if client is not None and not client.is_over:
                client.event()
        self.runner.run(settle())

    @rule(user=users)
    def sends_an_event_again(self, user: int) -> None:
        self.act(user, "session.event", event_id=max(0, self.ledgers[user].next_event_id - 1), prompt="again")

    @rule(user=users, prompt=st.sampled_from([None, "night"]))
    def resets(self, user: int, prompt: str | None) -> None:
        self.act(user, "session.reset", **({} if prompt is None else {"prompt": prompt}))

    @rule(user=users, type=st.sampled_from(["session.pause", "session.unpause"]))
    def pauses(self, user: int, type: str) -> None:
        self.act(user, type)

    @rule(user=users)
    def closes(self, user: int) -> None:
        self.act(user, "session.close")

    @rule(user=users)
    def closes_without_a_socket(self, user: int) -> None:
        """What REST does; closing what is gone, or twice, is no error."""
        session_id = self.ledgers[user].session_id
        for actor in self.server.table.all():
            if actor.session_id == session_id:

                async def close(actor: SessionActor = actor) -> None:
                    assert actor.begin_close("deleted") is actor.begin_close("deleted")
                    await settle()

                self.runner.run(close())

    @rule(user=users)
    def is_cut(self, user: int) -> None:
        async def cut() -> None:
            self._abandon(user)
            await settle()

        self.runner.run(cut())

    @rule(user=users, takes_over=st.booleans())
    def resumes(self, user: int, takes_over: bool) -> None:
        async def resume() -> None:
            if not self.ledgers[user].resume_token:
                return
            old = self.clients[user]
            if old is not None and not takes_over:
                self._abandon(user)
                await settle()
            elif old is not None:
                # From here on the old socket may still be read, but whatever it says is of its own epoch.
                self.old.append(old)
                old.stop_reading()
            client = self.clients[user] = self.server.client(self.ledgers[user])
            client.resume()
            await settle()

        self.runner.run(resume())

    def _abandon(self, user: int) -> None:
        client = self.clients[user]
        if client is not None:
            client.check()
            client.cut()
            self.clients[user] = None

    def _abandon_all(self) -> None:
        for user in range(NUM_USERS):
            self._abandon(user)
        for client in self.old:
            client.cut()

    # ------------------------------------------------------------ worker and time

    @rule(fate=st.sampled_from(TICK_FATES))
    def next_tick_meets(self, fate: Fate) -> None:
        self.server.worker.tick_fates.append(fate)

    @rule(fate=st.sampled_from(REQUEST_FATES))
    def next_request_meets(self, fate: Fate) -> None:
        self.server.worker.request_fates.append(fate)

    @rule()
    def worker_dies(self) -> None:
        async def die() -> None:
            self.server.worker.dies()
            await settle()

        self.runner.run(die())

    @rule(seconds=st.sampled_from([0.005, 0.03, 0.1, 0.5, 3.0, 2 * RESUME_S]))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))
        self.runner.run(settle())

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "server"):
            return
        server = self.server
        assert server.worker.violations == []
        assert server.table.num_resident <= CAPACITY
        holders = {actor.session_id for actor in server.table.all() if actor.holds_place}
        assert len(holders) <= server.table.num_resident, "a place belongs to one session"
        waiting = sum(len(actor.session.pending_event_ids) for actor in server.table.all())
        in_flight = sum(len(tick.event_ids) for actor in server.table.all() if (tick := actor.session.in_flight))
        assert self._count("queued") == self._num_answered() + waiting + in_flight
        for client in self.clients:
            if client is not None:
                client.check()

    @invariant()
    def server_and_worker_agree_on_what_is_committed(self) -> None:
        if not hasattr(self, "server"):
            return
        for actor in self.server.table.all():
            held = self.server.worker.sessions.get(actor.session_id)
            if held is not None and held.is_known and actor.session.phase is Phase.ACTIVE:
                assert held.next_chunk_index == actor.session.next_chunk_index

    def _count(self, result: str) -> int:
        return int(self.server.counter("worldserve_events_total", result=result))

    def _num_answered(self) -> int:
        return sum(self._count(result) for result in ("applied", "dropped_failed", "dropped_reset", "dropped_closed"))

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        if hasattr(self, "server"):
            try:
                self.runner.run(self._end())
            finally:
                self.runner.close()

    async def _end(self) -> None:
        """However it went: everybody closes, and nothing is left."""
        server = self.server
        server.worker.tick_fates.clear()
        server.worker.request_fates.clear()
        await asyncio.sleep(10.0)
        for client in self.clients:
            if client is not None:
                client.check()
                if not client.is_over:
                    client.send("session.close")
        await asyncio.sleep(3 * RESUME_S)
        for actor in server.table.all():
            await actor.begin_close("end")
        await settle()
        for client, ledger in zip(self.clients, self.ledgers, strict=True):
            if client is not None and ledger.epoch == 1 and ledger.ended is not None:
                assert ledger.open_events == set(), "one socket from start to end saw every answer"
        self._abandon_all()
        await settle()
        await assert_the_books_balance(server)
        await self.serving.__aexit__(None, None, None)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]

TestTableContract = TableContract.TestCase
TestTableContract.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=QUIET
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestTableContractAtLength(TableContract.TestCase):
    settings = settings(
        max_examples=1500, stateful_step_count=80, deadline=None, derandomize=False, suppress_health_check=QUIET
    )
