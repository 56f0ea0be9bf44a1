"""Every limit on what a client may send: refused with the name of its setting, and the server goes on."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from server.config import LimitsSection, ServerSection, SessionSection
from tests.support.server_client import image_field, png
from tests.support.server_scripted import KEYS, serving

SMALL = LimitsSection(
    max_prompt_chars=10, max_json_depth=6, max_image_bytes=2000, max_image_pixels=5000, max_events_per_second=2.0
)


@pytest.mark.parametrize(
    ("fields", "code", "field", "key"),
    [
        ({"prompt": "x" * 11}, "prompt_too_long", "prompt", "limits.max_prompt_chars"),
        ({"image": {"base64": base64.b64encode(b"x" * 2001).decode()}}, "bad_image", "image.base64", "max_image_bytes"),
        ({"image": image_field(png(100, 51))}, "bad_image", "image.base64", "limits.max_image_pixels"),
        ({"size": [[[[[[1]]]]]]}, "bad_json", None, "limits.max_json_depth"),
    ],
    ids=["prompt", "image bytes", "image pixels", "depth"],
)
async def test_a_start_above_a_limit_is_refused_by_name(
    fields: dict[str, Any], code: str, field: str | None, key: str
) -> None:
    async with serving(limits=SMALL) as server:
        socket = await server.connect()
        await socket.send("session.start", **{"protocol": 1, "prompt": "", "image": image_field(), **fields})
        error = await socket.error(code=code)
        assert error["field"] == field
        assert key in error["message"]
        assert server.worker.sessions == {}
        await socket.start(prompt="x" * 10, image=image_field(png(100, 50)))


@pytest.mark.parametrize("type", ["session.event", "session.reset"])
async def test_the_prompt_is_bounded_everywhere(type: str) -> None:
    async with serving(limits=SMALL) as server:
        socket = await server.connect()
        await socket.start(prompt="")
        fields = {"event_id": 1} if type == "session.event" else {}
        await socket.send(type, prompt="x" * 11, **fields)
        assert "limits.max_prompt_chars" in (await socket.error(code="prompt_too_long"))["message"]
        await socket.media()


async def test_the_depth_of_controls_is_bounded() -> None:
    async with serving(limits=SMALL) as server:
        socket = await server.connect()
        await socket.start(prompt="")
        nested: Any = 1
        for _ in range(10):
            nested = [nested]
        await socket.send("session.event", event_id=1, controls=[{**KEYS, "data": {"mode": nested}}])
        assert "limits.max_json_depth" in (await socket.error(code="bad_json"))["message"]
        await socket.media()


async def test_the_rate_of_events_is_bounded_and_recovers() -> None:
    async with serving(limits=SMALL) as server:
        socket = await server.connect()
        await socket.start(prompt="")
        for event_id in range(3):
            await socket.send("session.event", event_id=event_id, prompt="x")
        error = await socket.error(code="rate_limited", event_id=2)
        assert "limits.max_events_per_second" in error["message"]
        server.clock.now += 0.5
        await socket.send("session.event", event_id=2, prompt="x")
        await socket.expect("event.queued", event_id=2)


async def test_uploads_are_bounded_in_number() -> None:
    async with serving(limits=LimitsSection(max_uploads=2)) as server:
        uploads = server.context.uploads
        ids = [uploads.add(png(), owner=None) for _ in range(3)]
        assert len(uploads) == 2
        socket = await server.connect()
        await socket.send("session.start", protocol=1, prompt="", image={"upload_id": ids[0]})
        await socket.error(code="unknown_upload", field="image.upload_id")
        await socket.start(image={"upload_id": ids[2]})


@pytest.mark.parametrize("name", ["crf", "preset", "codec", "bitrate", "encoder", "media", "fps", "width"])
async def test_clients_give_no_codec_options(name: str) -> None:
    async with serving() as server:
        socket = await server.connect()
        await socket.send("session.start", protocol=1, prompt="", image=image_field(), **{name: 1})
        error = await socket.error(code="bad_message")
        assert error["field"] == name
        await socket.send("session.start", protocol=1, prompt="", image=image_field(), format="h265")
        await socket.error(code="bad_message", field="format")


async def test_no_address_is_fetched() -> None:
    """Addresses of a listener of ours, in every place that takes an image; nobody ever connects to it."""
    visitors: list[object] = []

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitors.append(writer.get_extra_info("peername"))
        writer.close()

    listener = await asyncio.start_server(visited, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    url = f"http://{host}:{port}/image.png"
    images = [
        {"url": url},
        {"name": url},
        {"upload_id": url},
        {"base64": url},
        {"base64": f"data:{url},"},
        {"base64": f"url({url})"},
        url,
    ]
    async with listener, serving() as server:
        socket = await server.connect()
        await socket.start()
        other = await server.connect()
        for image in images:
            await other.send("session.start", protocol=1, prompt=url, image=image)
            assert (await other.error())["field"].startswith("image")
            await socket.send("session.reset", image=image)
            assert (await socket.error())["field"].startswith("image")
        await socket.media()
    assert visitors == []


async def test_files_outside_the_offer_are_not_read() -> None:
    async with serving() as server:
        socket = await server.connect()
        for name in ("../model_index.json", "/etc/hostname", "examples/day.png", "day\x00", "."):
            await socket.send("session.start", protocol=1, prompt="", image={"name": name})
            await socket.error(code="unknown_image", field="image.name")
        await socket.start()


async def test_an_idle_viewer_is_closed_but_one_who_acts_is_not() -> None:
    async with serving(session=SessionSection(idle_s=10.0)) as server:
        socket = await server.connect()
        await socket.start()
        table = server.context.table
        for event_id in range(3):
            server.clock.now += 8.0
            await socket.send("session.event", event_id=event_id, prompt="x")
            await socket.expect("event.queued", event_id=event_id)
            table.expire(server.clock.now)
        server.clock.now += 8.0
        await socket.media()
        assert table.expire(server.clock.now) is not None
        server.clock.now += 2.0
        table.expire(server.clock.now)
        assert (await socket.expect("session.closed"))["reason"] == "idle"


@pytest.mark.parametrize("where", ["header", "subprotocol"])
@pytest.mark.parametrize(("token", "is_known"), [("alpha", True), ("alphabet", False), ("", False)])
async def test_tokens_by_either_way(where: str, token: str, is_known: bool) -> None:
    async with serving(server=ServerSection(tokens=("alpha",))) as server:
        options: dict[str, Any]
        if where == "header":
            options = {"additional_headers": {"Authorization": f"Bearer {token}"}}
        else:
            options = {"subprotocols": ["worldserve.v1", f"worldserve.token.{token}"]}
        socket = await server.connect(**options)
        if is_known:
            await socket.start()
            return
        error = await socket.error(code="unauthorized")
        assert (error["fatal"], "alpha" in error["message"]) == (True, False)
        assert await socket.closed() == 1008


async def test_sessions_of_a_token_are_counted_while_they_open_too() -> None:
    config: dict[str, Any] = {
        "server": ServerSection(tokens=("alpha",)),
        "limits": LimitsSection(max_sessions_per_token=1),
    }
    async with serving(**config) as server:
        server.worker.hold()
        headers = {"Authorization": "Bearer alpha"}
        first, second = [await server.connect(additional_headers=headers) for _ in range(2)]
        start = json.dumps({"type": "session.start", "protocol": 1, "prompt": "", "image": image_field()})
        await first.connection.send(start)
        await server.until(lambda: server.context.table.num_resident == 1)
        await second.connection.send(start)
        assert "limits.max_sessions_per_token" in (await second.error(code="too_many_sessions"))["message"]
        server.worker.release()
        await first.expect("session.started")
