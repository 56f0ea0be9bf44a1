"""The REST interface: sessions without a socket, uploads, health, metrics. Every error is JSON of one shape."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.routing import Match

from server.actor import SessionActor
from server.dialects.world_messages import check_protocol
from server.errors import BadInput, ErrorCode, ServerError, UnknownId
from server.health import not_ready_reason, server_info
from server.limits import check_prompt
from server.recording import LOG_FILE, MP4_FILE
from server.rest_requests import (
    ERRORS,
    authorize,
    body_of,
    content_type_of,
    context_of,
    error_body,
    error_response,
    read_body,
    read_model,
)
from server.starting import check_start
from server.summaries import DescribedRoute
from server.uploads import MIME_TYPES, StartImage
from server.wire.messages import SessionState
from server.wire.rest import (
    CreateSession,
    ResetSessionBody,
    ServerInfo,
    SessionCreated,
    SessionList,
    SessionView,
    UploadCreated,
    WorldLayout,
)
from server.worker import WorkerStatus

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""What may be possible at an address."""

MULTIPART_OVERHEAD_BYTES = 16 * 1024
"""Room for the part headers around one image."""

FILE_PART_BYTES = 256 * 1024
"""What is read from a recording at once."""

router = APIRouter(responses=ERRORS, route_class=DescribedRoute)


# ---------------------------------------------------------------- sessions


@router.post("/v1/sessions", status_code=HTTPStatus.CREATED, openapi_extra=body_of(CreateSession))
async def create_session(request: Request) -> SessionCreated:
    """Create a session without a socket; connect one with the resume token before `resume_s` has passed."""
    context, owner = context_of(request), authorize(request)
    body = await read_model(request, CreateSession)
    check_protocol(body.protocol)
    check_prompt(body.prompt, max_chars=context.config.limits.max_prompt_chars)
    actor = await context.table.create(await check_start(body, context, owner=owner), owner=owner)
    view = _view(actor, context.clock())
    return SessionCreated(
        **view.model_dump(),
        resume_token=actor.resume_token,
        watch_token=actor.watch_token,
        resume_s=context.config.session.resume_s,
    )


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> SessionList:
    """List the caller's sessions."""
    context, owner = context_of(request), authorize(request)
    now = context.clock()
    return SessionList(sessions=[_view(actor, now) for actor in context.table.owned_by(owner)])


@router.get("/v1/sessions/{session_id}")
async def get_session(session_id: str, request: Request) -> SessionView:
    """Return where a session is: its state, run, chunks and pacing."""
    context, owner = context_of(request), authorize(request)
    return _view(context.table.find(session_id, owner), context.clock())


@router.post("/v1/sessions/{session_id}/reset", openapi_extra=body_of(ResetSessionBody, required=False))
async def reset_session(session_id: str, request: Request) -> SessionView:
    """Begin a new run; answers when the worker has."""
    context, owner = context_of(request), authorize(request)
    actor = context.table.find(session_id, owner)
    body = await read_model(request, ResetSessionBody, may_be_empty=True)
    if body.prompt is not None:
        check_prompt(body.prompt, max_chars=context.config.limits.max_prompt_chars)
    image: StartImage | None = None
    if body.image is not None:
        image = await context.images.read(body.image, owner=owner)
    actor.touch()
    await asyncio.shield(actor.begin_reset(prompt=body.prompt or "", seed=body.seed, image=image))
    return _view(actor, context.clock())


@router.delete("/v1/sessions/{session_id}", status_code=HTTPStatus.NO_CONTENT)
async def close_session(session_id: str, request: Request) -> Response:
    """Close a session; closing it again succeeds."""
    context, owner = context_of(request), authorize(request)
    if not context.table.has_ended(session_id, owner):
        await asyncio.shield(context.table.find(session_id, owner).begin_close("deleted"))
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.get("/v1/sessions/{session_id}/recording.mp4", response_class=StreamingResponse)
async def recording_mp4(session_id: str, request: Request) -> StreamingResponse:
    """Return the session's video so far, also after its end."""
    return await _recorded(request, session_id, MP4_FILE, "video/mp4")


