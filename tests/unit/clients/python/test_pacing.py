"""What the Python client reports as shown, and what happens while nobody takes chunks."""

from __future__ import annotations

from typing import Any

import pytest

from clients.python import (
    EventDropped,
)
from clients.python.buffer import MOST_OF_LIMIT
from tests.support.client_standin_server import FIRST_FRAMES, FPS, FRAMES, StandinServer
from tests.support.python_client import FakeTime, indices, take


async def test_playback_is_reported_at_media_rate(server: StandinServer, connect: Any, time: FakeTime) -> None:
    async with connect() as world:
        chunks = await take(world, 5)
        await server.until(lambda: len(server.sent("playback")) == 5)
    assert indices(chunks) == [(0, index) for index in range(5)]
    reports = server.sent("playback")
    assert [(report["epoch"], report["run"], report["chunk_index"]) for report in reports] == [
        (1, 0, index) for index in range(5)
    ]
    assert time.now_s - 100.0 == pytest.approx((FIRST_FRAMES + 3 * FRAMES) / FPS)
    assert all(report["buffered_ms"] >= 1000 * FRAMES / FPS - 1e-6 for report in reports)


async def test_without_reports_there_are_two_chunks_until_the_caller_reports(
    server: StandinServer, connect: Any
) -> None:
    async with connect(report_playback=False) as world:
        chunks = await take(world, 2)
        await world.hold("w")  # answered, so everything that was sent has arrived
        assert server.world.made == 2
        await world.report_shown(chunks[0], buffered_s=0.5)
        assert indices(await take(world, 1)) == [(0, 2)]
    assert [report["buffered_ms"] for report in server.sent("playback")] == [500.0]


def flow(server: StandinServer) -> list[str]:
    """What was said about pauses, in order."""
    return [message["type"] for _, message in server.received if message["type"].endswith("pause")]


async def test_a_client_that_falls_behind_pauses_the_world_and_reads_on(server: StandinServer, connect: Any) -> None:
    async with connect(pacing="free", max_buffered_chunks=4) as world:
        await server.until(lambda: server.world.paused)
        receipt = await world.hold("w")  # answered, so everything that was sent has arrived
        made = server.world.made
        assert made <= 4 * MOST_OF_LIMIT
        assert indices(await take(world, made - 3)) == [(0, index) for index in range(made - 3)]
        await world.hold("s")
        assert (flow(server), server.world.made) == (["session.pause"], made)
        assert indices(await take(world, 20)) == [(0, index) for index in range(made - 3, made + 17)]
        assert flow(server)[:2] == ["session.pause", "session.unpause"]
        assert (await receipt).chunk_index == made
        assert world.session.epoch == 1


async def test_a_pause_of_the_callers_outlives_that_of_a_full_buffer(server: StandinServer, connect: Any) -> None:
    async with connect(pacing="free", max_buffered_chunks=2) as world:
        await server.until(lambda: server.world.paused)
        await world.pause()
        made = server.world.made
        await take(world, made)
        await server.until(lambda: len(flow(server)) == 3)
        await world.hold("w")
        assert (flow(server), server.world.made) == (["session.pause"] * 3, made)
        await world.unpause()
        assert indices(await take(world, 1)) == [(0, made)]


async def test_who_ends_a_pause_with_a_full_buffer_goes_on_when_it_is_taken(
    server: StandinServer, connect: Any
) -> None:
    async with connect(pacing="free", max_buffered_chunks=2) as world:
        await server.until(lambda: server.world.paused)
        await world.pause()
        await world.unpause()
        await world.hold("w")
        assert flow(server) == ["session.pause"] * 2
        await take(world, server.world.made + 1)


async def test_an_unpause_that_is_lost_with_the_link_is_said_again(server: StandinServer, connect: Any) -> None:
    async with connect(pacing="free", max_buffered_chunks=2) as world:
        await server.until(lambda: server.world.paused)
        await world.hold("w")
        made = server.world.made
        server.behaviour.ignore = {"session.unpause"}
        await take(world, made)
        await server.until(lambda: flow(server) == ["session.pause", "session.unpause"])
        server.behaviour.ignore = set()
        await server.cut()
        assert indices(await take(world, 1)) == [(0, made)]


async def test_a_server_that_does_not_pause_is_read_no_further_but_for_answers(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 12
    server.behaviour.ignore = {"session.pause"}
    async with connect(pacing="free", max_buffered_chunks=1) as world:
        await server.until(lambda: server.world.made == 12)
        receipt = await world.hold("w")
        assert indices(await take(world, 12)) == [(0, index) for index in range(12)]
    with pytest.raises(EventDropped):
        await receipt.applied


def test_a_buffer_of_no_chunks_is_refused(connect: Any) -> None:
    with pytest.raises(ValueError, match=r"max_buffered_chunks: expected at least 1, got 0"):
        connect(max_buffered_chunks=0)
