"""What a client is told where the server does not say what it offers."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message

import pytest

from clients.python.errors import ConnectFailed
from clients.python.offers import read_beginning

SAID = b'{"error": {"code": "unauthorized", "message": "this server wants a token"}}'


@pytest.mark.parametrize(
    ("body", "expected"),
    [(SAID, "HTTP 401: unauthorized: this server wants a token"), (b"<html>", "HTTP Error 401: Unauthorized")],
)
async def test_a_refusal_has_the_servers_own_words(body: bytes, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.HTTPError("u", 401, "Unauthorized", Message(), io.BytesIO(body))

    monkeypatch.setattr("urllib.request.OpenerDirector.open", refuse)
    with pytest.raises(ConnectFailed) as failed:
        await read_beginning("ws://127.0.0.1:8000/v1/world", token="wrong", image=None)
    assert str(failed.value) == f"http://127.0.0.1:8000/v1/info could not be read: {expected}"
