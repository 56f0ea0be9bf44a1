"""Refuse requests under a foreign host name, where anybody is served who reaches this machine's own address.

A page of a stranger can make its name resolve to 127.0.0.1 (DNS rebinding). The browser then takes this server for the
page's own origin; only the `Host` header still has the stranger's name. See `Authenticator.check_host`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from server.context import ServerContext
from server.errors import NotAllowed
from server.rest_requests import error_response


class HostCheck:
    """ASGI middleware in front of all routes: HTTP and WebSockets, with or without a token."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = Request(scope) if scope["type"] == "http" else WebSocket(scope, receive, send)
        try:
            self._context.auth.check_host(connection.headers)
        except NotAllowed as error:
            self._context.metrics.errors.labels(error.code).inc()
            response = error_response(error)
            if isinstance(connection, WebSocket):
                await connection.send_denial_response(response)
            else:
                await response(scope, receive, send)
            return
        await self._app(scope, receive, send)
