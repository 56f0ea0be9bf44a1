"""A client of the `omni` dialect for tests, which keeps its rules: metadata, then payload, until `session.done`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import dataclass
from typing import Any, Self

import av
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.support.server_client import ANSWER_TIMEOUT_S, PATIENT, png


def image_reference(image: bytes | None = None) -> dict[str, str]:
    data = base64.b64encode(png() if image is None else image).decode()
    return {"image_url": f"data:image/png;base64,{data}"}


def velocity(*translation: float, rotation: tuple[float, ...] = (0.0, 0.0, 0.0, 1.0)) -> dict[str, Any]:
    return {"mode": "velocity", "data": {"translation": list(translation), "rotation": list(rotation)}}


def camera(command: dict[str, Any]) -> dict[str, Any]:
    """Return the event of a camera command."""
    return {"multi_modal_data": {"camera": command}}


@dataclass(frozen=True)
class OmniChunk:
    """Metadata and the binary frame that came right after it."""

    metadata: dict[str, Any]
    payload: bytes

    @property
    def started(self) -> list[str]:
        started: list[str] = self.metadata["started_event_ids"]
        return started


OmniReceived = dict[str, Any] | OmniChunk


class OmniSocket:
    """Sends dicts, receives dicts and chunks, and keeps them."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.chunks: list[OmniChunk] = []
        self.messages: list[dict[str, Any]] = []

    @classmethod
    async def open(cls, url: str, **options: Any) -> Self:
        """Connect; `url` is the server's http URL."""
        address = url.replace("http://", "ws://") + "v1/realtime/video"
        return cls(await connect(address, **{**PATIENT, **options}))

    async def send(self, type: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": type, **fields}))

    async def send_start(self, **fields: Any) -> None:
        await self.send("session.start", **{"prompt": "a town", "image_reference": image_reference(), **fields})

    async def start(self, **fields: Any) -> dict[str, Any]:
        """Start a video and return `video.start`; `session.queued` may come before."""
        await self.send_start(**fields)
        return await self.expect("video.start")

    async def interact(self, event: dict[str, Any], event_id: str | None = None, **fields: Any) -> None:
        given = {} if event_id is None else {"event_id": event_id}
        await self.send("session.interaction", interaction={**given, "event": event, **fields})

    async def receive(self) -> OmniReceived:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            frame = await self.connection.recv()
            assert isinstance(frame, str), "a binary frame without its metadata"
            message: dict[str, Any] = json.loads(frame)
            self.messages.append(message)
            if message["type"] != "video.chunk_metadata":
                return message
            payload = await self.connection.recv()
        assert isinstance(payload, bytes), f"{payload!r} came between metadata and its payload"
        assert len(payload) == message["byte_length"]
        chunk = OmniChunk(metadata=message, payload=payload)
        self.chunks.append(chunk)
        return chunk

    async def expect(self, type: str, **fields: Any) -> dict[str, Any]:
        """Receive until a message of this type with these fields; an unexpected error fails the test."""
        while True:
            message = await self.receive()
            if isinstance(message, OmniChunk):
                continue
            if message["type"] == type and all(message.get(name) == value for name, value in fields.items()):
                return message
            assert message["type"] != "error", message

    async def error(self, **fields: Any) -> dict[str, Any]:
        return await self.expect("error", **fields)

    async def media(self) -> OmniChunk:
        """Receive the next chunk."""
        while True:
            message = await self.receive()
            if isinstance(message, OmniChunk):
                return message
            assert message["type"] != "error", message

    async def chunk_that_starts(self, event_id: str) -> OmniChunk:
        while event_id not in (chunk := await self.media()).started:
            pass
        return chunk

    async def closed(self) -> int:
        """Receive until the server closes; returns the close code."""
        try:
            while True:
                await self.receive()
        except ConnectionClosed as error:
            return 1006 if error.rcvd is None else error.rcvd.code

    def decode(self) -> int:
        """Return how many frames PyAV finds in everything received."""
        with av.open(io.BytesIO(b"".join(chunk.payload for chunk in self.chunks)), format="mp4") as video:
            return sum(1 for _ in video.decode(video=0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()
