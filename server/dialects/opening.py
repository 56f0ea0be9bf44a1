"""How a socket of a world's client begins, in every dialect: accept, check, and wait for a start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.websockets import WebSocket

from server.auth import accepted_subprotocol
from server.context import ServerContext
from server.endpoint import Dialog, Outbox, serve_socket
from server.errors import NotAllowed

LARGE_TEXT_CHARS = 64 * 1024
"""Messages above this (images in base64) are parsed in a thread."""


class StartingDialog(Dialog, Protocol):
    """A conversation that begins with a client's start."""

    owner: str | None

    def expect_start(self) -> None:
        """Close the socket if nothing begins on it in time."""
        ...


async def serve_dialog(
    websocket: WebSocket, context: ServerContext, create: Callable[[ServerContext, Outbox], StartingDialog]
) -> None:
    """Serve one socket. Who may not be here is told so as a message, which a page can read, unlike an HTTP status."""
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(subprotocol=accepted_subprotocol(offered))
    outbox = Outbox()
    dialog = create(context, outbox)
    try:
        context.auth.check_origin(websocket.headers, scheme=websocket.url.scheme)
        dialog.owner = context.auth.authenticate(websocket.headers, offered)
    except NotAllowed as error:
        dialog.send_error(error)
    context.metrics.connections.inc()
    dialog.expect_start()
    try:
        await serve_socket(
            websocket,
            dialog,
            outbox,
            stall_timeout_s=context.config.session.stall_timeout_s,
            max_messages_per_second=context.config.limits.max_messages_per_second,
        )
    finally:
        context.metrics.connections.dec()
