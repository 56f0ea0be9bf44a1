"""The `world` dialect over real sockets, with a worker that does what the test says."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import av
import pytest
from fastapi import FastAPI

from server.app import create_app
from server.config import LimitsSection, ServerConfig, ServerSection, SessionSection
from server.context import ServerContext
from tests.support.server_client import Chunk, WorldSocket, fake_config, image_field, png, running
from tests.support.server_worker import ScriptedWorker, WorkerSession, model_info, other_tick
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack
from worldmodel.messages import SessionId

KEYS = {"track": "camera", "schema": "lingbot.camera_actions.v1", "data": {"mode": "state", "held": ["w"]}}


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    """A running application with its scripted worker."""

    url: str
    app: FastAPI
    worker: ScriptedWorker
    clock: ManualClock
    stack: AsyncExitStack

    @property
    def context(self) -> ServerContext:
        context: ServerContext = self.app.state.context
        return context

    async def connect(self, **options: Any) -> WorldSocket:
        return await self.stack.enter_async_context(await WorldSocket.open(self.url, **options))

    def session(self, started: dict[str, Any]) -> WorkerSession:
        return self.worker.sessions[SessionId(started["session_id"])]

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the server work until something is true; the time-out only ends a test that hangs."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def pause(self, socket: WorldSocket) -> None:
        """Pause and wait until no tick is in flight, so that the next events come into one tick."""
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        await self.until(lambda: self.worker.num_ticks_in_flight == 0)

    async def until_parked(self, session_id: str) -> None:
        table = self.context.table
        await self.until(lambda: table.find(session_id, None).parked_at is not None)


@asynccontextmanager
async def serving(worker: ScriptedWorker | None = None, **sections: Any) -> AsyncIterator[Server]:
    worker = worker or ScriptedWorker()
    config: ServerConfig = fake_config(**sections)
    clock = ManualClock()
    app = create_app(config, worker=worker, clock=clock)
    async with running(app, config) as url, AsyncExitStack() as stack:
        yield Server(url=url, app=app, worker=worker, clock=clock, stack=stack)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as it:
        yield it


def decode(chunks: list[Chunk]) -> int:
    """Return how many frames PyAV finds in an epoch's bytes."""
    with av.open(io.BytesIO(b"".join(chunk.payload for chunk in chunks)), format="mp4") as video:
        return sum(1 for _ in video.decode(video=0))


# ---------------------------------------------------------------- the stream


