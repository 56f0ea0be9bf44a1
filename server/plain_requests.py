"""What a plain HTTP request hears at an address that only speaks WebSocket."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from server.errors import ErrorCode
from server.rest_requests import error_body


def answer_plain_requests(app: FastAPI, paths: Iterable[str]) -> None:
    """Say at these addresses, where nothing else is, that a WebSocket is awaited: 426, as RFC 9110 has it."""

    async def say_websocket(request: Request) -> JSONResponse:
        path = request.url.path
        text = f"{path} speaks WebSocket: connect to it with ws:// or wss://, see docs/protocol.md"
        return error_body(
            HTTPStatus.UPGRADE_REQUIRED, ErrorCode.METHOD_NOT_ALLOWED, text, Upgrade="websocket", Connection="Upgrade"
        )

    for path in paths:
        app.add_api_route(path, say_websocket, methods=["GET", "HEAD"], include_in_schema=False)
