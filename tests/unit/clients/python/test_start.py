"""Starting a session with the Python client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clients.python import (
    ConnectFailed,
    Refused,
    WorldClient,
)
from clients.python.link import world_url
from server.wire.messages import ErrorMessage
from tests.support.client_standin_server import StandinServer
from tests.support.python_client import PROMPT, take


async def test_start_message_says_what_was_asked(server: StandinServer, connect: Any) -> None:
    async with connect(seed=7, size="64x48", format="jpeg", pacing="clock", event_base=40, token="t-1") as world:
        assert world.session.model == "standin"
        await world.hold()
    assert server.sent("session.start") == [
        {
            "type": "session.start",
            "protocol": 1,
            "prompt": PROMPT,
            "image": {"name": "day"},
            "seed": 7,
            "size": "64x48",
            "format": "jpeg",
            "pacing": "clock",
            "event_base": 40,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer t-1"
    assert server.sent("session.event")[0]["event_id"] == 40
    assert len(server.sent("session.close")) == 1


async def test_an_image_may_be_bytes_or_a_file(server: StandinServer, connect: Any, tmp_path: Path) -> None:
    (tmp_path / "start.png").write_bytes(b"\x89PNG")
    async with connect(image=b"\x89PNG"):
        pass
    async with connect(image=tmp_path / "start.png"):
        pass
    assert [start["image"] for start in server.sent("session.start")] == [{"base64": "iVBORw=="}] * 2


async def test_waiting_in_line_is_shown(server: StandinServer, connect: Any) -> None:
    server.behaviour.queue_positions = (2, 1)
    async with connect() as world:
        assert world.queue_position is None
        assert len(await take(world, 1)) == 1


async def test_a_refused_start_is_a_typed_error(server: StandinServer, connect: Any) -> None:
    server.behaviour.refuse_start = ErrorMessage(code="unknown_image", message="no image 'day'", field="image.name")
    with pytest.raises(Refused, match="unknown_image: no image 'day'") as caught:
        async with connect():
            pass
    assert (caught.value.code, caught.value.field, caught.value.retryable) == ("unknown_image", "image.name", False)


async def test_no_server_is_connect_failed() -> None:
    with pytest.raises(ConnectFailed, match=r"cannot connect to ws://127\.0\.0\.1:1"):
        async with WorldClient("ws://127.0.0.1:1", prompt=PROMPT, image="day"):
            pass


async def test_bad_arguments_are_refused_before_anything_is_sent(server: StandinServer, connect: Any) -> None:
    with pytest.raises(ValueError, match="size: String should match"):
        async with connect(size="big"):
            pass
    with pytest.raises(ValueError, match="format: "):
        async with connect(format="avi"):
            pass
    assert server.received == []


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("ws://h:8000", "ws://h:8000/v1/world"),
        ("http://h/", "ws://h/v1/world"),
        ("https://h/v1/world", "wss://h/v1/world"),
        ("wss://h/proxied/world?x=1", "wss://h/proxied/world?x=1"),
    ],
)
def test_addresses_are_completed(url: str, want: str) -> None:
    assert world_url(url) == want


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected ws://"):
        world_url("ftp://h")