async def test_every_prefix_of_the_stream_plays_completely(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    assert (started["epoch"], started["run"], started["width"], started["height"]) == (1, 0, 32, 32)
    num_frames = 0
    for index in range(4):
        header = (await socket.media()).header
        assert (header.chunk_index, header.pts) == (index, num_frames * 1000)
        num_frames += header.num_frames
        assert decode(socket.chunks) == num_frames == 9 + 12 * index
    assert [chunk.header.kind for chunk in socket.chunks] == ["init", *["media"] * 4]
    init = socket.chunks[0].header
    assert init.chunk_index is None
    assert f'codecs="{init.codec}"' in started["mime"]


async def test_ticks_wait_for_the_viewer(server: Server) -> None:
    socket = await server.connect(viewer=False)
    session = server.session(await socket.start())
    first, second = await socket.media(), await socket.media()
    await socket.send("ping", t=1)
    await socket.expect("pong", t=1.0)
    assert len(session.ticks) == 2
    await socket.report(first.header)
    assert (await socket.media()).header.chunk_index == 2
    assert len(session.ticks) == 3
    await socket.report(second.header)
    await socket.media()


async def test_raw_pixels_come_with_their_shape(server: Server) -> None:
    socket = await server.connect()
    assert (await socket.start(format="rgb24"))["mime"] is None
    chunk = await socket.media()
    assert chunk.header.shape == [9, 32, 32, 3]
    assert len(chunk.payload) == 9 * 32 * 32 * 3


@pytest.mark.parametrize("format", ["h264", "jpeg"])
async def test_other_formats_tell_how_to_cut_their_payload(server: Server, format: str) -> None:
    socket = await server.connect()
    started = await socket.start(format=format, pacing="free")
    assert started["format"] == format
    chunk = await socket.media()
    assert chunk.header.sizes is not None
    assert len(chunk.header.sizes) == 9
    assert sum(chunk.header.sizes) == len(chunk.payload)


# ---------------------------------------------------------------- events


async def test_every_event_is_queued_and_then_applied(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start(event_base=10)
    await socket.media()
    await server.pause(socket)
    for event_id in (12, 11):
        await socket.send("session.event", event_id=event_id, prompt=f"p{event_id}", controls=[KEYS])
        await socket.expect("event.queued", event_id=event_id)
    await socket.send("session.unpause")
    while not (chunk := await socket.media()).header.applied:
        pass
    assert [(it.event_id, it.latent_frame) for it in chunk.header.applied] == [(11, 1), (12, 1)]
    tick = server.session(started).ticks[chunk.header.chunk_index or 0]
    assert tick.prompt == "p12"
    assert tick.events[0].controls[0].schema == "lingbot.camera_actions.v1"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"event_id": 5, "prompt": "x"}, "duplicate", "event_id"),
        ({"event_id": 4, "prompt": "x"}, "stale", "event_id"),
        ({"event_id": 6}, "empty_event", None),
        ({"event_id": 6, "controls": []}, "empty_event", None),
        ({"event_id": 6, "controls": [KEYS, KEYS]}, "duplicate_track", "controls[1].track"),
        ({"event_id": 6, "controls": [{**KEYS, "track": "arm"}]}, None, "controls[0].track"),
        ({"event_id": 6, "controls": [{**KEYS, "schema": "x"}]}, None, "controls[0].schema"),
        (
            {"event_id": 6, "controls": [{**KEYS, "data": {"mode": "state", "held": ["q"]}}]},
            "bad_control",
            "controls[0].data.held[0]",
        ),
    ],
)
async def test_a_bad_event_is_refused_and_the_session_lives(
    server: Server, fields: dict[str, Any], code: str | None, field: str | None
) -> None:
    socket = await server.connect()
    await socket.start()
    await socket.send("session.event", event_id=5, prompt="x")
    while not (await socket.media()).header.applied:
        pass
    await socket.send("session.event", **fields)
    error = await socket.error()
    assert error["event_id"] == fields["event_id"]
    assert error["code"] == (code or "bad_control")
    assert error["field"] == field
    assert not error["fatal"]
    await socket.media()


async def test_a_full_queue_and_too_many_events_are_refused() -> None:
    config = {"session": SessionSection(max_pending_events=2), "limits": LimitsSection(max_events_per_second=4.0)}
    async with serving(**config) as server:
        socket = await server.connect()
        await socket.start()
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        for event_id, code in ((0, None), (1, None), (2, "queue_full"), (3, "queue_full"), (4, "rate_limited")):
            await socket.send("session.event", event_id=event_id, prompt="x")
            if code is None:
                await socket.expect("event.queued", event_id=event_id)
            else:
                assert (await socket.error(code=code, event_id=event_id))["retryable"]


async def test_pause_keeps_events_and_unpause_goes_on(server: Server) -> None:
    socket = await server.connect()
    session = server.session(await socket.start())
    await socket.media()
    await server.pause(socket)
    num_ticks = len(session.ticks)
    await socket.send("session.event", event_id=3, prompt="x")
    await socket.expect("event.queued")
    assert len(session.ticks) == num_ticks
    await socket.send("session.unpause")
    await socket.expect("session.state", state="active")
    while not (await socket.media()).header.applied:
        pass


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"protocol": 2}, "bad_protocol", "protocol"),
        ({"model": "other"}, "unknown_model", "model"),
        ({"size": "832x480"}, "bad_size", "size"),
        ({"format": "latent"}, "format_not_allowed", "format"),
        ({"image": {"name": "mars"}}, "unknown_image", "image.name"),
        ({"image": {"upload_id": "u-1"}}, "unknown_upload", "image.upload_id"),
        ({"image": {"base64": "!"}}, "bad_image", "image.base64"),
        ({"image": image_field(b"GIF89a")}, "bad_image", "image.base64"),
        ({"prompt": "x" * 2001}, "prompt_too_long", "prompt"),
        ({"seed": -1}, "bad_message", "seed"),
    ],
)
async def test_a_bad_start_is_refused_with_its_field_and_may_be_tried_again(
    server: Server, fields: dict[str, Any], code: str, field: str
) -> None:
    socket = await server.connect()
    await socket.send("session.start", **{"protocol": 1, "prompt": "", "image": image_field(), **fields})
    error = await socket.error()
    assert (error["code"], error["field"], error["fatal"]) == (code, field, False)
    assert server.worker.sessions == {}
    await socket.start(size="32x32", model="fake", seed=7)
    assert socket.started["seed"] == 7
    await socket.media()


