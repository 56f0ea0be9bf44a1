"""Where robots find the server, for a model of theirs and for any other."""

from __future__ import annotations

from fastapi import FastAPI, WebSocket

from server import robot_rest
from server.context import ServerContext
from server.dialects.robot import robot_endpoint, unsupported_endpoint
from server.wire.robot_messages import RobotForm

ADDRESSES: dict[str, RobotForm] = {
    "/": RobotForm.OFFICIAL,
    "/v1/robot": RobotForm.OFFICIAL,
    "/v1/realtime/robot/openpi": RobotForm.OPENPI,
}
"""Clients of the RoboArena server give no path."""


def mount(app: FastAPI, context: ServerContext) -> None:
    """Serve robots."""
    app.include_router(robot_rest.router)
    for path, form in ADDRESSES.items():
        _add(app, context, path, form)


def mount_refusals(app: FastAPI, context: ServerContext) -> None:
    """Tell robots that no model for them is served."""

    async def refuse(websocket: WebSocket) -> None:
        await unsupported_endpoint(websocket, context)

    for path in ADDRESSES:
        app.add_api_websocket_route(path, refuse)


def _add(app: FastAPI, context: ServerContext, path: str, form: RobotForm) -> None:
    async def robot(websocket: WebSocket) -> None:
        await robot_endpoint(websocket, context, form)

    app.add_api_websocket_route(path, robot)
