"""The `world` dialect over real sockets: events, and messages that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from server.config import LimitsSection, SessionSection
from tests.support.server_client import image_field
from tests.support.server_scripted import KEYS, Server, serving

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


async def test_asking_for_a_pause_twice_is_answered_twice(server: Server) -> None:
    socket = await server.connect()
    await socket.start()
    for message, state in (("unpause", "active"), ("pause", "paused"), ("pause", "paused"), ("unpause", "active")):
        await socket.send(f"session.{message}")
        await socket.expect("session.state", state=state)


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
        # It reports nothing, so that the chunks made until the server reads the frame are still kept.
        socket = await server.connect(viewer=False)
        started = await socket.start()
        await socket.connection.send("x" * 5000)
        assert await socket.closed() == 1009
        again = await server.connect()
        resumed = await again.resume(started["resume_token"], -1)
        assert resumed["session_id"] == started["session_id"]
        await again.media()


async def test_what_is_sent_with_the_start_waits_for_the_session(server: Server) -> None:
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="a town", image=image_field())
    await socket.send("session.event", event_id=0, controls=[KEYS])
    await socket.send("session.event", event_id=0, prompt="the same id")
    await socket.expect("session.started")
    await socket.expect("event.queued", event_id=0)
    assert (await socket.error())["code"] == "duplicate"
    applied: list[int] = []
    while not applied:
        applied = [receipt.event_id for receipt in (await socket.media()).header.applied]
    assert applied == [0]


async def test_what_is_sent_with_a_start_that_fails_is_answered(server: Server) -> None:
    socket = await server.connect()
    await socket.send("session.start", protocol=1, prompt="", image={"name": "nowhere"})
    await socket.send("session.event", event_id=3, prompt="x")
    assert (await socket.error())["code"] == "unknown_image"
    assert (await socket.error(code="not_started"))["event_id"] == 3
    await socket.start()
    await socket.media()