async def test_what_is_no_message_is_answered_and_the_session_lives(server: Server) -> None:
    socket = await server.connect()
    await socket.send("session.event", event_id=1, prompt="x")
    assert (await socket.error(code="not_started"))["event_id"] == 1
    await socket.start()
    await socket.connection.send(b"\x00\x01")
    await socket.error(code="binary_not_allowed")
    await socket.connection.send("{")
    await socket.error(code="bad_json")
    await socket.connection.send('{"type": "session.event", "event_id": NaN}')
    await socket.error(code="bad_json")
    await socket.connection.send("[" * 1000)
    await socket.error(code="bad_json")
    await socket.send("session.dance")
    await socket.error(code="bad_message", field="type")
    await socket.send("session.start", protocol=1, prompt="", image=image_field())
    await socket.error(code="already_started")
    await socket.send("playback", epoch=1, run=0, chunk_index=99, buffered_ms=0)
    await socket.error(code="bad_playback", field="chunk_index")
    assert (await socket.media()).header.run == 0


async def test_an_oversized_frame_closes_the_socket_and_parks_the_session() -> None:
    async with serving(limits=LimitsSection(max_message_bytes=4096)) as server:
        socket = await server.connect()
        started = await socket.start()
        await socket.connection.send("x" * 5000)
        assert await socket.closed() == 1009
        again = await server.connect()
        resumed = await again.resume(started["resume_token"], -1)
        assert resumed["session_id"] == started["session_id"]
        await again.media()


# ---------------------------------------------------------------- resume


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
        await socket.start()
        server.clock.now += 3.0
        server.context.table.expire(server.clock.now)
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
    await socket.drop()
    await server.until_parked(started["session_id"])
    server.worker.release()
    table = server.context.table
    await server.until(lambda: table.find(started["session_id"], None).session.state == "failed")
    again = await server.connect()
    await again.resume(started["resume_token"], 0)
    await again.expect("session.state", state="failed")
    assert (await again.expect("event.dropped"))["event_id"] == 1


# ---------------------------------------------------------------- admission


async def test_clients_queue_with_their_position(server: Server) -> None:
    first, second = await server.connect(), await server.connect()
    await first.start()
    await second.start()
    waiting = [await server.connect(), await server.connect()]
    for index, socket in enumerate(waiting):
        await socket.send("session.start", protocol=1, prompt="", image=image_field())
        assert await socket.expect("session.queued") == {
            "type": "session.queued",
            "position": index + 1,
            "queued": index + 1,
        }
    await waiting[1].send("ping", t=3)
    await waiting[1].expect("pong")
    assert len(server.worker.sessions) == 2
    await first.send("session.close")
    assert await first.closed() == 1000
    await waiting[0].expect("session.started")
    await waiting[1].expect("session.queued", position=1, queued=1)
    await waiting[1].drop()
    await server.until(lambda: server.context.table.num_waiting == 0)
    assert len(server.worker.sessions) == 2


async def test_a_full_server_with_a_full_queue_says_so() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, session=SessionSection(max_queued=0)) as server:
        first = await server.connect()
        await first.start()
        second = await server.connect()
        await second.send("session.start", protocol=1, prompt="", image=image_field())
        error = await second.error(code="capacity")
        assert error["retryable"]
        assert "session.max_queued" in error["message"]
        assert await second.closed() == 1013
        await first.media()


@pytest.mark.parametrize("max_queued", [0, 4])
async def test_the_longest_parked_session_makes_room(max_queued: int) -> None:
    async with serving(session=SessionSection(max_queued=max_queued)) as server:
        started = []
        for _ in range(2):
            socket = await server.connect()
            started.append(await socket.start())
            await socket.drop()
            await server.until_parked(started[-1]["session_id"])
            server.clock.now += 1.0
        newcomer = await server.connect()
        await newcomer.start()
        assert started[0]["session_id"] not in server.worker.sessions
        again = await server.connect()
        await again.send("session.start", protocol=1, resume_token=started[0]["resume_token"], last_chunk_index=-1)
        await again.error(code="session_evicted")
        await again.resume(started[1]["resume_token"], -1)


