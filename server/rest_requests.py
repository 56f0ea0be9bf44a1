"""What REST handlers share: who asks, how a body is described, bodies within bounds, and the shape of an error."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse

from server.config import LimitsSection
from server.context import ServerContext
from server.dialects.world_messages import validate
from server.errors import BadInput, ErrorCode, ServerError, Unavailable
from server.limits import parse_json_object
from server.wire.messages import WireModel
from server.wire.rest import ErrorBody, RestError

ModelT = TypeVar("ModelT", bound=WireModel)

BODY = "body"
"""What errors call a body that is wrong as a whole."""

ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": RestError, "description": "What went wrong."}}


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def error_body(status: int, code: str, message: str, field: str | None = None, **headers: str) -> JSONResponse:
    """Make the one JSON shape that all errors have."""
    body = RestError(error=ErrorBody(code=code, message=message, field=field))
    return JSONResponse(body.model_dump(exclude_none=True), status_code=status, headers=headers)


def error_response(error: ServerError) -> JSONResponse:
    """Say an error of ours, with the headers that belong to it."""
    headers: dict[str, str] = {}
    if error.code is ErrorCode.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.kind.retryable:
        headers["Retry-After"] = "1"
    return error_body(error.kind.http_status, error.code, error.message, error.field, **headers)


def authorize(request: Request) -> str | None:
    """Check token and, for requests that change something, origin; returns the owner."""
    context = context_of(request)
    if request.method != "GET":
        context.auth.check_origin(request.headers, scheme=request.url.scheme)
    return context.auth.authenticate(request.headers)


def body_of(model: type[WireModel], *, required: bool = True) -> dict[str, Any]:
    """Describe a body that a handler reads by itself, because ours is bounded before it is parsed."""
    schema = model.model_json_schema()
    schema = _put_in_place(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _put_in_place(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they refer to: nothing else brings a body's parts among the components."""
    if isinstance(node, list):
        return [_put_in_place(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    target = definitions.get(str(node.get("$ref", "")).removeprefix("#/$defs/"), {})
    return {key: _put_in_place(value, definitions) for key, value in {**target, **node}.items() if key != "$ref"}


async def read_model(request: Request, model: type[ModelT], *, may_be_empty: bool = False) -> ModelT:
    """Read a JSON body within our limits. Raises `ServerError`."""
    limits = context_of(request).config.limits
    body = await read_body(request, limits.max_message_bytes, "limits.max_message_bytes")
    if may_be_empty and not body:
        return model()
    require_content_type(request, "application/json")
    return await parse_model(body, model, limits)


def content_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def require_content_type(request: Request, *accepted: str) -> None:
    """Raise `BadInput` for a body of another type."""
    content_type = content_type_of(request)
    if content_type not in accepted:
        raise BadInput(
            ErrorCode.BAD_CONTENT_TYPE,
            f"content-type: expected {' or '.join(accepted)}, got {content_type[:80]!r}",
            field="content-type",
        )


async def parse_model(body: bytes, model: type[ModelT], limits: LimitsSection) -> ModelT:
    """Parse JSON in a thread. Raises `BadInput`."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadInput(ErrorCode.BAD_JSON, "the body is not UTF-8", field=BODY) from error
    try:
        fields = await asyncio.to_thread(
            parse_json_object, text, max_depth=limits.max_json_depth, max_parts=limits.max_json_parts
        )
    except BadInput as error:
        error.field = error.field or BODY
        raise
    return validate(model, fields)


async def read_body(request: Request, max_bytes: int, key: str, *, field: str = BODY, form_bytes: int = 0) -> bytes:
    """Read a body of at most `max_bytes`, the setting `key`, and of a form around them.

    Raises `Unavailable` that names `field` and `key`.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes + form_bytes:
            text = f"{field}: expected at most {max_bytes} bytes ({key}), got more"
            raise Unavailable(ErrorCode.TOO_LARGE, text, field=field)
    return bytes(body)
