"""What ends a video of the `omni` dialect besides its client, over real sockets."""

from __future__ import annotations

from tests.support.omni_server import GatedWorker, connect, go, until_first_tick
from tests.support.server_scripted import Server, serving
from worldmodel.errors import RequestRefused, TickRolledBack


async def test_a_failed_chunk_ends_the_video_with_an_error(server: Server) -> None:
    socket = await connect(server)
    server.worker.tick_failures.extend([None, TickRolledBack("out of memory", code="oom")])
    started = await socket.start(num_frames=33)
    # The error may overtake the chunk before, which is still being encoded.
    error = await socket.error(code="tick_failed")
    assert error["request_id"] == started["request_id"]
    assert await socket.closed() == 1011
    assert "session.done" not in {message["type"] for message in socket.messages}
    await server.until(lambda: not server.worker.sessions)


async def test_queued_events_of_a_failed_chunk_are_told(gated: Server) -> None:
    socket = await connect(gated)
    await socket.start(num_frames=33)
    await until_first_tick(gated)
    await socket.interact({"prompt": "rain"}, "e")
    await socket.expect("session.interaction.queued")
    gated.worker.tick_failures.append(TickRolledBack("out of memory", code="oom"))
    go(gated)
    await socket.error(code="tick_failed")
    await socket.error(code="interaction_failed", event_id="e")
    assert await socket.closed() == 1011


async def test_queued_events_are_told_why_the_worker_died(gated: Server) -> None:
    socket = await connect(gated)
    await socket.start()
    await until_first_tick(gated)
    for event_id in ("e", "f"):
        await socket.interact({"prompt": "rain"}, event_id)
        await socket.expect("session.interaction.queued")
    gated.worker.dies()
    failures = [await socket.error(code="interaction_failed", event_id=event_id) for event_id in ("e", "f")]
    error = await socket.error(code="worker_unavailable")
    assert [failure["message"] for failure in failures] == [error["message"]] * 2
    assert await socket.closed() == 1012
    go(gated)


async def test_a_worker_that_dies_ends_the_video(server: Server) -> None:
    socket = await connect(server)
    await socket.start()
    await socket.media()
    server.worker.dies()
    await socket.error(code="worker_unavailable")
    assert await socket.closed() == 1012
    server.worker.is_back()
    await server.until(lambda: server.context.table.num_resident == 0)


async def test_a_worker_that_will_not_let_go_is_an_error_and_not_silence(server: Server) -> None:
    socket = await connect(server)
    await socket.start()
    server.worker.close_failures.append(RequestRefused("busy", code="busy"))
    await socket.send("session.stop")
    await socket.error(code="cleanup_failed")
    assert await socket.closed() == 1011
    await server.until(lambda: not server.worker.sessions)


async def test_shutting_down_says_so_and_names_what_was_dropped() -> None:
    async with serving(GatedWorker(is_held=True)) as server:
        socket = await connect(server)
        await socket.start()
        await socket.interact({"prompt": "rain"}, "e")
        await socket.expect("session.interaction.queued")
        server.context.say_goodbye()
        await socket.error(code="shutting_down")
        done = await socket.expect("session.done")
        assert (done["stopped"], done["dropped_event_ids"]) == (True, ["e"])
        assert await socket.closed() == 1012
        go(server)
