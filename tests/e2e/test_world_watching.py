"""Spectators over real sockets, with a scripted worker."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx

from server.config import ServerSection, SessionSection, StartImageConfig
from tests.support.server_client import ANSWER_TIMEOUT_S, Chunk, WorldSocket, fake_config, image_field
from tests.support.server_scripted import KEYS, Server, decode, serving
from tests.support.server_worker import ScriptedWorker, model_info


async def watching(server: Server, started: dict[str, Any], **options: Any) -> WorldSocket:
    """Join the session that `started` tells of."""
    spectator = await server.connect(viewer=False, **options)
    await spectator.send("session.watch", protocol=1, watch_token=started["watch_token"])
    await spectator.expect("session.watching", session_id=started["session_id"])
    return spectator


async def create(server: Server, **fields: Any) -> dict[str, Any]:
    """Create a session without a socket, which makes no chunk yet."""
    body = {"prompt": "a town", "image": image_field(), **fields}
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S) as http:
        created: dict[str, Any] = (await http.post(f"{server.url}v1/sessions", json=body)).json()
    return created


def last_index(socket: WorldSocket) -> int:
    """Return the last chunk received; -1 for none."""
    index = socket.chunks[-1].header.chunk_index if socket.chunks else None
    return -1 if index is None else index


def skipped_chunks(server: Server) -> int:
    text = server.context.metrics.render().decode()
    found = re.search(r"^worldserve_watch_skipped_chunks_total (\S+)$", text, re.MULTILINE)
    assert found
    return int(float(found[1]))


async def test_a_spectator_joins_at_the_next_chunk_and_its_stream_plays(server: Server) -> None:
    owner = await server.connect()
    started = await owner.start()
    await owner.media()
    await server.pause(owner)
    made = server.context.table.find(started["session_id"], None).session.next_chunk_index - 1
    while last_index(owner) < made:
        await owner.receive()
    spectator = await server.connect(viewer=False)
    await spectator.send("session.watch", protocol=1, watch_token=started["watch_token"])
    joined = await spectator.expect("session.watching")
    shared = ("protocol", "model", "width", "height", "fps", "latent_frames_per_chunk", "mime", "format", "run")
    assert {name: joined[name] for name in shared} == {name: started[name] for name in shared}
    assert joined["state"] == "paused"
    assert not {"resume_token", "watch_token", "prompt", "seed"} & joined.keys()
    # From here on the owner has seen a chunk when the spectator has it, so that no more wait for that one than may.
    owner.viewer = False
    await owner.send("session.unpause")
    await spectator.expect("session.state", state="active", epoch=0)
    while len(spectator.chunks) < 3:
        shown = (await owner.media()).header
        while last_index(spectator) < (shown.chunk_index or 0):
            await spectator.receive()
        await owner.report(shown)
    stream = spectator.chunks[:3]
    assert [chunk.header.kind for chunk in stream] == ["init", "media", "media"]
    _, first, second = stream
    assert [first.header.chunk_index, second.header.chunk_index] == [made + 1, made + 2]
    assert {chunk.header.epoch for chunk in stream} == {0}
    assert (first.header.pts, second.header.pts) == (0, 12_000)
    assert decode(stream) == 24


async def test_owner_and_spectators_are_told_the_start_image_of_each_run() -> None:
    offered = tuple(StartImageConfig(name=name, file="examples/day.png", prompt="a town") for name in ("day", "night"))
    async with serving(model=replace(fake_config().model, start_images=offered)) as server:
        owner = await server.connect()
        started = await owner.start(image={"name": "day"})
        assert started["start_image"] == "day"
        spectator = await server.connect(viewer=False)
        await spectator.send("session.watch", protocol=1, watch_token=started["watch_token"])
        await spectator.expect("session.watching", start_image="day")
        for run, (wish, told) in enumerate([({"image": {"name": "night"}}, "night"), ({}, "night")], start=1):
            await owner.send("session.reset", **wish)
            await spectator.expect("session.state", state="active", run=run, start_image=told)
        await owner.send("session.reset", image=image_field())
        await spectator.expect("session.state", state="resetting", run=2, start_image="night")
        await spectator.expect("session.state", state="active", run=3, start_image=None)


async def test_spectators_see_through_reset_take_over_and_the_end(server: Server) -> None:
    owner = await server.connect()
    started = await owner.start()
    spectator = await watching(server, started)
    await owner.media()
    await owner.send("session.reset", prompt="night")
    await spectator.expect("session.state", state="resetting")
    await spectator.expect("session.state", state="active", run=1, epoch=0)
    while (await spectator.media()).header.run == 0:
        pass
    await owner.drop()
    await spectator.expect("session.state", state="parked")
    again = await server.connect()
    resumed = await again.resume(started["resume_token"], -1)
    assert resumed["watch_token"] == started["watch_token"]
    await spectator.expect("session.state", state="active")
    for _ in range(3):
        await again.media()
    await spectator.media()
    media = [chunk for chunk in spectator.chunks if chunk.header.kind == "media"]
    assert [chunk.header.kind for chunk in spectator.chunks].count("init") == 1
    pts = 0
    for chunk in media:
        assert chunk.header.pts == pts
        pts += chunk.header.num_frames * 1000
    assert decode(spectator.chunks) * 1000 == pts
    await again.send("session.close")
    await spectator.expect("session.closed", reason="client")
    assert await spectator.closed() == 1000


async def test_a_spectator_can_change_nothing(server: Server) -> None:
    owner = await server.connect(viewer=False)
    started = await owner.start()
    spectator = await watching(server, started)
    await spectator.send("session.event", event_id=3, prompt="night", controls=[KEYS])
    await spectator.error(code="read_only", event_id=3, fatal=False)
    for type, fields in (
        ("session.reset", {}),
        ("session.pause", {}),
        ("session.unpause", {}),
        ("playback", {"epoch": 1, "run": 0, "chunk_index": 0, "buffered_ms": 0}),
        ("session.start", {"protocol": 1, "resume_token": started["resume_token"], "last_chunk_index": -1}),
        ("session.watch", {"protocol": 1, "watch_token": started["watch_token"]}),
    ):
        await spectator.send(type, **fields)
        await spectator.error(code="read_only", fatal=False)
    await spectator.send("ping", t=4)
    await spectator.expect("pong", t=4.0)
    session = server.context.table.find(started["session_id"], None).session
    assert (session.run, session.state, session.pending_event_ids, session.epoch) == (0, "active", (), 1)
    await spectator.send("session.close")
    assert await spectator.closed() == 1000
    await server.until(lambda: server.context.table.find(started["session_id"], None).num_watchers == 0)
    await owner.report((await owner.media()).header)
    await owner.media()


async def test_a_stalled_spectator_costs_the_owner_nothing() -> None:
    """It reads nothing until no buffer takes any more; it then finds whole chunks missing, and a whole stream."""
    worker = ScriptedWorker(model_info(width=128, height=128))
    async with serving(worker) as server:
        # Watched before it begins, so that all its chunks are meant for the spectator too.
        created = await create(server, format="rgb24", pacing="free")
        spectator = await watching(server, created, max_queue=1)
        owner = await server.connect(viewer=False)
        await owner.resume(created["resume_token"], -1)
        num_chunks = 0
        while skipped_chunks(server) < 5:
            assert (await owner.media()).header.chunk_index == num_chunks
            num_chunks += 1
        await server.pause(owner)
        actor = server.context.table.find(created["session_id"], None)
        last = actor.session.next_chunk_index - 1
        for socket in (owner, spectator):
            while last_index(socket) < last:
                await socket.receive()
        media = [chunk.header for chunk in spectator.chunks if chunk.header.kind == "media"]
        indices = [header.chunk_index for header in media if header.chunk_index is not None]
        assert indices == sorted(set(indices))
        assert len(indices) == last + 1 - skipped_chunks(server)
        assert [header.pts for header in media[1:]] == [header.pts + header.num_frames * 1000 for header in media[:-1]]
        # Its library no longer reads, and would wait ten seconds for the answer to a close.
        await spectator.drop()


async def test_the_token_of_a_session_is_needed() -> None:
    async with serving(server=ServerSection(tokens=("owner-secret", "other-secret"))) as server:
        mine = {"additional_headers": {"Authorization": "Bearer owner-secret"}}
        theirs = {"additional_headers": {"Authorization": "Bearer other-secret"}}
        owner = await server.connect(**mine)
        started = await owner.start()
        stranger = await server.connect(viewer=False, **theirs)
        await stranger.send("session.watch", protocol=1, session_id=started["session_id"])
        await stranger.error(code="not_found", field="session_id")
        await stranger.send("session.watch", protocol=1, watch_token=started["resume_token"])
        await stranger.error(code="bad_watch_token", field="watch_token")
        await stranger.send("session.watch", protocol=1, watch_token=started["watch_token"])
        await stranger.expect("session.watching")
        second = await server.connect(viewer=False, **mine)
        await second.send("session.watch", protocol=1, session_id=started["session_id"])
        await second.expect("session.watching")
        unknown = await server.connect(viewer=False)
        assert await unknown.closed() == 1008


async def test_wrong_requests_leave_the_socket_free(server: Server) -> None:
    owner = await server.connect()
    started = await owner.start()
    socket = await server.connect()
    both = {"watch_token": started["watch_token"], "session_id": started["session_id"]}
    for fields, code in (
        ({"protocol": 1}, "bad_message"),
        ({"protocol": 1, **both}, "bad_message"),
        ({"protocol": 2, "watch_token": started["watch_token"]}, "bad_protocol"),
        ({"watch_token": started["watch_token"]}, "bad_message"),
        ({"protocol": 1, "watch_token": "nobody"}, "bad_watch_token"),
    ):
        await socket.send("session.watch", **fields)
        await socket.error(code=code)
    await socket.start()
    await socket.send("session.watch", protocol=1, watch_token=started["watch_token"])
    await socket.error(code="already_started")


async def test_a_session_has_room_for_so_many_spectators() -> None:
    async with serving(session=SessionSection(max_watchers=1)) as server:
        owner = await server.connect()
        started = await owner.start()
        first = await watching(server, started)
        second = await server.connect(viewer=False)
        await second.send("session.watch", protocol=1, watch_token=started["watch_token"])
        await second.error(code="too_many_watchers", retryable=True)
        assert await second.closed() == 1013
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S) as http:
            view = (await http.get(f"{server.url}v1/sessions/{started['session_id']}")).json()
            assert view["watchers"] == 1
        await first.drop()
        await server.until(lambda: server.context.table.find(started["session_id"], None).num_watchers == 0)
        await watching(server, started)


async def test_a_session_without_a_socket_can_be_watched(server: Server) -> None:
    created = await create(server)
    spectator = await watching(server, created)
    owner = await server.connect()
    await owner.resume(created["resume_token"], -1)
    await spectator.expect("session.state", state="active")
    chunk = await spectator.media()
    assert isinstance(chunk, Chunk)
    assert chunk.header.chunk_index == 0