@router.get("/v1/sessions/{session_id}/events.jsonl", response_class=StreamingResponse)
async def recording_events(session_id: str, request: Request) -> StreamingResponse:
    """Return the session's event log so far, also after its end."""
    return await _recorded(request, session_id, LOG_FILE, "application/jsonl")


async def _recorded(request: Request, session_id: str, name: str, mime: str) -> StreamingResponse:
    context, owner = context_of(request), authorize(request)
    path, num_bytes = context.recordings.find(session_id, owner, name)
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as error:
        raise UnknownId(ErrorCode.NOT_FOUND, f"the recording of {session_id[:64]!r} is gone") from error
    headers = {
        "Content-Length": str(num_bytes),
        "Content-Disposition": f'attachment; filename="{session_id}-{name}"',
        "Cache-Control": "no-store",
    }
    return StreamingResponse(_read_parts(file, num_bytes), media_type=mime, headers=headers)


async def _read_parts(file: BinaryIO, num_bytes: int) -> AsyncIterator[bytes]:
    """Yield the first `num_bytes` of a file that may be growing, and close it."""
    try:
        while num_bytes and (part := await asyncio.to_thread(file.read, min(num_bytes, FILE_PART_BYTES))):
            num_bytes -= len(part)
            yield part
    finally:
        file.close()


def _view(actor: SessionActor, now: float) -> SessionView:
    session = actor.session
    return SessionView(
        session_id=actor.session_id,
        state=session.state,
        epoch=session.epoch,
        run=session.run,
        num_chunks=session.next_chunk_index,
        prompt=session.prompt,
        seed=session.seed,
        format=actor.format,
        pacing=session.pacing,
        age_s=round(now - actor.created_at, 3),
        watchers=actor.num_watchers,
        recording=actor.recording,
    )


# ---------------------------------------------------------------- uploads and start images


@router.post(
    "/v1/uploads",
    status_code=HTTPStatus.CREATED,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "properties": {"image": {"type": "string", "format": "binary"}},
                        "required": ["image"],
                    }
                },
                **{mime: {"schema": {"type": "string", "format": "binary"}} for mime in MIME_TYPES},
            },
        }
    },
)
async def upload_image(request: Request) -> UploadCreated:
    """Keep a start image: the raw file as the body, or one file part named `image` in a form."""
    context, owner = context_of(request), authorize(request)
    limits = context.config.limits
    content_type = content_type_of(request)
    if content_type == "multipart/form-data":
        image = await _image_part(request, limits.max_image_bytes)
    elif content_type in MIME_TYPES or content_type == "application/octet-stream":
        image = await read_body(request, limits.max_image_bytes, "limits.max_image_bytes", field="image")
    else:
        expected = ", ".join((*MIME_TYPES, "application/octet-stream", "multipart/form-data"))
        raise BadInput(
            ErrorCode.BAD_CONTENT_TYPE,
            f"content-type: expected one of {expected}, got {content_type[:80]!r}",
            field="content-type",
        )
    if not image:
        raise BadInput(ErrorCode.BAD_IMAGE, "the image is empty", field="image")
    raw = await context.images.decode(image, field="image")
    upload_id = context.uploads.add(image, owner=owner)
    return UploadCreated(upload_id=upload_id, width=raw.size.width, height=raw.size.height)


@router.head("/v1/start-images/{name}", include_in_schema=False)
@router.get("/v1/start-images/{name}", response_class=Response)
async def start_image(name: str, request: Request) -> Response:
    """Return the file of a start image. Needs no token, like the page itself."""
    image = await context_of(request).start_images.read(name)
    mime = await asyncio.to_thread(_mime_of, image)
    return Response(image, media_type=mime, headers={"Cache-Control": "max-age=3600"})


def _mime_of(image: bytes) -> str:
    if image.startswith(b"\x89PNG"):
        return "image/png"
    return "image/jpeg" if image.startswith(b"\xff\xd8") else "image/webp"


