"""What clients of the `omni` dialect do wrong is named over real sockets, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from server.config import LimitsSection, SessionSection
from tests.support.omni_client import camera
from tests.support.omni_server import GatedWorker, connect, go, session_of, until_first_tick
from tests.support.server_scripted import Server, serving
from tests.support.server_worker import ScriptedWorker, model_info

BAD_STARTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("model", {"model": "some/other-model"}),
    ("format", {"format": "webm"}),
    ("size", {"size": "832x480"}),
    ("fps", {"fps": 24}),
    ("num_frames", {"num_frames": 10}),
    ("image_reference", {"image_reference": None}),
    ("image_reference.image_url", {"image_reference": {"image_url": "data:image/png;base64,!"}}),
    ("image_reference.image_url", {"image_reference": {"image_url": "data:image/png;base64,AAAA"}}),
    ("image_reference.file_id", {"image_reference": {"file_id": "u-nothing"}}),
    ("extra_params.camera_action_script[0]", {"extra_params": {"camera_action_script": [[["w"]]]}}),
    ("seed", {"seed": float("nan")}),
]
BAD_COMMANDS: list[tuple[str, Any]] = [
    ("data.rotation", {"data": {"rotation": [0, 0, 0, 0]}}),
    ("data.rotation[1]", {"data": {"rotation": [0, float("nan"), 0, 1]}}),
    ("data.translation[2]", {"data": {"translation": [0, 0, float("inf")]}, "mode": "velocity"}),
    ("data.translation[0]", {"data": {"translation": [True, 0, 0]}}),
    ("data.actions[0]", {"data": {"actions": ["q"]}}),
    ("mode", {"mode": "jump", "data": {"translation": [0, 0, 1]}}),
    ("data", {"mode": "target"}),
]


async def test_nothing_wrong_ends_a_session_and_everything_wrong_is_named(server: Server) -> None:
    socket = await connect(server)
    await socket.interact({"prompt": "rain"}, "early")
    assert (await socket.error(code="not_started"))["event_id"] == "early"
    await socket.send("session.stop")
    await socket.error(code="not_started")
    await socket.connection.send(b"\x00\x01")
    await socket.error(code="binary_not_allowed")
    for field, fields in BAD_STARTS:
        await socket.send_start(**fields)
        error = await socket.error()
        assert error["field"] == field, error
        assert field in error["message"] or error["code"] in ("bad_image", "unknown_upload")
    assert not server.worker.sessions, "something was opened before everything was checked"
    started = await socket.start(num_frames=None)
    session = session_of(server, started)
    await socket.connection.send("{")
    assert (await socket.error(code="bad_json"))["request_id"] == started["request_id"]
    await socket.connection.send(b"\x00\x01")
    await socket.error(code="binary_not_allowed")
    await socket.send("session.dance")
    await socket.error(code="bad_message", field="type")
    await socket.send_start()
    await socket.error(code="already_started")
    await socket.send("session.playback", position_seconds=float("inf"))
    await socket.error(field="position_seconds")
    for field, command in BAD_COMMANDS:
        await socket.interact({"prompt": "rain", **camera(command)}, "bad")
        error = await socket.error(event_id="bad")
        assert error["field"] == f"interaction.event.multi_modal_data.camera.{field}", error
    await socket.interact({"prompt": "rain"}, "bad")
    await socket.expect("session.interaction.queued", event_id="bad")
    await socket.send("session.stop")
    await socket.expect("session.done")
    assert [tick.prompt for tick in session.ticks if tick.prompt] in ([], ["rain"])


async def test_a_full_queue_refuses_and_loses_nothing() -> None:
    async with serving(GatedWorker(is_held=True), session=SessionSection(max_pending_events=2)) as server:
        socket = await connect(server)
        started = await socket.start(num_frames=21)
        session = session_of(server, started)
        await until_first_tick(server)
        for event_id in ("a", "b"):
            await socket.interact({"prompt": event_id}, event_id)
            await socket.expect("session.interaction.queued", event_id=event_id)
        await socket.interact({"prompt": "c"}, "c")
        await socket.error(code="queue_full", event_id="c")
        go(server)
        assert (await socket.chunk_that_starts("a")).started == ["a", "b"]
        assert (await socket.expect("session.done"))["dropped_event_ids"] == []
        assert session.ticks[1].prompt == "b"


async def test_what_waits_for_a_start_is_bounded() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, session=SessionSection(max_pending_events=2)) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.expect("session.queued")
        for event_id in "abc":
            await second.interact({"prompt": event_id}, event_id)
        await second.error(code="queue_full", event_id="c")
        await first.send("session.stop")
        await second.expect("session.interaction.queued", event_id="b")


async def test_what_waits_for_a_start_is_no_longer_than_one_message() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, limits=LimitsSection(max_message_bytes=2000)) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.expect("session.queued")
        for event_id in "abc":
            await second.interact({"prompt": event_id * 700}, event_id)
        await second.error(code="queue_full", event_id="c")
        await first.send("session.stop")
        await second.expect("session.interaction.queued", event_id="b")


async def test_events_a_second_are_bounded() -> None:
    limits = LimitsSection(max_events_per_second=2.0)
    async with serving(limits=limits) as server:
        socket = await connect(server)
        await socket.start()
        for event_id in "abc":
            await socket.interact({"prompt": event_id}, event_id)
        await socket.error(code="rate_limited", event_id="c")
        server.clock.now += 1
        await socket.interact({"prompt": "c"}, "c")
        await socket.expect("session.interaction.queued", event_id="c")


async def test_a_start_that_breaks_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.dialects.omni.plan_start", None)
    socket = await connect(server)
    await socket.send_start()
    await socket.error(code="internal")
    assert await socket.closed() == 1011


async def test_a_socket_that_begins_nothing_is_closed() -> None:
    async with serving(session=SessionSection(start_timeout_s=0.05)) as server:
        socket = await connect(server)
        await socket.error(code="start_timeout")
        assert await socket.closed() == 1008
