"""What all connections together may take: WebSockets, and bytes of request bodies; and how long one body may take.

    WebSocket  ─> one of `limits.max_connections`, or 503 in place of the handshake
                  also of `limits.max_connections_per_token`, if it has a token
    request    ─> its body within `limits.body_timeout_s`, or 408
                  its bytes count until it is answered: all together `limits.max_bodies_bytes`, or 503

One body may always be as large as its own limit allows, while it is the only one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.context import ServerContext
from server.errors import ErrorCode, NotAllowed, Unavailable
from server.rest_requests import error_response

log = logging.getLogger(__name__)


class SharedBounds:
    """ASGI middleware in front of all routes."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._limits = context.config.limits
        self._sockets: Counter[str | None] = Counter()
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "websocket":
                await self._serve_socket(scope, receive, send)
            case "http":
                await self._serve_request(scope, receive, send)
            case _:
                await self._app(scope, receive, send)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._owner_of(scope)
        error = self._refusal(owner)
        if error is not None:
            self._context.metrics.errors.labels(error.code).inc()
            await WebSocket(scope, receive, send).send_denial_response(error_response(error))
            return
        self._sockets[owner] += 1
        try:
            await self._app(scope, receive, send)
        except WebSocketDisconnect:
            log.info("a client left before its WebSocket was accepted")
        finally:
            self._sockets[owner] -= 1
            if not self._sockets[owner]:
                del self._sockets[owner]

    def _refusal(self, owner: str | None) -> Unavailable | None:
        """Return why one more WebSocket is too many, None if it is not."""
        most, most_of_one = self._limits.max_connections, self._limits.max_connections_per_token
        if self._sockets.total() >= most:
            text = f"this server has {most} WebSockets (limits.max_connections)"
        elif owner is not None and most_of_one is not None and self._sockets[owner] >= most_of_one:
            text = f"this token has {most_of_one} WebSockets (limits.max_connections_per_token)"
        else:
            return None
        return Unavailable(ErrorCode.TOO_MANY_CONNECTIONS, text)

    def _owner_of(self, scope: Scope) -> str | None:
        """Return whose WebSocket it is; None without a token, or with one that its route will refuse."""
        try:
            return self._context.auth.authenticate(Headers(scope=scope), scope.get("subprotocols", ()))
        except NotAllowed:
            return None

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(self, receive, send, timeout_s=self._limits.body_timeout_s)
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            log.info("a client left in the middle of its request: %s %r", scope["method"], scope["path"][:200])
        except asyncio.CancelledError:
            if body.is_answered or not self._context.table.is_stopping:
                raise
            # Else uvicorn, whose time to wait for requests is over, logs it as an error of ours and answers nothing.
            log.info("a request was cut because the server ends: %s %r", scope["method"], scope["path"][:200])
            error = Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
            await error_response(error)(scope, receive, send)
        finally:
            self._add(-body.num_bytes)

    def count(self, body: _Body, num_bytes: int) -> None:
        """Count more bytes of a body. Raises `Unavailable` if they are too many beside those of others."""
        most = self._limits.max_bodies_bytes
        has_company = self._num_bytes > body.num_bytes
        if has_company and self._num_bytes + num_bytes > most:
            text = f"bodies of {most} bytes are on their way already (limits.max_bodies_bytes)"
            raise Unavailable(ErrorCode.TOO_MANY_BODIES, text)
        body.num_bytes += num_bytes
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._context.metrics.body_bytes.set(self._num_bytes)


class _Body:
    """The body of one request: what came of it, and until when the rest may come."""

    def __init__(self, bounds: SharedBounds, receive: Receive, send: Send, *, timeout_s: float) -> None:
        self.num_bytes = 0
        self.is_answered = False
        """Whether an answer has begun."""
        self._bounds = bounds
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s
        self._until = asyncio.get_running_loop().time() + timeout_s
        self._is_awaited = True

    async def receive(self) -> Message:
        if not self._is_awaited:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError as error:
            text = f"the body did not come within {self._timeout_s:g} s (limits.body_timeout_s)"
            raise Unavailable(ErrorCode.BODY_TIMEOUT, text) from error
        if message["type"] == "http.request":
            self._is_awaited = message.get("more_body", False)
            self._bounds.count(self, len(message.get("body", b"")))
        return message

    async def send(self, message: Message) -> None:
        # Once the answer has begun nobody can be told any more; the connection closes itself.
        self._is_awaited = False
        self.is_answered = True
        await self._send(message)
