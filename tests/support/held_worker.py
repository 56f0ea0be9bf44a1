"""A real worker that lets a test decide when sessions open, so that what comes with a start is there before them."""

from __future__ import annotations

import asyncio
from typing import Any

from server.worker_client import WorkerClient
from tests.support.server_client import WorldSocket
from worldmodel.messages import OpenSession, SessionOpened


class HeldWorker(WorkerClient):
    """The real client of a worker process; `may_open` is set unless a test clears it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened:
        await self.may_open.wait()
        return await super().open_session(message, image)

    async def start_with(self, socket: WorldSocket, start: dict[str, Any], *events: dict[str, Any]) -> None:
        """Send a start and events that act in its first chunk."""
        self.may_open.clear()
        await socket.send("session.start", protocol=1, **start)
        for event in events:
            await socket.send("session.event", **event)
        await socket.send("ping", t=0)
        await socket.expect("pong")
        self.may_open.set()
