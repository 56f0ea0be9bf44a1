"""Many clients for few places, all at once, many times; in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from server.config import SessionSection
from tests.support.contract_client import LoopClient, LoopServer, assert_the_books_balance, loop_serving
from tests.support.contract_worker import ContractWorker, Fate
from tests.support.server_worker import model_info
from tests.support.virtual_time import run_virtual, settle

CAPACITY = 3
NUM_CLIENTS = CAPACITY + 20


def positions(client: LoopClient) -> list[tuple[int, int]]:
    return [(it["position"], it["queued"]) for it in client.messages if it["type"] == "session.queued"]


def is_running(client: LoopClient) -> bool:
    return client.ledger.epoch > 0 and not client.is_over


def assert_positions(server: LoopServer, waiting: list[LoopClient]) -> None:
    """Everybody who waits knows the right position, in the order in which they came."""
    assert server.table.num_waiting == len(waiting)
    assert [positions(client)[-1] for client in waiting] == [(index + 1, len(waiting)) for index in range(len(waiting))]


@pytest.mark.parametrize("seed", range(20))
def test_a_rush_never_exceeds_the_capacity_and_everybody_is_served(seed: int) -> None:
    """Of those who wait some leave, some opens fail, and those who are in close one after the other."""
    rng = random.Random(seed)

    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=CAPACITY), request_s=0.05)
        async with loop_serving(worker, session=SessionSection(max_queued=NUM_CLIENTS)) as server:
            clients = [server.client() for _ in range(NUM_CLIENTS)]
            for client in clients:
                client.start()
            await settle()
            assert server.table.num_resident == CAPACITY
            waiting = clients[CAPACITY:]
            assert_positions(server, waiting)
            for client in rng.sample(waiting, 4):
                await client.leave()
                await settle(10)
                waiting.remove(client)
                assert_positions(server, waiting)
            worker.open_fates.extend(rng.choices([Fate.DONE, Fate.REFUSED], k=6))
            served = 0
            while server.table.num_waiting or any(is_running(client) for client in clients):
                await asyncio.sleep(rng.choice([0.01, 0.05, 0.3]))
                assert server.table.num_resident <= CAPACITY
                assert len(worker.sessions) <= CAPACITY
                running = [client for client in clients if is_running(client)]
                if running:
                    client = rng.choice(running)
                    client.send("session.close")
                    assert await client.over() == 1000
                    served += 1
            assert served >= NUM_CLIENTS - 4 - 6
            for client in clients:
                client.cut()
            await settle()
            await assert_the_books_balance(server)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(10))
def test_a_rush_on_parked_sessions_evicts_each_once(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=CAPACITY))
        async with loop_serving(worker, session=SessionSection(max_queued=NUM_CLIENTS)) as server:
            parked = [await server.started() for _ in range(CAPACITY)]
            rng.shuffle(parked)
            for client in parked:
                await client.leave()
                await asyncio.sleep(0.01)
            rush = [server.client() for _ in range(NUM_CLIENTS)]
            for client in rush:
                client.start()
            await asyncio.sleep(1.0)
            assert [is_running(client) for client in rush] == [True] * CAPACITY + [False] * 20
            assert_positions(server, rush[CAPACITY:])
            assert server.counter("worldserve_sessions_ended_total", reason="evicted") == CAPACITY
            for client in parked:
                again = server.client(client.ledger)
                again.resume()
                assert (await again.expect("error"))["code"] == "session_evicted"
                again.cut()

    run_virtual(main())


def test_only_the_longest_parked_is_evicted_for_one_newcomer() -> None:
    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=CAPACITY))
        async with loop_serving(worker) as server:
            first, second, third = [await server.started() for _ in range(CAPACITY)]
            for client in (second, first):
                await client.leave()
                await asyncio.sleep(0.5)
            await server.started()
            left = {actor.session_id for actor in server.table.all()}
            assert second.ledger.session_id not in left
            assert {first.ledger.session_id, third.ledger.session_id} <= left

    run_virtual(main())


def test_a_queue_that_is_full_refuses_at_once() -> None:
    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=CAPACITY))
        async with loop_serving(worker, session=SessionSection(max_queued=2)) as server:
            clients = [server.client() for _ in range(CAPACITY + 5)]
            for client in clients:
                client.start()
            await settle()
            assert_positions(server, clients[CAPACITY : CAPACITY + 2])
            for client in clients[CAPACITY + 2 :]:
                assert (await client.expect("error"))["code"] == "capacity"
                assert await client.over() == 1013

    run_virtual(main())
