"""A relay whose first link falls silent, as in a network that loses everything and says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed


@asynccontextmanager
async def silent_relay(url: str, *, silenced_by: str) -> AsyncIterator[str]:
    """Give the URL of a relay to `url`. The first link is dead from the first message on that has this text in it."""
    is_first = True

    async def up(link: ServerConnection, beyond: ClientConnection, *, dies: bool) -> None:
        async for message in link:
            if dies and isinstance(message, str) and silenced_by in message:
                link.transport.pause_reading()
                return
            await beyond.send(message)

    async def down(link: ServerConnection, beyond: ClientConnection) -> None:
        async for message in beyond:
            await link.send(message)

    async def relay(link: ServerConnection) -> None:
        nonlocal is_first
        dies, is_first = is_first, False
        async with connect(url, max_size=None, proxy=None, compression=None) as beyond:
            passing_down = asyncio.create_task(down(link, beyond))
            try:
                await up(link, beyond, dies=dies)
                if dies:
                    passing_down.cancel()
                    await link.wait_closed()
            except ConnectionClosed:
                pass
            finally:
                passing_down.cancel()
                await asyncio.gather(passing_down, return_exceptions=True)

    options: dict[str, Any] = {"max_size": None, "compression": None, "ping_interval": None, "close_timeout": 0.1}
    async with serve(relay, "127.0.0.1", 0, **options) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/v1/world"
