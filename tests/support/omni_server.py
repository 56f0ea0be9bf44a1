"""A server with the `omni` dialect over a scripted worker whose ticks can be held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from server.worker import CommittedTick
from tests.support.omni_client import OmniSocket
from tests.support.server_scripted import Server
from tests.support.server_worker import ScriptedWorker, WorkerSession
from worldmodel.messages import ModelInfo, SessionId, Tick


class GatedWorker(ScriptedWorker):
    """A scripted worker whose ticks alone can be held, so that sessions still open and close."""

    def __init__(self, info: ModelInfo | None = None, *, is_held: bool = False) -> None:
        super().__init__(info)
        self.gate = asyncio.Event()
        if not is_held:
            self.gate.set()

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        self.num_ticks_in_flight += 1
        try:
            await self.gate.wait()
        finally:
            self.num_ticks_in_flight -= 1
        return await super().tick(message, payload)


def go(server: Server) -> None:
    assert isinstance(server.worker, GatedWorker)
    server.worker.gate.set()


async def until_first_tick(server: Server) -> None:
    await server.until(lambda: server.worker.num_ticks_in_flight == 1)


async def connect(server: Server, **options: Any) -> OmniSocket:
    return await server.stack.enter_async_context(await OmniSocket.open(server.url, **options))


def session_of(server: Server, started: dict[str, Any]) -> WorkerSession:
    return server.worker.sessions[SessionId(started["request_id"])]