async def test_a_session_that_parks_while_others_wait_makes_room() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, second = await server.connect(), await server.connect()
        await first.start()
        await second.send("session.start", protocol=1, prompt="", image=image_field())
        await second.expect("session.queued")
        await first.drop()
        await second.expect("session.started")


async def test_a_client_that_leaves_while_its_session_opens_leaves_nothing(server: Server) -> None:
    server.worker.hold()
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="", image=image_field())
    await server.until(lambda: server.context.table.num_resident == 1)
    await socket.drop()
    server.worker.release()
    await server.until(lambda: server.context.table.num_resident == 0)
    assert server.worker.sessions == {}


async def test_sessions_tick_one_at_a_time_and_share_the_worker(server: Server) -> None:
    sockets = [await server.connect(), await server.connect()]
    for socket in sockets:
        await socket.start(pacing="free")
    for _ in range(10):
        for socket in sockets:
            await socket.media()
    assert server.worker.max_ticks_in_flight == 1
    served = server.worker.served[:16]
    assert min(served.count(name) for name in set(served)) >= 4


# ---------------------------------------------------------------- reset and close


async def test_reset_begins_a_run_on_the_same_stream(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start(seed=5)
    await socket.media()
    await socket.send("session.pause")
    await socket.expect("session.state", state="paused")
    await socket.send("session.event", event_id=8, prompt="x")
    await socket.expect("event.queued")
    await socket.send("session.reset", prompt="night")
    assert (await socket.expect("event.dropped"))["reason"] == "reset"
    await socket.expect("session.state", state="resetting", run=0)
    await socket.expect("session.state", state="paused", run=1)
    await socket.send("session.unpause")
    while (chunk := await socket.media()).header.run == 0:
        pass
    assert (chunk.header.run, chunk.header.chunk_index, chunk.header.epoch) == (1, 0, 1)
    session = server.session(started)
    assert (session.prompt, session.seed, session.num_resets) == ("night", 5, 1)
    assert decode(socket.chunks) == sum(it.header.num_frames for it in socket.chunks)
    await socket.send("session.event", event_id=7, prompt="x")
    await socket.error(code="stale", event_id=7)


async def test_a_bad_image_leaves_the_session_as_it_was(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.send("session.reset", image=image_field(b"nothing"))
    await socket.error(code="bad_image", field="image.base64")
    await socket.media()
    assert server.session(started).num_resets == 0
    await socket.send("session.reset", image=image_field(png(64, 16)), seed=1)
    await socket.expect("session.state", state="active", run=1)


async def test_close_answers_everything_and_frees_the_place(server: Server) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.send("session.pause")
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued")
    await socket.send("session.close")
    assert (await socket.expect("event.dropped"))["reason"] == "closed"
    assert (await socket.expect("session.closed"))["session_id"] == started["session_id"]
    assert await socket.closed() == 1000
    assert server.worker.sessions == {}
    assert server.context.table.num_resident == 0


async def test_chunks_committed_before_a_close_are_still_delivered(server: Server) -> None:
    socket = await server.connect()
    session = server.session(await socket.start())
    await socket.send("session.close")
    assert await socket.closed() == 1000
    media = [chunk for chunk in socket.chunks if chunk.header.kind == "media"]
    assert len(media) == len(session.ticks)


# ---------------------------------------------------------------- failure


@pytest.mark.parametrize("error", [TickRolledBack("boom"), OutcomeUnknown("boom")])
async def test_a_failed_tick_fails_the_session_until_a_reset(server: Server, error: Any) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.media()
    server.worker.tick_failures.append(error)
    await socket.send("session.event", event_id=1, prompt="x")
    failed = await socket.error(code="tick_failed")
    assert (failed["message"], failed["retryable"], failed["fatal"]) == ("boom", True, False)
    await socket.expect("session.state", state="failed")
    await server.until(lambda: not server.worker.sessions)
    await server.until(lambda: server.context.table.num_resident == 0)
    await socket.send("session.event", event_id=2, prompt="x")
    await socket.error(code="bad_state", event_id=2)
    await socket.send("session.reset", prompt="again")
    await socket.expect("session.state", state="active", run=1)
    while (chunk := await socket.media()).header.run == 0:
        pass
    assert chunk.header.chunk_index == 0
    assert server.session(started).prompt == "again"


async def test_events_in_a_failed_tick_are_dropped(server: Server) -> None:
    socket = await server.connect()
    await socket.start()
    await server.pause(socket)
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued")
    server.worker.tick_failures.append(TickRolledBack("boom"))
    await socket.send("session.unpause")
    await socket.error(code="tick_failed")
    assert (await socket.expect("event.dropped"))["reason"] == "failed"


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_transient_rollback_is_retried_only_if_configured(retries: int) -> None:
    async with serving(session=SessionSection(retry_rolled_back_ticks=retries)) as server:
        server.worker.tick_failures.append(TickRolledBack("hiccup", transient=True))
        socket = await server.connect()
        await socket.start()
        if retries:
            chunk = await socket.media()
            assert chunk.header.chunk_index == 0
            assert (chunk.header.request_id or "").endswith("-2")
        else:
            await socket.error(code="tick_failed")


async def test_events_that_the_model_refuses_are_dropped_and_the_session_goes_on(server: Server) -> None:
    socket = await server.connect()
    await socket.start()
    await server.pause(socket)
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued")
    server.worker.tick_failures.append(RequestRefused("a pose too far", code="bad_control", field="pose"))
    await socket.send("session.unpause")
    assert (await socket.error(code="bad_control"))["field"] == "pose"
    assert (await socket.expect("event.dropped"))["event_id"] == 1
    await socket.media()


async def test_an_answer_to_another_tick_is_not_committed(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.worker.alter_tick = other_tick
    socket = await server.connect()
    await socket.start()
    await socket.error(code="tick_failed")
    await socket.expect("session.state", state="failed")
    assert [chunk.header.kind for chunk in socket.chunks] == ["init"]
    assert "expected session, request, chunk" in caplog.text


async def test_lost_pictures_fail_the_session(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.worker.media_failures.extend([None, OutcomeUnknown("lost")])
    socket = await server.connect()
    await socket.start()
    assert (await socket.media()).header.chunk_index == 0
    await socket.error(code="media_failed")
    await socket.expect("session.state", state="failed")
    assert sum(chunk.header.kind == "media" for chunk in socket.chunks) == 1
    assert "media of chunk 1 lost" in caplog.text
    await socket.send("session.reset", prompt="")
    while (chunk := await socket.media()).header.run == 0:
        pass
    assert chunk.header.chunk_index == 0


async def test_a_refused_session_leaves_no_place_taken(server: Server) -> None:
    server.worker.open_failures.append(RequestRefused("a prompt of doom", code="bad_prompt", field="prompt"))
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="", image=image_field())
    error = await socket.error(code="request_refused", field="prompt")
    assert error["message"] == "a prompt of doom"
    assert server.context.table.num_resident == 0
    await socket.start()


async def test_a_failed_reset_can_be_tried_again(server: Server) -> None:
    server.worker.reset_failures.append(OutcomeUnknown("boom"))
    socket = await server.connect()
    await socket.start()
    await socket.send("session.reset")
    await socket.error(code="reset_failed")
    await socket.expect("session.state", state="failed")
    await socket.send("session.reset")
    await socket.expect("session.state", state="active", run=1)


async def test_a_session_that_cannot_be_cleaned_up_stays_as_a_tombstone(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.worker.close_failures.append(OutcomeUnknown("stuck"))
    socket = await server.connect()
    started = await socket.start()
    await socket.send("session.close")
    await socket.error(code="cleanup_failed")
    assert server.context.table.num_resident == 1
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.error(code="bad_state")
    await socket.send("session.close")
    await socket.expect("session.closed", session_id=started["session_id"])
    assert await socket.closed() == 1000
    assert server.context.table.num_resident == 0
    assert "did not close it" in caplog.text


# ---------------------------------------------------------------- worker


async def test_a_dead_worker_fails_all_its_sessions_at_once(server: Server) -> None:
    sockets = [await server.connect(), await server.connect()]
    started = [await socket.start() for socket in sockets]
    server.worker.hold()
    for socket in sockets:
        await socket.media()
    server.worker.dies()
    for socket in sockets:
        assert await socket.closed() == 1012
        error = next(message for message in socket.messages if message["type"] == "error")
        assert (error["code"], error["fatal"], error["retryable"]) == ("worker_unavailable", True, True)
    assert server.context.table.num_resident == 0
    newcomer = await server.connect()
    await newcomer.send("session.start", protocol=1, prompt="", image=image_field())
    await newcomer.error(code="worker_unavailable")
    assert await newcomer.closed() == 1012
    server.worker.is_back()
    server.worker.release()
    again = await server.connect()
    await again.resume(started[0]["resume_token"], 0)
    await again.expect("session.state", state="failed")
    await again.send("session.reset", prompt="again")
    await again.expect("session.state", state="active", run=1)
    await again.media()


async def test_a_dead_worker_takes_tombstones_along(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    socket = await server.connect()
    started = await socket.start()
    server.worker.close_failures.append(OutcomeUnknown("stuck"))
    await socket.send("session.close")
    await socket.error(code="cleanup_failed")
    server.worker.dies()
    await socket.expect("session.closed", session_id=started["session_id"], reason="worker lost")
    assert server.context.table.all() == ()
    assert "did not close it" in caplog.text


async def test_those_who_wait_keep_waiting_while_the_worker_restarts() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, second, third = [await server.connect() for _ in range(3)]
        await first.start()
        for socket in (second, third):
            await socket.send("session.start", protocol=1, prompt="", image=image_field())
            await socket.expect("session.queued")
        server.worker.dies()
        assert await first.closed() == 1012
        server.worker.is_back()
        await second.expect("session.started")
        server.worker.fails_for_good("no such checkpoint")
        await third.error(code="worker_unavailable")
        assert await third.closed() == 1012


async def test_shutting_down_closes_every_socket_with_restart() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=3))) as server:
        sockets = [await server.connect() for _ in range(3)]
        for socket in sockets:
            await socket.start()
        server.stack.pop_all()
    for socket in sockets:
        assert await socket.closed() == 1012


# ---------------------------------------------------------------- slow clients


async def test_a_slow_client_stops_its_own_ticks_only() -> None:
    # 2.4 MB a chunk, so that a few fill what the operating system buffers.
    info = model_info(width=256, height=256)
    async with serving(ScriptedWorker(info)) as server:
        slow = await server.connect(max_queue=1)
        started = await slow.start(pacing="free", format="rgb24")
        quick = await server.connect()
        await quick.start(pacing="free", format="h264")
        connection = slow.connection
        connection.transport.pause_reading()
        session = server.session(started)
        seen = -1
        while seen != len(session.ticks):
            seen = len(session.ticks)
            for _ in range(10):
                await quick.media()
        assert len(server.worker.served) - seen >= 10
        connection.transport.resume_reading()
        for index in range(seen + 3):
            assert (await slow.media()).header.chunk_index == index, "no committed chunk is dropped"
        await slow.drop()


# ---------------------------------------------------------------- rights


async def test_tokens_are_asked_for_and_sessions_are_their_owners() -> None:
    config = {
        "server": ServerSection(tokens=("alpha", "beta")),
        "limits": LimitsSection(max_sessions_per_token=1),
    }
    async with serving(**config) as server:
        stranger = await server.connect()
        await stranger.error(code="unauthorized")
        assert await stranger.closed() == 1008
        alpha = await server.connect(additional_headers={"Authorization": "Bearer alpha"})
        started = await alpha.start()
        beta = await server.connect(subprotocols=["worldserve.v1", "worldserve.token.beta"])
        assert beta.connection.subprotocol == "worldserve.v1"
        await beta.send("session.start", protocol=1, resume_token=started["resume_token"], last_chunk_index=-1)
        await beta.error(code="bad_resume_token")
        await beta.start()
        second = await server.connect(additional_headers={"Authorization": "Bearer alpha"})
        await second.send("session.start", protocol=1, prompt="", image=image_field())
        error = await second.error(code="too_many_sessions")
        assert "limits.max_sessions_per_token" in error["message"]


async def test_pages_of_other_origins_are_turned_away(server: Server) -> None:
    evil = await server.connect(origin="http://evil.example")
    await evil.error(code="origin_not_allowed")
    assert await evil.closed() == 1008
    same = await server.connect(origin=server.url.rstrip("/"))
    await same.start()
