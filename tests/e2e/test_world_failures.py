"""The `world` dialect over real sockets: failed ticks, lost pictures, and workers that die."""

from __future__ import annotations

from typing import Any

import pytest

from server.config import SessionSection
from tests.support.server_client import image_field
from tests.support.server_scripted import UNHURRIED, Server, serving
from tests.support.server_worker import ScriptedWorker, model_info, other_tick
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack

# ---------------------------------------------------------------- failure


@pytest.mark.parametrize("error", [TickRolledBack("boom"), OutcomeUnknown("boom")])
async def test_a_failed_tick_fails_the_session_until_a_reset(server: Server, error: Any) -> None:
    socket = await server.connect()
    started = await socket.start()
    await socket.media()
    # Paused, so that no chunk is under way that could meet the failure before the event is there.
    await server.pause(socket)
    server.worker.tick_failures.append(error)
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued", event_id=1)
    await socket.send("session.unpause")
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


@pytest.mark.parametrize("error", [TickRolledBack("boom"), OutcomeUnknown("boom")])
async def test_no_other_failure_is_retried(error: Any) -> None:
    async with serving(session=SessionSection(retry_rolled_back_ticks=1)) as server:
        server.worker.tick_failures.append(error)
        socket = await server.connect()
        await socket.start()
        await socket.error(code="tick_failed")
        await socket.expect("session.state", state="failed")
        assert server.worker.served == []


async def test_a_retry_that_is_refused_leaves_the_next_chunk_a_retry_of_its_own() -> None:
    async with serving(session=SessionSection(retry_rolled_back_ticks=1)) as server:
        socket = await server.connect()
        started = await socket.start()
        await server.pause(socket)
        await socket.send("session.event", event_id=1, prompt="x")
        await socket.expect("event.queued")
        hiccup = TickRolledBack("hiccup", transient=True)
        server.worker.tick_failures.extend([hiccup, RequestRefused("no", code="bad_control"), hiccup])
        made_before = server.session(started).next_chunk_index
        await socket.send("session.unpause")
        await socket.error(code="bad_control")
        await socket.expect("event.dropped", event_id=1, reason="failed")
        await server.until(lambda: server.session(started).next_chunk_index > made_before)
        assert not server.worker.tick_failures


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


async def test_events_of_a_chunk_whose_pictures_are_lost_are_dropped(server: Server) -> None:
    """They acted in the world, but no chunk says so."""
    socket = await server.connect()
    await socket.start()
    await socket.media()
    await server.pause(socket)
    server.worker.media_failures.append(OutcomeUnknown("lost"))
    await socket.send("session.event", event_id=1, prompt="x")
    await socket.expect("event.queued", event_id=1)
    await socket.send("session.unpause")
    await socket.error(code="media_failed")
    await socket.expect("event.dropped", event_id=1, reason="failed")


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


async def test_a_start_with_an_unknown_outcome_is_not_the_clients_fault(server: Server) -> None:
    server.worker.open_failures.append(OutcomeUnknown("OpenSession failed in a way that was not foreseen"))
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="", image=image_field())
    assert (await socket.error(code="worker_unavailable"))["retryable"] is True
    assert await socket.closed() == 1012
    assert server.context.table.num_resident == 0


async def test_a_failed_reset_can_be_tried_again(server: Server) -> None:
    server.worker.reset_failures.append(OutcomeUnknown("boom"))
    socket = await server.connect()
    await socket.start()
    await socket.send("session.reset")
    await socket.error(code="reset_failed")
    await socket.expect("session.state", state="failed")
    await socket.send("session.reset")
    await socket.expect("session.state", state="active", run=1)


async def test_a_bug_in_a_start_is_answered(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.worker.open_failures.append(KeyError("a bug"))  # type: ignore[arg-type]
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="", image=image_field())
    assert "KeyError" not in (await socket.error(code="internal"))["message"]
    assert await socket.closed() == 1011
    assert server.context.table.num_resident == 0
    assert "a start broke" in caplog.text


async def test_a_bug_in_a_reset_fails_the_session(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    socket = await server.connect()
    await socket.start()
    server.worker.reset_failures.append(KeyError("a bug"))  # type: ignore[arg-type]
    await socket.send("session.reset")
    await socket.error(code="reset_failed")
    await socket.expect("session.state", state="failed")
    assert "KeyError: 'a bug'" in caplog.text
    await server.until(lambda: server.context.table.num_resident == 0)
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
    for socket in sockets:
        await socket.media()
    server.worker.hold()
    for socket in sockets:
        for event_id in range(3):
            await socket.send("session.event", event_id=event_id, prompt="rain")
            await socket.expect("event.queued", event_id=event_id)
    server.worker.dies()
    for socket in sockets:
        assert await socket.closed() == 1012
        *answers, state, error = socket.messages[-5:]
        assert [(answer["type"], answer["reason"]) for answer in answers] == [("event.dropped", "failed")] * 3
        assert sorted(answer["event_id"] for answer in answers) == [0, 1, 2]
        assert (state["type"], state["state"], state["reason"]) == ("session.state", "failed", "worker_unavailable")
        # A fatal error is the last message of its socket.
        assert (error["code"], error["fatal"], error["retryable"]) == ("worker_unavailable", True, True)
    assert server.context.table.num_resident == 0
    newcomer = await server.connect()
    await newcomer.send("session.start", protocol=1, prompt="", image=image_field())
    await newcomer.error(code="worker_unavailable")
    assert await newcomer.closed() == 1012
    server.worker.is_back()
    server.worker.release()
    again = await server.connect()
    await again.send("session.start", protocol=1, resume_token=started[0]["resume_token"], last_chunk_index=0)
    assert (await again.error(code="session_lost"))["retryable"] is False
    await again.start()
    await again.media()
    # A failed session may still be reset by its id, and is resumed as the new world it then is.
    await server.context.table.find(started[1]["session_id"], None).begin_reset(prompt="", seed=None, image=None)
    reset = await server.connect()
    assert (await reset.resume(started[1]["resume_token"], 0))["run"] == 1
    assert (await reset.media()).header.run == 1


async def test_a_dead_worker_takes_tombstones_along(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    socket = await server.connect()
    started = await socket.start()
    server.worker.close_failures.append(OutcomeUnknown("stuck"))
    await socket.send("session.close")
    await socket.error(code="cleanup_failed")
    server.worker.dies()
    await socket.expect("session.closed", session_id=started["session_id"], reason="worker lost")
    await server.until(lambda: server.context.table.all() == ())
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
    async with serving(ScriptedWorker(model_info(capacity_sessions=3)), server=UNHURRIED) as server:
        sockets = [await server.connect() for _ in range(3)]
        for socket in sockets:
            await socket.start()
        server.stack.pop_all()
    for socket in sockets:
        assert await socket.closed() == 1012
