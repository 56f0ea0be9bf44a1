"""Links that break at any moment: what the next socket sees, and what it never sees.

Every client checks while it reads that each chunk is of its own epoch and follows the one before, so a lost or repeated
chunk, or anything of an old epoch, fails these tests by itself.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from server.config import SessionSection
from server.errors import UnknownId
from server.session import Phase
from tests.support.contract_client import Ledger, LoopClient, LoopServer, assert_the_books_balance, loop_serving
from tests.support.contract_worker import ContractWorker, Fate
from tests.support.server_worker import model_info
from tests.support.virtual_time import run_virtual, settle

RESUME_S = 15.0


async def come_back(server: LoopServer, ledger: Ledger, *, speed: float | None = None) -> LoopClient:
    client = server.client(ledger, speed=speed)
    client.resume()
    await client.expect("session.started")
    return client


@pytest.mark.parametrize("lead_chunks", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_cuts_at_random_moments_lose_no_chunk(seed: int, lead_chunks: int) -> None:
    """The viewer reports what it was shown, so that never more chunks are missing than the server keeps."""
    rng = random.Random(seed)

    async def main() -> None:
        worker = ContractWorker(tick_s=0.2, media_s=0.05)
        async with loop_serving(worker, session=SessionSection(lead_chunks=lead_chunks)) as server:
            client = await server.started(speed=rng.choice([None, 1.0, 3.0]))
            ledger = client.ledger
            last_seen = -1
            for _ in range(40):
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.1, 0.2, 0.21, 0.25, 0.4, 2.0]) * rng.random())
                for _ in range(rng.randrange(3)):
                    client.event()
                await settle(rng.randrange(12))
                client.check()
                if rng.random() < 0.3:
                    client.stop_reading()
                    old = client
                    client = await come_back(server, ledger, speed=rng.choice([None, 1.0]))
                    assert await old.over_despite_not_reading() == 1008
                else:
                    await client.leave()
                    await asyncio.sleep(rng.choice([0.0, 0.1, 1.0, RESUME_S - 1.0]) * rng.random())
                    client = await come_back(server, ledger, speed=rng.choice([None, 1.0]))
                assert ledger.last_chunk_index >= last_seen
                last_seen = ledger.last_chunk_index
            assert ledger.gaps == 0
            await client.until(lambda: ledger.last_chunk_index > last_seen)
            client.send("session.close")
            assert await client.over() == 1000
            await settle()
            await assert_the_books_balance(server)

    run_virtual(main())


@pytest.mark.parametrize("pacing", ["free", "clock"])
@pytest.mark.parametrize("seed", range(4))
def test_who_reports_nothing_is_told_of_a_gap_instead(seed: int, pacing: str) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with loop_serving(ContractWorker(tick_s=0.05)) as server:
            client = await server.started(pacing=pacing)
            client.reports = False
            ledger = client.ledger
            for _ in range(20):
                # What arrives now is lost: the user stops reading some time before the link is cut.
                client.stop_reading()
                await asyncio.sleep(rng.random() * (8.0 if pacing == "clock" else 1.0))
                await client.leave()
                client = await come_back(server, ledger)
                client.reports = False
                await client.chunks(1)
                client.check()
            assert ledger.gaps > 0

    run_virtual(main())


@pytest.mark.parametrize("moment_s", [0.0, 0.05, 0.19, 0.2, 0.22, 0.25, 0.3])
def test_a_client_may_come_back_while_a_chunk_is_being_made(moment_s: float) -> None:
    """A tick takes 0.2 s and its pixels 0.05 s more; the link breaks and comes back somewhere in between."""

    async def main() -> None:
        worker = ContractWorker(tick_s=0.2, media_s=0.05)
        async with loop_serving(worker) as server:
            client = await server.started()
            await client.chunks(3)
            worker_tick = asyncio.Event()
            worker.on_tick = lambda tick: worker_tick.set()
            await worker_tick.wait()
            await client.leave()
            await asyncio.sleep(moment_s)
            again = await come_back(server, client.ledger)
            await again.chunks(5)
            again.check()
            indices = [header.chunk_index for header in again.headers]
            first = len(client.headers)
            assert indices[:5] == list(range(first, first + 5))
            assert {header.epoch for header in again.headers} == {2}

    run_virtual(main())


def test_events_queued_before_a_cut_are_applied_after_it() -> None:
    async def main() -> None:
        async with loop_serving() as server:
            client = await server.started()
            await client.chunks(2)
            client.send("session.pause")
            await client.expect("session.state", state="paused")
            event_id = client.event()
            await client.expect("event.queued", event_id=event_id)
            await client.leave()
            again = await come_back(server, client.ledger)
            await again.expect("session.state", state="paused")
            again.send("session.event", event_id=event_id, prompt="again")
            await again.expect("error", code="duplicate", event_id=event_id)
            again.send("session.unpause")
            await again.until(lambda: event_id in again.ledger.applied)

    run_virtual(main())


@pytest.mark.parametrize(("away_s", "is_back"), [(RESUME_S - 0.1, True), (RESUME_S + 0.1, False)])
def test_a_parked_session_expires_on_time(away_s: float, is_back: bool) -> None:
    async def main() -> None:
        worker = ContractWorker()
        async with loop_serving(worker, session=SessionSection(resume_s=RESUME_S)) as server:
            client = await server.started()
            await client.leave()
            await asyncio.sleep(away_s)
            again = server.client(client.ledger)
            again.resume()
            if is_back:
                await again.chunks(3)
            else:
                assert (await again.expect("error"))["code"] == "bad_resume_token"
                await assert_no_session_is_left(server)

    run_virtual(main())


async def assert_no_session_is_left(server: LoopServer) -> None:
    await settle()
    assert server.table.all() == ()
    assert server.worker.sessions == {}
    assert server.table.num_resident == 0


@pytest.mark.parametrize("seed", range(6))
def test_parked_sessions_are_evicted_in_the_order_in_which_they_were_left(seed: int) -> None:
    rng = random.Random(seed)
    capacity = 4

    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=capacity))
        async with loop_serving(worker) as server:
            clients = [await server.started() for _ in range(capacity)]
            rng.shuffle(clients)
            left = clients[: rng.randrange(2, capacity + 1)]
            for client in left:
                await client.leave()
                await asyncio.sleep(0.1)
            returned = left.pop(rng.randrange(len(left)))
            back = await come_back(server, returned.ledger)
            await back.leave()
            left.append(returned)
            await asyncio.sleep(0.1)
            for client in left:
                newcomer = await server.started()
                alive = {actor.session_id for actor in server.table.all()}
                assert client.ledger.session_id not in alive
                assert newcomer.ledger.session_id in alive
                again = server.client(client.ledger)
                again.resume()
                error = await again.expect("error")
                assert (error["code"], error["field"]) == ("session_evicted", "resume_token")

    run_virtual(main())


@pytest.mark.parametrize("away_s", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("is_parked", [False, True])
def test_a_world_that_died_with_its_worker_is_not_resumed(is_parked: bool, away_s: float) -> None:
    """Back within the restart (2 s) or after it; the refusal ends the session, and a second try is told the same."""

    async def main() -> None:
        worker = ContractWorker()
        async with loop_serving(worker) as server:
            client = await server.started()
            await client.chunks(3)
            if is_parked:
                await client.leave()
            worker.dies("the worker was killed by signal 9")
            if not is_parked:
                assert await client.over() == 1012
            await asyncio.sleep(away_s)
            for _ in range(2):
                again = server.client(client.ledger)
                again.resume()
                error = await again.expect("error")
                assert (error["code"], error["field"]) == ("session_lost", "resume_token")
                assert (error["retryable"], error["fatal"]) == (False, False)
                assert "killed by signal 9" in error["message"]
                assert again.headers == []
                await assert_no_session_is_left(server)
            await asyncio.sleep(5.0)
            again.ledger = Ledger()
            again.start()
            await again.chunks(1)

    run_virtual(main())


@pytest.mark.parametrize("away_s", [0.0, 1.0])
def test_who_resumes_before_the_death_of_the_worker_is_noticed_is_told_like_anybody(away_s: float) -> None:
    """Nothing comes from a worker that is dead, and nobody knows why: a resume is answered as ever."""

    async def main() -> None:
        worker = ContractWorker()
        async with loop_serving(worker) as server:
            client = await server.started()
            await client.chunks(3)
            worker.tick_s = 1e6
            event_ids = [client.event()]
            await asyncio.sleep(1.0)
            await client.leave()
            await asyncio.sleep(away_s)
            again = await come_back(server, client.ledger)
            event_ids += [again.event() for _ in range(3)]
            await asyncio.sleep(1.0)
            assert client.ledger.open_events == set(event_ids)
            worker.dies("the worker was killed by signal 9")
            error = await again.expect("error")
            assert (error["code"], error["fatal"]) == ("worker_unavailable", True)
            assert await again.over() == 1012
            assert (client.ledger.open_events, client.ledger.dropped) == (set(), set(event_ids))
            late = server.client(client.ledger)
            late.resume()
            assert (await late.expect("error"))["code"] == "session_lost"
            await assert_no_session_is_left(server)

    run_virtual(main())


def test_a_world_lost_in_the_middle_of_a_reset_is_not_resumed() -> None:
    async def main() -> None:
        worker = ContractWorker(request_s=1.0)
        async with loop_serving(worker) as server:
            client = await server.started()
            await client.chunks(1)
            client.send("session.reset", prompt="again")
            await client.expect("session.state", state="resetting")
            await asyncio.sleep(0.5)
            worker.dies()
            assert await client.over() == 1012
            again = server.client(client.ledger)
            again.resume()
            assert (await again.expect("error"))["code"] == "session_lost"

    run_virtual(main())


def test_a_lost_world_that_was_reset_in_the_meantime_is_resumed() -> None:
    """A failed session may be reset by its id; what is resumed then is the new run, and nothing of the lost one."""

    async def main() -> None:
        worker = ContractWorker()
        async with loop_serving(worker) as server:
            client = await server.started()
            await client.chunks(3)
            worker.dies()
            assert await client.over() == 1012
            await asyncio.sleep(5.0)
            actor = server.table.find(client.ledger.session_id, None)
            await actor.begin_reset(prompt="a new one", seed=None, image=None)
            again = await come_back(server, client.ledger)
            await again.chunks(3)
            assert {(header.run, header.epoch) for header in again.headers} == {(1, 2)}
            assert again.headers[0].chunk_index == 0
            worker.tick_fates.append(Fate.UNKNOWN)
            await again.expect("session.state", state="failed")
            await again.leave()
            back = await come_back(server, again.ledger)
            await back.expect("session.state", state="failed")

    run_virtual(main())


def test_a_lost_session_that_nobody_comes_back_to_expires_and_is_still_explained() -> None:
    async def main() -> None:
        worker = ContractWorker()
        async with loop_serving(worker, session=SessionSection(resume_s=RESUME_S)) as server:
            client = await server.started()
            worker.dies()
            await client.over()
            await asyncio.sleep(RESUME_S + 0.1)
            await assert_no_session_is_left(server)
            again = server.client(client.ledger)
            again.resume()
            assert (await again.expect("error"))["code"] == "session_lost"

    run_virtual(main())


def test_only_the_owner_is_told_that_a_session_was_lost() -> None:
    async def main() -> None:
        worker = ContractWorker()
        async with loop_serving(worker) as server:
            client = await server.started()
            worker.dies()
            await client.over()
            with pytest.raises(UnknownId, match="there is no session with this resume token"):
                server.table.resume(client.ledger.resume_token, "somebody else")
            assert server.table.find(client.ledger.session_id, None).session.phase is Phase.FAILED

    run_virtual(main())


def test_chunks_that_wait_for_a_socket_are_not_sent_once_it_is_taken_over() -> None:
    """One frame is in the socket's buffer and one on its way there; what waits behind them is the new socket's."""

    async def main() -> None:
        async with loop_serving(ContractWorker(tick_s=0.2)) as server:
            old = await server.started(room=1, pacing="free")
            await old.chunks(1)
            old.stop_reading()
            await asyncio.sleep(10)
            await come_back(server, old.ledger)
            frames = [await old.socket.to_client.get()]
            while not isinstance(frames[-1], int):
                frames.append(await old.socket.to_client.get())
            assert frames[-1] == 1008
            assert sum(isinstance(frame, bytes) for frame in frames) == 2

    run_virtual(main())


def test_a_server_that_parks_nothing_says_that_the_socket_was_lost() -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker(), session=SessionSection(resume_s=0.0)) as server:
            client = await server.started()
            await client.leave()
            await asyncio.sleep(1)
            assert server.table.all() == ()
            assert server.counter("worldserve_sessions_ended_total", reason="disconnected") == 1

    run_virtual(main())
