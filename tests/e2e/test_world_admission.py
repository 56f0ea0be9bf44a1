"""The `world` dialect over real sockets: places in the worker, and the queue for them."""

from __future__ import annotations

import asyncio

import pytest

from server.config import LimitsSection, ServerSection, SessionSection
from server.dialects.opening import StartTimer
from server.worker import CommittedTick
from tests.support.server_client import image_field
from tests.support.server_scripted import Server, serving
from tests.support.server_worker import ScriptedWorker, model_info
from worldmodel.messages import Tick

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
    await server.until_num_connections(0)
    server.worker.release()
    await server.until(lambda: server.context.table.num_resident == 0)
    assert server.worker.sessions == {}


class SteppedWorker(ScriptedWorker):
    """A scripted worker that runs as many ticks as it is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = asyncio.Semaphore(0)

    async def _tick(self, message: Tick) -> CommittedTick:
        await self.allowed.acquire()
        return await super()._tick(message)


async def test_sessions_tick_one_at_a_time_and_share_the_worker() -> None:
    worker = SteppedWorker()
    async with serving(worker) as server:
        sockets = [await server.connect(), await server.connect()]
        by_id = {(await socket.start(pacing="free"))["session_id"]: socket for socket in sockets}
        # Both could tick whenever the worker is free, since all that was made has been sent.
        for turn in range(16):
            worker.allowed.release()
            await server.until(lambda turn=turn: len(worker.served) > turn)
            socket = by_id[worker.served[turn]]
            await socket.media()
            await socket.send("ping", t=turn)
            await socket.expect("pong", t=turn)
        assert worker.max_ticks_in_flight == 1
        assert min(worker.served.count(name) for name in by_id) >= 7


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


async def test_a_socket_that_begins_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    start, expire, is_over = StartTimer.start, StartTimer._expired, asyncio.Event()
    expired: set[StartTimer] = set()

    def expired_or_wait(timer: StartTimer) -> None:
        """Let the short time of every socket last until all of them have done what they want to do."""
        if is_over.is_set():
            expired.add(timer)
            expire(timer)
        else:
            start(timer)

    monkeypatch.setattr(StartTimer, "_expired", expired_or_wait)
    async with serving(session=SessionSection(start_timeout_s=0.05)) as server:
        idle, waiting, watching = await server.connect(), await server.connect(), await server.connect()
        started = await waiting.start()
        await watching.send("session.watch", protocol=1, watch_token=started["watch_token"])
        await watching.expect("session.watching")
        is_over.set()
        assert (await idle.error())["code"] == "start_timeout"
        assert await idle.closed() == 1008
        # The time of the others is over too, but they have begun something, and go on.
        await server.until(lambda: len(expired) == 3)
        await waiting.media()
        await watching.send("ping", t=1)
        await watching.expect("pong")
