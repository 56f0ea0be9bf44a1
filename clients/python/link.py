"""One WebSocket to a server: open it, say hello, send and receive. Knows messages, no session."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from clients.python.errors import BadServerMessage, ConnectFailed, LinkLost, Refused
from server.wire.binary import BinaryFrameError, unpack_chunk
from server.wire.messages import (
    SERVER_MESSAGE,
    ChunkHeader,
    ErrorMessage,
    ServerMessage,
    SessionQueued,
    SessionStarted,
    SessionWatching,
    WireModel,
)

logger = logging.getLogger(__name__)

DEFAULT_PATH = "/v1/world"
UNKNOWN_TYPE = "union_tag_invalid"
"""What pydantic calls the error of a message whose `type` is none of ours."""
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How to connect. `max_message_bytes` bounds what the server may send in one message.

    A link that dies without a word must be noticed while the server still keeps the session: there is a ping `ping_s`
    after the last answer, which must come within `ping_s`, and a farewell is waited for `close_s` only.
    """

    url: str
    token: str | None = None
    open_timeout_s: float = 10.0
    ping_s: float = 5.0
    close_s: float = 2.0
    max_message_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed:
    """How a connection ended, and the fatal error that announced it, if any."""

    code: int
    reason: str


def world_url(url: str) -> str:
    """Complete an address: http becomes ws, and an empty path becomes the one of the `world` dialect."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"url: expected ws://, wss://, http:// or https://, got {url!r}")
    path = parts.path if parts.path not in ("", "/") else DEFAULT_PATH
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))


def server_url(url: str) -> str:
    """Return where the server of a world answers HTTP, as safely as the world is reached. Raises `ValueError`."""
    parts = urlsplit(world_url(url))
    if not parts.hostname:
        raise ValueError(f"url: expected a host, as in http://127.0.0.1:8000, got {url!r}")
    return urlunsplit(("https" if parts.scheme == "wss" else "http", parts.netloc, "", "", ""))


def to_text(model: type[WireModel], fields: dict[str, Any]) -> str:
    """Check a message against its wire model and write it, without fields that are None.

    Raises `ValueError` that names the bad field, also for a number or an object that JSON does not have.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from error
    for name, value in given.items():
        _check_json(value, name)
    return json.dumps(given, allow_nan=False)


def _check_json(value: object, path: str) -> None:
    """Raise `ValueError` that names the first part of a value that JSON does not have."""
    match value:
        case None | bool() | int() | str():
            return
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{path}: expected a finite number, got {value}")
        case dict():
            for key, part in value.items():
                _check_json(part, f"{path}.{key}")
        case list() | tuple():
            for index, part in enumerate(value):
                _check_json(part, f"{path}[{index}]")
        case _:
            raise ValueError(f"{path}: expected numbers, texts and lists of Python, got {type(value).__name__}")


class Link:
    """An open connection. Closing it does not close the session."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, settings: LinkSettings) -> Link:
        """Connect. Raises `ConnectFailed`."""
        headers = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
        try:
            connection = await connect(
                world_url(settings.url),
                additional_headers=headers,
                compression=None,
                max_size=settings.max_message_bytes,
                open_timeout=settings.open_timeout_s,
                ping_interval=settings.ping_s,
                ping_timeout=settings.ping_s,
                close_timeout=settings.close_s,
                proxy=None,
            )
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise ConnectFailed(f"cannot connect to {settings.url}: {error}") from error
        return cls(connection)

    async def start(self, text: str, on_queued: Callable[[SessionQueued], None]) -> SessionStarted:
        """Send a `session.start` and wait for its answer. Raises `Refused`, `ConnectFailed` or `BadServerMessage`."""
        answer = await self._begin(text, on_queued)
        if isinstance(answer, SessionStarted):
            return answer
        await self.close()
        raise BadServerMessage(f"expected session.started, got {answer.type}")

    async def watch(self, text: str) -> SessionWatching:
        """Send a `session.watch` and wait for its answer. Raises as `start` does."""
        answer = await self._begin(text, lambda queued: None)
        if isinstance(answer, SessionWatching):
            return answer
        await self.close()
        raise BadServerMessage(f"expected session.watching, got {answer.type}")

    async def _begin(self, text: str, on_queued: Callable[[SessionQueued], None]) -> SessionStarted | SessionWatching:
        try:
            await self.send(text)
            while True:
                match await self.receive():
                    case SessionStarted() | SessionWatching() as answer:
                        return answer
                    case SessionQueued() as queued:
                        on_queued(queued)
                    case ErrorMessage() as error:
                        raise Refused(error)
                    case LinkClosed(code=code, reason=reason):
                        raise ConnectFailed(f"the server closed the connection: {code} {reason}".rstrip())
                    case other:
                        raise BadServerMessage(f"expected session.started, got {type(other).__name__}")
        except LinkLost as error:
            raise ConnectFailed("the connection broke before session.started") from error
        except BaseException:
            await self.close()
            raise

    async def send(self, text: str) -> None:
        """Raises `LinkLost` if the connection is closed."""
        try:
            await self._connection.send(text)
        except ConnectionClosed as error:
            raise LinkLost("the connection is closed") from error

    async def receive(self) -> ServerMessage | tuple[ChunkHeader, bytes] | LinkClosed:
        """Return the next message, the next chunk with its payload, or how the connection ended.

        Types and fields that this client does not know are passed over: later servers may add some.
        """
        while True:
            try:
                frame = await self._connection.recv()
            except ConnectionClosed as error:
                return LinkClosed(
                    code=error.rcvd.code if error.rcvd else 1006, reason=error.rcvd.reason if error.rcvd else ""
                )
            try:
                if isinstance(frame, str):
                    return SERVER_MESSAGE.validate_json(frame, extra="ignore")
                header, payload = unpack_chunk(frame, ignore_unknown=True)
                return header, bytes(payload)
            except ValidationError as error:
                if error.errors()[0]["type"] != UNKNOWN_TYPE:
                    raise BadServerMessage(
                        f"a message does not fit the protocol: {error.errors()[0]['msg']}"
                    ) from error
                logger.debug("a message of a type that this client does not know: %s", frame)
            except BinaryFrameError as error:
                raise BadServerMessage(str(error)) from error

    async def close(self) -> None:
        await self._connection.close()
