"""What clients see when the server stops: their events answered, a reason, and close code 1012."""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.exceptions import ConnectionClosed

from server.serving import GOODBYE_POLL_S
from tests.support.server_client import NARROW_BYTES, WorldSocket, image_field, narrow_socket
from tests.support.server_scripted import UNHURRIED, Server, serving
from tests.support.server_worker import ScriptedWorker, model_info


async def send_events(socket: WorldSocket, *, first: int) -> None:
    """Send events without a pause until the socket is closed."""
    event_id = first
    try:
        while True:
            await socket.send("session.event", event_id=event_id, prompt="x" * 1000)
            event_id += 1
            await asyncio.sleep(0)
    except ConnectionClosed:
        return


def assert_told(socket: WorldSocket, close_code: int, started: dict[str, Any]) -> None:
    assert close_code == 1012
    assert socket.messages[-1] == {
        "type": "session.closed",
        "session_id": started["session_id"],
        "reason": "shutting_down",
    }
    error = socket.messages[-2]
    assert (error["code"], error["fatal"], error["retryable"]) == ("shutting_down", True, True)


def assert_all_answered(socket: WorldSocket) -> None:
    queued = [message["event_id"] for message in socket.messages if message["type"] == "event.queued"]
    dropped = [message["event_id"] for message in socket.messages if message["type"] == "event.dropped"]
    applied = [applied.event_id for chunk in socket.chunks for applied in chunk.header.applied]
    assert sorted(dropped + applied) == sorted(queued)


async def stop(server: Server) -> None:
    """Leave the sockets to the server."""
    server.stack.pop_all()


async def test_every_session_is_told_before_its_socket_is_closed() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=3)), server=UNHURRIED) as server:
        sockets = [await server.connect() for _ in range(3)]
        started = [await socket.start() for socket in sockets]
        await server.pause(sockets[0])
        for event_id in (4, 7):
            await sockets[0].send("session.event", event_id=event_id, prompt="x")
            await sockets[0].expect("event.queued", event_id=event_id)
        listening = [asyncio.create_task(socket.closed()) for socket in sockets]
        await stop(server)
    for socket, code, its_start in zip(sockets, await asyncio.gather(*listening), started, strict=True):
        assert_told(socket, code, its_start)
        assert_all_answered(socket)


async def test_the_events_of_the_chunk_under_way_are_answered() -> None:
    async with serving(server=UNHURRIED) as server:
        socket = await server.connect()
        started = await socket.start(pacing="free")
        await server.pause(socket)
        await socket.send("session.event", event_id=4, prompt="x")
        await socket.expect("event.queued", event_id=4)
        server.worker.hold()
        await socket.send("session.unpause")
        (actor,) = server.context.table.all()
        await server.until(lambda: actor.session.in_flight is not None and actor.session.in_flight.event_ids == (4,))
        listening = asyncio.create_task(socket.closed())
        await stop(server)
    assert_told(socket, await listening, started)
    assert [message["reason"] for message in socket.messages if message["type"] == "event.dropped"] == ["closed"]


async def test_a_client_that_is_sending_gets_the_reason_too() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=3)), server=UNHURRIED) as server:
        sockets = [await server.connect() for _ in range(3)]
        started = [await socket.start(pacing="free") for socket in sockets]
        senders = [asyncio.create_task(send_events(socket, first=0)) for socket in sockets]
        for socket in sockets:
            await socket.expect("event.queued", event_id=3)
        listening = [asyncio.create_task(socket.closed()) for socket in sockets]
        await stop(server)
    await asyncio.gather(*senders)
    for socket, code, its_start in zip(sockets, await asyncio.gather(*listening), started, strict=True):
        assert_told(socket, code, its_start)


async def test_a_client_that_is_slow_to_read_gets_the_reason_too() -> None:
    """What it has not read of a chunk, of which not even one fits into what the system buffers, is in the way of it."""
    worker = ScriptedWorker(model_info(width=96, height=96))
    async with serving(worker, send_buffer_bytes=NARROW_BYTES, server=UNHURRIED) as server:
        socket = await server.connect(max_queue=1, sock=narrow_socket(server.url))
        started = await socket.start(format="rgb24", pacing="free")
        await socket.media()
        transport = socket.connection.transport
        transport.pause_reading()
        num_ticks = len(server.session(started).ticks)
        await server.until(lambda: len(server.session(started).ticks) > num_ticks)

        async def read_once_told() -> int:
            await server.until(lambda: server.context.table.is_stopping)
            # Longer than the writers are given to send what is on its way to who reads.
            await asyncio.sleep(5 * GOODBYE_POLL_S)
            transport.resume_reading()
            return await socket.closed()

        listening = asyncio.create_task(read_once_told())
        await stop(server)
    assert_told(socket, await listening, started)


async def test_who_waits_for_a_place_and_who_has_not_begun_is_sent_away() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1)), server=UNHURRIED) as server:
        first, waiting, silent = [await server.connect() for _ in range(3)]
        await first.start()
        await waiting.send("session.start", protocol=1, prompt="", image=image_field())
        await waiting.expect("session.queued")
        await stop(server)
    assert await waiting.closed() == 1012
    assert waiting.messages[-1]["code"] == "shutting_down"
    assert [await silent.closed(), await first.closed()] == [1012, 1012]


async def test_nothing_is_started_once_the_server_stops() -> None:
    async with serving() as server:
        socket, late, resuming = [await server.connect() for _ in range(3)]
        started = await socket.start()
        await socket.drop()
        await server.until_parked(started["session_id"])
        server.context.table.say_goodbye()
        await late.send("session.start", protocol=1, prompt="", image=image_field())
        assert (await late.error())["code"] == "shutting_down"
        await resuming.send("session.start", protocol=1, resume_token=started["resume_token"], last_chunk_index=-1)
        assert (await resuming.error())["code"] == "shutting_down"
        assert [await late.closed(), await resuming.closed()] == [1012, 1012]


async def test_a_session_that_was_being_opened_is_not_begun() -> None:
    async with serving() as server:
        server.worker.hold()
        socket = await server.connect()
        await socket.send("session.start", protocol=1, prompt="", image=image_field())
        await server.until(lambda: server.context.table.num_resident == 1)
        server.context.table.say_goodbye()
        server.worker.release()
        assert (await socket.error())["code"] == "shutting_down"
        assert await socket.closed() == 1012
        assert server.context.table.num_resident == 0
