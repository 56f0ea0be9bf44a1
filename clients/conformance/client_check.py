"""A server that judges its client: a proxy in front of a real one, which cuts the link once.

client ─ws─> 127.0.0.1:PORT ─ws─> the server at URL
                  └─> ClientJudge
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.http11 import Request, Response

from clients.conformance.check import Context
from clients.conformance.client_judge import ClientJudge
from clients.conformance.errors import ConformanceError
from clients.conformance.http import request
from clients.conformance.runner import Result
from clients.conformance.socket import Target
from server.wire.binary import unpack_chunk

RETURN_S = 20.0
"""How long a client may stay away; the protocol's own retries are over after 7 s."""

_PASSED_ON = ("Authorization", "Origin", "Sec-WebSocket-Protocol")


async def check_client(context: Context, *, port: int, wait_s: float, on_ready: Callable[[str], None]) -> list[Result]:
    """Wait for a client on a port of this machine, and judge it until its session is over or it stays away.

    `wait_s` is how long the first connection may take to come. Raises `ConformanceError` if none does, and for a port
    that is taken.
    """
    proxy = _Proxy(context.target)
    try:
        async with serve(
            proxy.handle,
            "127.0.0.1",
            port,
            compression=None,
            max_size=None,
            process_request=proxy.answer_http,
        ) as listener:
            on_ready(f"ws://127.0.0.1:{next(iter(listener.sockets)).getsockname()[1]}/v1/world")
            await proxy.until_over(wait_s)
    except OSError as error:
        raise ConformanceError(f"cannot listen on port {port}: {error.strerror or error}") from error
    return proxy.judge.results()


class _Proxy:
    def __init__(self, target: Target) -> None:
        self.judge = ClientJudge()
        self._target = target
        self._num_open = 0
        self._num_links = 0
        self._changed = asyncio.Event()

    async def until_over(self, wait_s: float) -> None:
        """Wait until the session was closed, or nobody has been here for too long."""
        while self._num_open or not self.judge.is_over:
            limit_s = None if self._num_open else RETURN_S if self._num_links else wait_s
            self._changed.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                if not self._num_links:
                    raise ConformanceError(f"no client came within {wait_s:g} s") from None
                return

    async def answer_http(self, connection: ServerConnection, asked: Request) -> Response | None:
        """Hand on plain requests, such as that for `/v1/info`; only what has no body comes here."""
        if "Upgrade" in asked.headers:
            return None
        answer = await request(self._target, "GET", asked.path)
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(answer.body))})
        return Response(answer.status, HTTPStatus(answer.status).phrase, headers, answer.body)

    async def handle(self, client: ServerConnection) -> None:
        self._num_open += 1
        self._num_links += 1
        self.judge.connected()
        self._changed.set()
        try:
            await self._serve(client)
        finally:
            self._num_open -= 1
            self._changed.set()

    async def _serve(self, client: ServerConnection) -> None:
        assert client.request is not None
        headers = {name: value for name in _PASSED_ON if (value := client.request.headers.get(name)) is not None}
        try:
            server = await connect(
                self._target.world, additional_headers=headers, compression=None, max_size=None, proxy=None
            )
        except (OSError, InvalidHandshake):
            return await client.close(1013)
        async with server:
            forward = asyncio.create_task(self._forward(client, server), name="client-check")
            try:
                await self._back(server, client)
            except ConnectionClosed:
                await client.close(server.close_code if server.close_code not in (None, 1005, 1006) else 1011)
            finally:
                forward.cancel()
                await asyncio.gather(forward, return_exceptions=True)

    async def _forward(self, client: ServerConnection, server: ClientConnection) -> None:
        try:
            async for frame in client:
                self.judge.from_client(frame)
                await server.send(frame)
            await server.close()
        except ConnectionClosed:
            server.transport.abort()

    async def _back(self, server: ClientConnection, client: ServerConnection) -> None:
        while True:
            frame = await server.recv()
            if isinstance(frame, str):
                self.judge.from_server(frame)
                await client.send(frame)
                continue
            header, _ = unpack_chunk(frame)
            cut = self.judge.chunk(header)
            await client.send(frame)
            if cut:
                self.judge.cut()
                client.transport.abort()
                server.transport.abort()
                return
