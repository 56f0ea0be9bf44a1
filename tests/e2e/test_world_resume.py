"""The `world` dialect over real sockets: sockets that are lost, parked sessions, and those who come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.config import SessionSection
from server.session import Phase
from tests.support.server_scripted import Server, decode, serving
from worldmodel.errors import TickRolledBack


async def test_resume_sends_what_was_missed_in_a_new_epoch(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    for _ in range(3):
        await socket.media()
    socket.viewer = False
    while socket.chunks[-1].header.chunk_index != 4:
        await socket.media()
    await socket.drop()
    again = await server.connect()
    resumed = await again.resume(started["resume_token"], 2)
    assert (resumed["session_id"], resumed["epoch"], resumed["run"]) == (started["session_id"], 2, 0)
    num_frames = 0
    for index in (3, 4, 5):
        header = (await again.media()).header
        assert (header.epoch, header.chunk_index, header.pts) == (2, index, num_frames * 1000)
        num_frames += header.num_frames
    assert again.chunks[0].header.kind == "init"
    assert decode(again.chunks) == num_frames
    assert server.session(started).num_resets == 0


async def test_resume_says_so_when_chunks_are_no_longer_kept(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    for _ in range(6):
        await socket.media()
    await socket.drop()
    again = await server.connect()
    await again.resume(started["resume_token"], -1)
    await again.error(code="resume_gap")
    assert ((await again.media()).header.chunk_index or 0) > 0


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"resume_token": "wrong"}, "bad_resume_token", "resume_token"),
        ({"last_chunk_index": 99}, "bad_message", "last_chunk_index"),
        ({"run": 5}, "bad_message", "run"),
        ({"protocol": 9}, "bad_protocol", "protocol"),
    ],
)
async def test_a_bad_resume_is_refused_and_takes_nothing_over(
    server: Server, fields: dict[str, Any], code: str, field: str
) -> None:
    socket = await server.connect()
    started = await socket.start()
    other = await server.connect()
    resume = {"protocol": 1, "resume_token": started["resume_token"], "last_chunk_index": -1}
    await other.send("session.start", **{**resume, **fields})
    assert (await other.error(code=code))["field"] == field
    await socket.media()


async def test_a_second_socket_takes_over(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.media()
    other = await server.connect()
    await other.resume(started["resume_token"], 0)
    assert await socket.closed() == 1008
    assert socket.messages[-1]["code"] == "taken_over"
    assert all(chunk.header.epoch == 1 for chunk in socket.chunks)
    for _ in range(3):
        assert (await other.media()).header.epoch == 2


async def test_parked_sessions_do_not_tick_and_expire() -> None:
    async with serving(session=SessionSection(resume_s=5.0)) as server:
        socket = await server.connect()
        started = await socket.start(pacing="free")
        await socket.media()
        await socket.drop()
        await server.until_parked(started["session_id"])
        await server.until(lambda: server.worker.num_ticks_in_flight == 0)
        num_ticks = len(server.session(started).ticks)
        server.clock.now += 4.9
        server.context.table.expire(server.clock.now)
        await asyncio.sleep(0.02)
        assert len(server.session(started).ticks) == num_ticks
        server.clock.now += 0.1
        server.context.table.expire(server.clock.now)
        await server.until(lambda: not server.worker.sessions)
        again = await server.connect()
        await again.send("session.start", protocol=1, resume_token=started["resume_token"], last_chunk_index=0)
        await again.error(code="bad_resume_token")


async def test_a_parked_session_that_is_being_reset_expires_afterwards(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.drop()
    await server.until_parked(started["session_id"])
    table = server.context.table
    server.worker.hold()
    reset = table.find(started["session_id"], None).begin_reset(prompt="", seed=None, image=None)
    server.clock.now += 100.0
    assert table.expire(server.clock.now) is not None
    assert table.find(started["session_id"], None)
    server.worker.release()
    await reset
    table.expire(server.clock.now)
    await server.until(lambda: not server.worker.sessions)


@pytest.mark.parametrize(
    ("section", "reason"),
    [(SessionSection(idle_s=3.0), "idle"), (SessionSection(max_session_s=3.0), "lifetime")],
)
async def test_idle_and_old_sessions_are_closed(section: SessionSection, reason: str) -> None:
    async with serving(session=section) as server:
        socket = await server.connect()
        actor = server.context.table.find((await socket.start())["session_id"], None)
        server.clock.now += 3.0
        server.context.table.expire(server.clock.now)
        assert actor.session.phase is Phase.CLOSING
        assert (await socket.expect("session.closed"))["reason"] == reason
        assert await socket.closed() == 1000


async def test_without_resume_a_lost_socket_closes_the_session() -> None:
    async with serving(session=SessionSection(resume_s=0.0)) as server:
        socket = await server.connect()
        await socket.start()
        await socket.drop()
        await server.until(lambda: not server.worker.sessions)


async def test_answers_to_events_wait_for_the_next_socket(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.media()
    server.worker.hold()
    server.worker.tick_failures.append(TickRolledBack("out of luck"))
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued")
    # Without a socket no tick begins, and there would be none to fail.
    await server.until(lambda: server.worker.num_ticks_in_flight == 1)
    await socket.drop()
    await server.until_parked(started["session_id"])
    server.worker.release()
    table = server.context.table
    await server.until(lambda: table.find(started["session_id"], None).session.state == "failed")
    again = await server.connect()
    await again.resume(started["resume_token"], 0)
    await again.expect("session.state", state="failed")
    assert (await again.expect("event.dropped"))["event_id"] == 1