async def _image_part(request: Request, max_image_bytes: int) -> bytes:
    body = await read_body(
        request, max_image_bytes, "limits.max_image_bytes", field="image", form_bytes=MULTIPART_OVERHEAD_BYTES
    )

    async def stream() -> AsyncIterator[bytes]:
        yield body

    try:
        form = await MultiPartParser(request.headers, _as_generator(stream()), max_files=1, max_fields=8).parse()
    except (MultiPartException, KeyError) as error:
        raise BadInput(ErrorCode.BAD_MESSAGE, f"the form can't be read: {error}", field="image") from error
    try:
        part = form.get("image")
        if part is None or isinstance(part, str):
            raise BadInput(ErrorCode.BAD_MESSAGE, "image: expected a file part of this name", field="image")
        return await part.read()
    finally:
        await form.close()


async def _as_generator(stream: AsyncIterator[bytes]) -> Any:
    async for part in stream:
        yield part


# ---------------------------------------------------------------- the server itself


@router.get("/v1/info")
async def info(request: Request) -> ServerInfo:
    """Return what is served: model, geometry, precision, capacity, memory, versions, start images, load stage."""
    authorize(request)
    return server_info(context_of(request))


@router.get("/v1/layout")
async def layout(request: Request, response: Response) -> WorldLayout | None:
    """What lies where in the served world, for a map: the checkpoint's `layout.json`, or null. Needs no token."""
    response.headers["Cache-Control"] = "no-cache"
    return await asyncio.to_thread(_read_layout, context_of(request).config.checkpoint_path / "layout.json")


def _read_layout(path: Path) -> WorldLayout | None:
    if not path.is_file():
        return None
    try:
        return WorldLayout.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise ServerError(ErrorCode.INTERNAL, f"layout.json of the checkpoint: {field}{first['msg']}") from error


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_class=JSONResponse)
async def readyz(request: Request) -> JSONResponse:
    """A session could start now."""
    context = context_of(request)
    reason = not_ready_reason(context)
    if reason is None:
        return JSONResponse({"ready": True})
    headers = {} if context.worker.status is WorkerStatus.FAILED else {"Retry-After": "1"}
    return JSONResponse(
        {"ready": False, "status": context.worker.status, "reason": reason},
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
        headers=headers,
    )


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """Return the metrics of the server and its worker as Prometheus text."""
    context = context_of(request)
    table, values = context.table, context.metrics
    states = Counter(actor.session.state for actor in table.all())
    states[SessionState.CLEANUP_FAILED] = table.num_tombstones
    for state in SessionState:
        values.sessions.labels(state).set(states[state])
    values.ready.set(not_ready_reason(context) is None)
    values.capacity.set(0 if context.worker.info is None else context.worker.info.capacity_sessions)
    values.resident.set(table.num_resident)
    values.queued.set(table.num_waiting)
    values.tasks.set(len(asyncio.all_tasks()))
    values.worker_ready.set(context.worker.status is WorkerStatus.READY)
    values.worker_generation.set(context.worker.generation)
    values.set_memory(context.worker.memory)
    context.robots.observe()
    return PlainTextResponse(values.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


# ---------------------------------------------------------------- errors


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the application the one JSON shape."""
    app.add_exception_handler(ServerError, _server_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unexpected_error)


async def _server_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServerError)
    context_of(request).metrics.errors.labels(error.code).inc()
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes: dict[int, ErrorCode] = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED}
    code = codes.get(error.status_code, ErrorCode.BAD_MESSAGE)
    if error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request))
        text = f"{request.method[:20]} is not possible at {request.url.path[:200]}: expected {allowed}"
        return error_body(405, code, text, Allow=allowed)
    text = f"there is nothing at {request.url.path[:200]}" if error.status_code == 404 else str(error.detail)
    return error_body(error.status_code, code, text, **dict(error.headers or {}))


def _allowed_methods(request: Request) -> list[str]:
    """List what can be done at an address. The framework names the methods of the first of its routes alone."""
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    routes = request.app.routes
    return [method for method, scope in scopes.items() if any(it.matches(scope)[0] is Match.FULL for it in routes)]


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(step) for step in first["loc"][1:])
    return error_body(422, ErrorCode.BAD_MESSAGE, f"{field}: {first['msg']}", field or None)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    """Tell nothing of a bug; starlette logs the traceback."""
    return error_body(500, ErrorCode.INTERNAL, "the server failed to handle this request")
