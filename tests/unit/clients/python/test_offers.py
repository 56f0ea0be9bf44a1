"""What a client is told where the server does not say what it offers."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message

import pytest

from clients.python.errors import ConnectFailed
from clients.python.offers import info_url, read_beginning

SAID = b'{"error": {"code": "unauthorized", "message": "this server wants a token"}}'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SAID, "HTTP 401: unauthorized: this server wants a token"),
        (SAID.replace(b"{", b'{"later": 1, '), "HTTP 401: unauthorized: this server wants a token"),
        (b"<html>", "HTTP Error 401: Unauthorized"),
    ],
)
async def test_a_refusal_has_the_servers_own_words(body: bytes, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.HTTPError("u", 401, "Unauthorized", Message(), io.BytesIO(body))

    monkeypatch.setattr("urllib.request.OpenerDirector.open", refuse)
    with pytest.raises(ConnectFailed) as failed:
        await read_beginning("ws://127.0.0.1:8000/v1/world", token="wrong", image=None)
    assert str(failed.value) == f"http://127.0.0.1:8000/v1/info could not be read: {expected}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ws://host:1/v1/world", "http://host:1/v1/info"),
        ("http://host:1", "http://host:1/v1/info"),
        ("wss://host", "https://host/v1/info"),
        ("https://host/", "https://host/v1/info"),
    ],
)
def test_a_server_is_asked_as_safely_as_its_world_is_reached(url: str, expected: str) -> None:
    assert info_url(url) == expected


async def test_an_address_without_a_scheme_is_named() -> None:
    with pytest.raises(ValueError, match=r"url: expected ws://.*got '127\.0\.0\.1:8000'"):
        await read_beginning("127.0.0.1:8000", token=None, image=None)


async def test_why_nobody_answers_is_said_plainly() -> None:
    with pytest.raises(ConnectFailed, match=r"/v1/info could not be read: \[Errno \d+\] Connection refused$"):
        await read_beginning("ws://127.0.0.1:1", token=None, image=None)
