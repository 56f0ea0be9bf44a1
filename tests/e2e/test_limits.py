"""Every limit on what a client may send: refused with the name of its setting, and the server goes on."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from server.config import LimitsSection, ServerSection, SessionSection
from tests.support.server_client import ANSWER_TIMEOUT_S, image_field, png
from tests.support.server_scripted import KEYS, Server, serving

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


# ---------------------------------------------------------------- connections


async def post(server: Server, body: bytes, *, num_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin an upload of `num_bytes` and send `body` of it."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST /v1/uploads HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: image/png\r\nContent-Length: {num_bytes}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    return reader, writer


async def answer_to(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Read status, headers and the error of an answer."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)["error"]


def body_bytes(server: Server) -> float | None:
    return server.context.metrics.registry.get_sample_value("worldserve_body_bytes")


async def test_a_body_that_does_not_come_is_refused_and_its_connection_closed() -> None:
    async with serving(limits=LimitsSection(body_timeout_s=0.1)) as server:
        reader, writer = await post(server, b"x", num_bytes=10)
        status, _, error = await answer_to(reader)
        assert (status, error["code"]) == (408, "body_timeout")
        assert "limits.body_timeout_s" in error["message"]
        assert await reader.read() == b""
        writer.close()
        await server.until(lambda: body_bytes(server) == 0)


async def test_bodies_under_way_are_bounded_together() -> None:
    async with serving(limits=LimitsSection(max_bodies_bytes=1000)) as server:
        image = png()
        _, first = await post(server, image[:20], num_bytes=len(image))
        await server.until(lambda: body_bytes(server) == 20)
        reader, second = await post(server, bytes(990), num_bytes=2000)
        status, headers, error = await answer_to(reader)
        assert (status, headers["retry-after"], error["code"]) == (503, "1", "too_many_bodies")
        assert "limits.max_bodies_bytes" in error["message"]
        second.close()
        first.close()
        await server.until(lambda: body_bytes(server) == 0)
        reader, third = await post(server, image, num_bytes=len(image))
        assert (await reader.readline()).startswith(b"HTTP/1.1 201")
        third.close()


async def test_a_client_that_leaves_in_mid_body_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as server:
        _, writer = await post(server, b"x", num_bytes=10)
        await server.until(lambda: body_bytes(server) == 1)
        writer.close()
        await server.until(lambda: body_bytes(server) == 0)
    assert "a client left in the middle of its request: POST '/v1/uploads'" in caplog.text
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_sockets_are_bounded_while_health_and_metrics_answer() -> None:
    async with serving(limits=LimitsSection(max_connections=2)) as server:
        first, second = await server.connect(), await server.connect()
        await first.start()
        with pytest.raises(InvalidStatus) as refused:
            await server.connect()
        response = refused.value.response
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "limits.max_connections" in json.loads(response.body or b"")["error"]["message"]
        async with httpx.AsyncClient(trust_env=False, base_url=server.url, timeout=ANSWER_TIMEOUT_S) as http:
            for path in ("healthz", "readyz", "metrics"):
                assert (await http.get(path)).status_code == 200
        await first.media()
        await second.close()
        await server.until_num_connections(1)
        await (await server.connect()).close()


async def test_a_flood_of_empty_messages_is_read_no_faster_than_allowed() -> None:
    """Two seconds' worth of empty frames: all are answered, the last not before its time, and others are served."""
    async with serving(limits=LimitsSection(max_messages_per_second=50.0)) as server:
        flooding, other = await server.connect(), await server.connect()
        began_at = asyncio.get_running_loop().time()
        for _ in range(60):
            await flooding.connection.send("")
        await other.start()
        for _ in range(60):
            await flooding.error(code="bad_json")
        assert asyncio.get_running_loop().time() - began_at >= 9 / 50
        await other.media()


@pytest.mark.parametrize("kind", ["fragments", "pings"])
async def test_a_flood_of_small_frames_closes_its_socket_only(kind: str) -> None:
    limits = LimitsSection(max_fragments=100, max_control_frames_per_second=20.0)
    async with serving(limits=limits) as server:
        flooding, other = await server.connect(), await server.connect()
        await other.start()
        started = await flooding.start()
        if kind == "fragments":
            await flooding.connection.send("x" for _ in range(101))
        else:
            # Far more than 20, for the time that reading them takes allows further ones.
            for _ in range(200):
                await flooding.connection.ping()
        assert await flooding.closed() == {"fragments": 1009, "pings": 1008}[kind]
        await server.until_parked(started["session_id"])
        await other.media()
