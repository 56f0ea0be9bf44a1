"""Lost links, resumes, failures and ends, as the Python client tells them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from clients.python import (
    BadServerMessage,
    EventDropped,
    LinkLost,
    Refused,
    SessionFailed,
    SessionLost,
)
from clients.python.link import Link, LinkClosed, LinkSettings
from clients.python.session import RESUMABLE_CLOSE_CODES
from clients.python.world import RESUME_DELAYS_S
from server.config import SessionSection
from server.wire.messages import ErrorMessage, SessionState, SessionStateMessage
from tests.support.client_standin_server import FIRST_FRAMES, FRAMES, StandinServer
from tests.support.python_client import FakeTime, indices, take


async def test_a_lost_link_is_resumed_without_a_gap(server: StandinServer, connect: Any, time: FakeTime) -> None:
    server.behaviour.cut_before_chunks = {3}
    async with connect() as world:
        chunks = await take(world, 6)
        assert world.session.epoch == 2
        assert [chunk.frames().shape[0] for chunk in chunks] == [FIRST_FRAMES] + [FRAMES] * 5
    assert indices(chunks) == [(0, index) for index in range(6)]
    assert server.sent("session.start")[1] == {
        "type": "session.start",
        "protocol": 1,
        "resume_token": "token-0",
        "last_chunk_index": 2,
        "run": 0,
    }
    assert time.slept_s.count(0.25) == 1
    assert chunks[3].header.epoch == 2


def test_every_close_code_that_the_protocol_calls_resumable_is_resumed() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/protocol.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"^Resume after close codes (.*?)\. The other codes", page, re.MULTILINE | re.DOTALL)
    named = {int(code) for code in re.findall(r"\b1\d\d\d\b", sentence)}
    assert named == RESUMABLE_CLOSE_CODES - {1005}, "1005: a close frame without a code"


async def test_a_link_that_dies_without_a_word_is_noticed_while_the_session_is_kept(server: StandinServer) -> None:
    link = await Link.open(LinkSettings(url=server.url, ping_s=0.02, close_s=0.02))
    await server.fall_silent()
    assert await link.receive() == LinkClosed(code=1006, reason="")
    # The stand-in, which reads nothing, would wait long for the end.
    await server.cut()
    defaults = LinkSettings(url=server.url)
    assert 2 * defaults.ping_s + defaults.close_s + RESUME_DELAYS_S[0] < SessionSection().resume_s


async def test_an_event_lost_with_the_link_is_sent_again_under_its_id(server: StandinServer, connect: Any) -> None:
    server.behaviour.swallow_events = 1
    async with connect() as world:
        receipt = await world.hold("w")
        await take(world, 4)
        assert (await receipt.applied).event_id == 0
    assert [event["event_id"] for event in server.sent("session.event")] == [0, 0]


async def test_an_event_that_had_arrived_before_the_link_broke_counts_as_queued(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 0
    server.behaviour.swallow_events = 1
    async with connect() as world:
        await server.until(lambda: bool(server.worlds))
        server.world.accepted.add(0)
        receipt = await world.hold("w")
        assert not receipt.applied.done()


async def test_a_request_under_way_fails_with_the_link(server: StandinServer, connect: Any) -> None:
    server.behaviour.ignore = {"session.reset"}
    async with connect() as world:
        reset = asyncio.create_task(world.reset())
        await server.until(lambda: bool(server.sent("session.reset")))
        await server.cut()
        with pytest.raises(LinkLost, match="before the answer"):
            await reset
        assert len(await take(world, 3)) == 3


@pytest.mark.parametrize(
    ("code", "text"), [(1008, "the session is over"), (1012, "the session is over"), (None, "in 0 tries")]
)
async def test_ends_that_cannot_be_resumed_raise_session_lost(
    server: StandinServer, connect: Any, code: int | None, text: str
) -> None:
    server.behaviour.max_chunks = 2
    async with connect(resume_delays_s=()) as world:
        await take(world, 2)
        receipt = await world.hold("w")
        await server.cut(code)
        with pytest.raises(SessionLost, match=text) as caught:
            await take(world, 100)
        assert caught.value.close_code == (code or 1006)
        with pytest.raises(EventDropped, match="the session was lost"):
            await receipt.applied
        with pytest.raises(SessionLost):
            await world.hold("w")


@pytest.mark.parametrize(
    ("code", "message"), [("resume_gap", "chunk 3 is gone"), ("session_lost", "the world is gone")]
)
async def test_a_refused_resume_raises_session_lost(
    server: StandinServer, connect: Any, code: str, message: str
) -> None:
    server.behaviour.refuse_resume = ErrorMessage(code=code, message=message)
    server.behaviour.cut_before_chunks = {3}
    async with connect() as world:
        with pytest.raises(SessionLost, match=f"{code}: {message}"):
            await take(world, 5)


async def test_chunks_that_the_server_no_longer_keeps_are_missing_and_the_world_goes_on(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.cut_before_chunks = {3}
    server.behaviour.lose_chunks = 2
    async with connect(pacing="free") as world:
        assert [chunk.chunk_index for chunk in await take(world, 6)] == [0, 1, 2, 5, 6, 7]
        server.behaviour.skip_chunk = server.world.made
        with pytest.raises(BadServerMessage, match="expected chunk"):
            await take(world, 100)


async def test_a_dead_worker_ends_the_session_without_a_resume_and_says_why(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 2
    async with connect() as world:
        await take(world, 2)
        await server.fail("worker_unavailable")
        await server.say(ErrorMessage(code="worker_unavailable", message="the worker was killed", fatal=True))
        await server.cut(1012)
        with pytest.raises(SessionFailed):
            await take(world, 1)
        with pytest.raises(SessionLost, match="the session is over: the worker was killed") as caught:
            await take(world, 1)
        assert caught.value.close_code == 1012
    assert [message for message in server.sent("session.start") if "resume_token" in message] == []


async def test_a_failed_session_raises_after_its_chunks_and_can_be_reset(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        await server.until(lambda: server.world.made == 2)
        await server.fail("chunk 2 could not be made")
        with pytest.raises(SessionFailed, match="chunk 2 could not be made"):
            await take(world, 3)
        await world.reset()
        assert indices(await take(world, 2)) == [(1, 0), (1, 1)]


async def test_a_failure_that_is_told_twice_is_raised_once(server: StandinServer, connect: Any) -> None:
    server.behaviour.ignore = {"session.pause", "session.reset"}
    async with connect() as world:
        await server.until(lambda: server.world.made == 2)
        await server.fail("chunk 2 could not be made")
        with pytest.raises(SessionFailed):
            await take(world, 3)
        pause = asyncio.create_task(world.pause())
        await server.until(lambda: bool(server.sent("session.pause")))
        reset = asyncio.create_task(world.reset())
        await server.until(lambda: bool(server.sent("session.reset")))
        await server.fail("chunk 2 could not be made")
        with pytest.raises(SessionFailed):
            await pause
        assert not reset.done()
        active = SessionStateMessage(session_id="s-1", state=SessionState.ACTIVE, epoch=1, run=1)
        await server.say(active)
        await reset
        with pytest.raises(TimeoutError):
            await world.next_chunk(timeout_s=0)


async def test_a_refused_request_is_a_typed_error(server: StandinServer, connect: Any) -> None:
    server.behaviour.ignore = {"session.pause"}
    async with connect() as world:
        pause = asyncio.create_task(world.pause())
        await server.until(lambda: bool(server.sent("session.pause")))
        await server.say(ErrorMessage(code="bad_state", message="not now"))
        with pytest.raises(Refused, match="bad_state: not now"):
            await pause


async def test_a_missing_chunk_is_a_broken_protocol(server: StandinServer, connect: Any) -> None:
    server.behaviour.skip_chunk = 1
    async with connect(pacing="free") as world:
        with pytest.raises(BadServerMessage, match="expected chunk 1 of run 0, got chunk 2 of run 0"):
            await take(world, 5)


async def test_chunks_end_when_the_session_is_closed(connect: Any) -> None:
    async with connect() as world:
        await take(world, 2)
        await world.close()
        assert len([chunk async for chunk in world.chunks()]) <= 3
        await world.close()
