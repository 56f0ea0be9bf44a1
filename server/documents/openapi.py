"""The OpenAPI document: all of the HTTP interface, of servers of worlds and of robots, in one file.

A server's own `/openapi.json` has the routes that it serves. What differs here: tags, the token, and the errors of
FastAPI's own validation are left out, because ours have one shape (`RestError`).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server import rest, robot_rest
from server.wire.messages import PROTOCOL_VERSION

PUBLIC_PATHS = ("/healthz", "/readyz", "/metrics", "/v1/start-images/{name}", "/v1/layout")
"""What may be read without a token."""


def openapi_document() -> dict[str, Any]:
    app = FastAPI(
        title="worldserve",
        version=str(PROTOCOL_VERSION),
        description="Sessions without a socket, uploads, recordings, health. The sockets are in asyncapi.json.",
    )
    app.include_router(rest.router)
    app.include_router(robot_rest.router)
    document = app.openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = _operation_id(operation["operationId"], path, method)
            operation["tags"] = [_tag(path)]
            operation["responses"].pop("422", None)
            if path in PUBLIC_PATHS:
                operation["security"] = []
    document["security"] = [{"bearer": []}]
    components = document["components"]
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "Only where the server has tokens."}
    }
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    document["tags"] = [
        {"name": "worlds", "description": "Sessions with a world. Only on servers of a world model."},
        {"name": "robots", "description": "Sessions of robots. Only on servers of a robot model."},
        {"name": "server", "description": "What is served, and whether it is well."},
    ]
    return document


def _operation_id(given: str, path: str, method: str) -> str:
    """Shorten FastAPI's id, which ends with path and method, to the name of the function."""
    ending = "".join(letter if letter.isalnum() else "_" for letter in path) + f"_{method}"
    return given.removesuffix(ending)


def _tag(path: str) -> str:
    if path.startswith("/v1/robot"):
        return "robots"
    is_of_worlds = path.startswith(("/v1/sessions", "/v1/uploads", "/v1/start-images", "/v1/layout"))
    return "worlds" if is_of_worlds else "server"
