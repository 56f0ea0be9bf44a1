"""A spectator against a scripted server: gaps, states, lost links, ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve

from clients.python import BadServerMessage, Refused, SessionLost, Spectator
from server.wire import messages as wire
from server.wire.binary import pack_chunk
from tests.support.python_client import FakeTime

Script = Callable[[ServerConnection], Awaitable[None]]

WATCHING = wire.SessionWatching(
    session_id="s-1",
    state=wire.SessionState.ACTIVE,
    run=0,
    start_image="day",
    model="standin",
    width=64,
    height=48,
    fps=12,
    latent_frames_per_chunk=1,
    mime="video/mp4",
    format=wire.StreamFormat.FMP4,
)


class Scripted:
    """A server that plays one script for each link, in turn, and keeps what it was told first."""

    def __init__(self, *scripts: Script) -> None:
        self.url = ""
        self.told: list[dict[str, object]] = []
        self._scripts = iter(scripts)

    async def handle(self, connection: ServerConnection) -> None:
        self.told.append(json.loads(await connection.recv()))
        await next(self._scripts)(connection)


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[Scripted]:
    server = Scripted(*scripts)
    async with serve(server.handle, "127.0.0.1", 0, compression=None) as listening:
        server.url = f"ws://127.0.0.1:{next(iter(listening.sockets)).getsockname()[1]}"
        yield server


async def say(connection: ServerConnection, *messages: wire.ServerMessage) -> None:
    for message in messages:
        await connection.send(message.model_dump_json())


async def show(connection: ServerConnection, *indices: int) -> None:
    """Send an init segment and chunks."""
    fields = {"session_id": "s-1", "epoch": 0, "run": 0, "timescale": 12000}
    await connection.send(pack_chunk(wire.ChunkHeader(kind="init", **fields), b"init"))
    for index in indices:
        header = wire.ChunkHeader(kind="media", chunk_index=index, num_frames=12, **fields)
        await connection.send(pack_chunk(header, b"media"))


async def whole_story(connection: ServerConnection) -> None:
    await say(connection, WATCHING)
    await show(connection, 4, 5, 8)
    paused = wire.SessionStateMessage(session_id="s-1", state=wire.SessionState.PAUSED, epoch=0, run=0)
    await say(connection, paused)
    await show(connection, 9)
    await say(connection, wire.SessionClosedMessage(session_id="s-1", reason="client"))


async def test_chunks_come_with_gaps_until_the_session_is_closed() -> None:
    async with scripted(whole_story) as server, Spectator(server.url, watch_token="w-1") as spectator:
        chunks = [chunk async for chunk in spectator.chunks()]
        assert await spectator.next_chunk() is None
        assert spectator.state is wire.SessionState.CLOSED
        assert spectator.session == WATCHING
    assert [chunk.chunk_index for chunk in chunks] == [4, 5, 8, 9]
    assert {(chunk.init, chunk.payload, chunk.fps) for chunk in chunks} == {(b"init", b"media", 12)}
    assert server.told == [{"type": "session.watch", "protocol": 1, "watch_token": "w-1"}]


async def of_a_later_server(connection: ServerConnection) -> None:
    """Say types and fields that protocol 1 does not have yet, before the answer and behind it."""
    later = {"later": {"a": 1}}
    header = {"type": "chunk", "kind": "media", "session_id": "s-1", "epoch": 0, "run": 0, "chunk_index": 3}
    text = json.dumps({**header, "timescale": 12000, "num_frames": 12, **later}).encode()
    await connection.send(json.dumps({"type": "session.greeting", **later}))
    await connection.send(json.dumps({**WATCHING.model_dump(), **later}))
    await connection.send(json.dumps({"type": "session.weather", "sky": "blue"}))
    await connection.send(len(text).to_bytes(4, "big") + text + b"media")
    await connection.send(json.dumps({"type": "session.closed", "session_id": "s-1", "reason": "sleepy", **later}))


async def test_types_and_fields_that_later_servers_add_are_passed_over() -> None:
    async with scripted(of_a_later_server) as server, Spectator(server.url, watch_token="w") as spectator:
        assert [(chunk.chunk_index, chunk.payload) async for chunk in spectator.chunks()] == [(3, b"media")]
        assert spectator.session == WATCHING
        assert spectator.state is wire.SessionState.CLOSED


async def test_the_state_is_that_of_the_story_so_far() -> None:
    async with scripted(whole_story) as server, Spectator(server.url, session_id="s-1") as spectator:
        seen = [(chunk.chunk_index, spectator.state) async for chunk in spectator.chunks()]
    active, paused = wire.SessionState.ACTIVE, wire.SessionState.PAUSED
    assert seen == [(4, active), (5, active), (8, active), (9, paused)]
    assert server.told == [{"type": "session.watch", "protocol": 1, "session_id": "s-1"}]


NO_STATUS = 1005


def ending_with(code: int) -> Script:
    async def script(connection: ServerConnection) -> None:
        await say(connection, WATCHING)
        await show(connection, 0)
        if code == NO_STATUS:
            connection.protocol.send_close()
            connection.transport.write(b"".join(connection.protocol.data_to_send()))
        else:
            await connection.close(code)

    return script


lost_link = ending_with(1001)


@pytest.mark.parametrize("code", [1001, NO_STATUS, 1013])
async def test_a_lost_link_is_joined_again(code: int) -> None:
    time = FakeTime()
    async with (
        scripted(ending_with(code), whole_story) as server,
        Spectator(server.url, watch_token="w", clock=time.clock, sleep=time.sleep) as spectator,
    ):
        assert [chunk.chunk_index async for chunk in spectator.chunks()] == [0, 4, 5, 8, 9]
    assert time.slept_s == [0.25]
    assert len(server.told) == 2


async def refuse(connection: ServerConnection) -> None:
    await say(connection, wire.ErrorMessage(code="bad_watch_token", message="no session has it"))


async def test_a_session_that_is_gone_is_refused() -> None:
    time = FakeTime()
    async with scripted(lost_link, refuse, refuse) as server:
        async with Spectator(server.url, watch_token="w", sleep=time.sleep) as spectator:
            await spectator.next_chunk()
            with pytest.raises(Refused, match="bad_watch_token"):
                await spectator.next_chunk()
        with pytest.raises(Refused, match="bad_watch_token"):
            async with Spectator(server.url, watch_token="w"):
                pass


async def policy(connection: ServerConnection) -> None:
    await say(connection, WATCHING)
    await say(connection, wire.ErrorMessage(code="unauthorized", message="the token is not known", fatal=True))
    await connection.close(1008)


async def test_what_cannot_be_joined_again_is_lost_with_its_reason() -> None:
    async with scripted(policy) as server, Spectator(server.url, watch_token="w") as spectator:
        with pytest.raises(SessionLost, match="the token is not known") as caught:
            await spectator.next_chunk()
    assert caught.value.close_code == 1008


async def steered(connection: ServerConnection) -> None:
    await say(connection, WATCHING, wire.EventQueued(event_id=1))


async def other_answer(connection: ServerConnection) -> None:
    await say(connection, wire.Pong(t=1.0))


async def test_messages_for_owners_break_the_protocol() -> None:
    async with scripted(steered, other_answer) as server:
        async with Spectator(server.url, watch_token="w") as spectator:
            with pytest.raises(BadServerMessage, match=r"event\.queued to a spectator"):
                await spectator.next_chunk()
        with pytest.raises(BadServerMessage, match="expected session"):
            async with Spectator(server.url, watch_token="w"):
                pass


@pytest.mark.parametrize("names", [{}, {"watch_token": "w", "session_id": "s"}])
def test_a_session_is_named_in_one_way(names: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="exactly one of watch_token and session_id"):
        Spectator("ws://h", **names)
