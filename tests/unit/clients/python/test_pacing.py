"""What the Python client reports as shown, and what happens while nobody takes chunks."""

from __future__ import annotations

from typing import Any

import pytest

from clients.python import (
    EventDropped,
)
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


async def test_a_client_that_takes_nothing_stops_the_reader_but_not_the_answers(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 12
    async with connect(pacing="free", max_buffered_chunks=2) as world:
        await server.until(lambda: server.world.made == 12)
        receipt = await world.hold("w")
        assert indices(await take(world, 12)) == [(0, index) for index in range(12)]
    with pytest.raises(EventDropped):
        await receipt.applied
