"""A real application over a loopback port with a scripted worker and a clock that the test moves."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import av
from fastapi import FastAPI

from server.app import create_app
from server.config import ServerConfig, ServerSection
from server.context import ServerContext
from tests.support.server_client import Chunk, WorldSocket, fake_config, running
from tests.support.server_worker import ScriptedWorker, WorkerSession
from worldmodel.messages import SessionId

KEYS = {"track": "camera", "schema": "lingbot.camera_actions.v1", "data": {"mode": "state", "held": ["w"]}}


UNHURRIED = ServerSection(shutdown_s=120.0)
"""Of a server that ends: a quarter of it is the time for its clients to answer a close."""


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    """A running application with its scripted worker."""

    url: str
    app: FastAPI
    worker: ScriptedWorker
    clock: ManualClock
    stack: AsyncExitStack

    @property
    def context(self) -> ServerContext:
        context: ServerContext = self.app.state.context
        return context

    async def connect(self, **options: Any) -> WorldSocket:
        return await self.stack.enter_async_context(await WorldSocket.open(self.url, **options))

    def session(self, started: dict[str, Any]) -> WorkerSession:
        return self.worker.sessions[SessionId(started["session_id"])]

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the server work until something is true; the time-out only ends a test that hangs."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def pause(self, socket: WorldSocket) -> None:
        """Pause and wait until no tick is in flight, so that the next events come into one tick."""
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        await self.until(lambda: self.worker.num_ticks_in_flight == 0)

    async def until_num_connections(self, num_connections: int) -> None:
        """Wait until the server has found out that the sockets of other clients are gone."""
        registry = self.context.metrics.registry
        await self.until(lambda: registry.get_sample_value("worldserve_connections") == num_connections)

    async def until_parked(self, session_id: str) -> None:
        table = self.context.table
        await self.until(lambda: table.find(session_id, None).parked_at is not None)


@asynccontextmanager
async def serving(
    worker: ScriptedWorker | None = None, *, send_buffer_bytes: int | None = None, **sections: Any
) -> AsyncIterator[Server]:
    """Serve the fake model's configuration with these sections. For `send_buffer_bytes` see `running`."""
    worker = worker or ScriptedWorker()
    config: ServerConfig = fake_config(**sections)
    clock = ManualClock()
    app = create_app(config, worker=worker, clock=clock)
    async with running(app, config, send_buffer_bytes=send_buffer_bytes) as url, AsyncExitStack() as stack:
        yield Server(url=url, app=app, worker=worker, clock=clock, stack=stack)


def decode(chunks: list[Chunk]) -> int:
    """Return how many frames PyAV finds in an epoch's bytes."""
    with av.open(io.BytesIO(b"".join(chunk.payload for chunk in chunks)), format="mp4") as video:
        return sum(1 for _ in video.decode(video=0))
