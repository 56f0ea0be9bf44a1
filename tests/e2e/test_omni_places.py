"""Who gets a place in the `omni` dialect, over real sockets: lines, refusals, tokens."""

from __future__ import annotations

from server.config import OmniSection, ServerSection
from tests.support.omni_server import connect
from tests.support.server_scripted import serving
from tests.support.server_worker import ScriptedWorker, model_info


async def test_a_second_client_is_told_its_position_and_gets_its_turn() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start(num_frames=9)
        assert await second.expect("session.queued") == {"type": "session.queued", "position": 1, "queued": 1}
        await second.send("session.ping")
        await second.expect("session.pong")
        await first.send("session.stop")
        await first.expect("session.done")
        await second.expect("video.start")
        await second.expect("session.done")


async def test_a_second_client_is_refused_where_nobody_waits() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, omni=OmniSection(queue_when_full=False)) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.error(code="capacity")
        assert await second.closed() == 1013


async def test_a_waiting_client_that_stops_is_done() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.expect("session.queued")
        await second.interact({"prompt": "rain"}, "early")
        await second.send("session.stop")
        done = await second.expect("session.done")
        assert (done["chunks"], done["stopped"], done["dropped_event_ids"]) == (0, True, ["early"])
        assert await second.closed() == 1000
        await server.until(lambda: server.context.table.num_waiting == 0)


async def test_a_token_is_needed_where_the_server_asks_for_one() -> None:
    async with serving(server=ServerSection(tokens=("secret",))) as server:
        stranger = await connect(server)
        await stranger.error(code="unauthorized")
        assert await stranger.closed() == 1008
        friend = await connect(server, additional_headers={"Authorization": "Bearer secret"})
        await friend.start(num_frames=9)
