"""Pacing of the whole server with a model five times faster than real time, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from server.config import SessionSection
from server.wire.binary import unpack_chunk
from tests.support.contract_client import LoopClient, LoopServer, loop_serving
from tests.support.contract_worker import ContractWorker
from tests.support.virtual_time import now, run_virtual
from worldmodel.messages import Tick

CHUNK_S = 1.0
"""12 media frames at 12 frames a second."""

TICK_S = CHUNK_S / 5


def last_shown(client: LoopClient, at: float) -> int:
    return max((index for index, shown_at in client.shown_at.items() if shown_at <= at), default=-1)


@pytest.mark.parametrize("lead_chunks", [0, 1, 3])
@pytest.mark.parametrize("pacing", ["playback", "clock"])
def test_the_lead_never_exceeds_lead_chunks(pacing: str, lead_chunks: int) -> None:
    async def main() -> None:
        worker = ContractWorker(tick_s=TICK_S, media_s=0.0)
        async with loop_serving(worker, session=SessionSection(lead_chunks=lead_chunks)) as server:
            client = await server.started(pacing=pacing, speed=1.0)
            ticks: list[tuple[float, int]] = []

            def note(tick: Tick) -> None:
                ticks.append((now(), tick.chunk_index))

            worker.on_tick = note
            await client.chunks(120)
            leads = [chunk_index - 1 - last_shown(client, at) for at, chunk_index in ticks]
            assert max(leads) <= lead_chunks
            assert max(leads[:20]) == lead_chunks, "the lead is used"

    run_virtual(main())


async def delay_of_an_event(client: LoopClient) -> float:
    """Send an event in the middle of a chunk and return how long it takes to be seen."""
    shown = client.shown
    await client.until(lambda: client.shown > shown)
    await asyncio.sleep(0.3 * CHUNK_S)
    event_id, sent_at = client.event(), now()
    await client.until(lambda: event_id in client.ledger.applied)
    _, chunk_index = client.ledger.applied[event_id]
    return client.shown_at[chunk_index] - sent_at


@pytest.mark.parametrize("pacing", ["playback", "clock"])
def test_an_event_is_seen_as_soon_after_ten_minutes_as_after_one(pacing: str) -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker(tick_s=TICK_S)) as server:
            client = await server.started(pacing=pacing, speed=1.0)
            started_at = now()
            await asyncio.sleep(started_at + 60.0 - now())
            early = await delay_of_an_event(client)
            await asyncio.sleep(started_at + 600.0 - now())
            late = await delay_of_an_event(client)
            assert late == pytest.approx(early, abs=0.02)
            assert late <= 3 * CHUNK_S, "two chunks are ahead at most, and the rest of the one on screen"

    run_virtual(main())


async def intervals(server: LoopServer, num_chunks: int) -> list[float]:
    client = await server.started(speed=1.0)
    await client.chunks(num_chunks)
    times = [client.shown_at[index] for index in range(1, num_chunks)]
    await client.leave()
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("pacing", "room"), [("playback", 10_000), ("free", 3)], ids=["reports late", "does not drain its socket"]
)
def test_a_reader_at_a_fifth_of_the_speed_leaves_the_others_alone(pacing: str, room: int) -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker(tick_s=TICK_S)) as server:
            alone = await intervals(server, 60)
        async with loop_serving(ContractWorker(tick_s=TICK_S)) as server:
            slow = await server.started(pacing=pacing, speed=0.2, room=room)
            beside = await intervals(server, 60)
            assert beside == pytest.approx(alone)
            assert beside == pytest.approx([CHUNK_S] * len(beside))
            assert 8 <= len(slow.headers) <= 16, "the slow one gets a fifth"
            assert [header.chunk_index for header in slow.headers] == list(range(len(slow.headers)))

    run_virtual(main())


LATENCY_S = 0.04
"""Time that the pixels of a chunk take from its commit to the socket. Long, so that many events fall into it."""


@pytest.mark.parametrize("lead_chunks", [0, 1, 3])
@pytest.mark.parametrize("tick_s", [TICK_S, 0.93 * CHUNK_S, 1.3 * CHUNK_S])
@pytest.mark.parametrize("pacing", ["playback", "clock"])
def test_an_event_acts_in_the_second_chunk_that_comes_after_it(pacing: str, tick_s: float, lead_chunks: int) -> None:
    """Whatever the moment: while a tick runs, while its pixels are on their way, while the server waits."""
    rng = random.Random(f"{pacing} {tick_s} {lead_chunks}")

    async def main() -> list[int]:
        worker = ContractWorker(tick_s=tick_s, media_s=LATENCY_S)
        async with loop_serving(worker, session=SessionSection(lead_chunks=lead_chunks)) as server:
            client = await server.started(pacing=pacing, speed=1.0)
            last_received: dict[int, int] = {}
            arrived = -1

            async def steer() -> None:
                while True:
                    await asyncio.sleep(rng.choice([0.1, 0.5, 1.0]) * rng.random() * CHUNK_S)
                    last_received[client.event()] = arrived

            put = client.socket.send_bytes

            async def receive(data: bytes) -> None:
                nonlocal arrived
                await put(data)
                arrived = unpack_chunk(data)[0].chunk_index

            client.socket.send_bytes = receive  # type: ignore[method-assign]
            steering = asyncio.create_task(steer())
            await client.chunks(200)
            steering.cancel()
            return [
                client.ledger.applied[event_id][1] - last
                for event_id, last in last_received.items()
                if event_id in client.ledger.applied
            ]

    distances = run_virtual(main())
    assert len(distances) > 200
    if lead_chunks <= 1:
        assert max(distances) == 2
    else:
        assert max(distances) <= lead_chunks + 1
