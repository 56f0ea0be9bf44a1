"""Rules about the HTTP interface."""

from __future__ import annotations

import json

from pydantic import ValidationError

from clients.conformance.check import Check, Context
from clients.conformance.errors import CheckFailed, require
from clients.conformance.http import Answer, request
from clients.conformance.picture import png
from clients.conformance.socket import Socket
from server.wire.messages import WireModel
from server.wire.rest import RestError, SessionCreated, SessionList, SessionView, UploadCreated

SECTION = "HTTP interface"


def _require_shape(answer: Answer, model: type[WireModel], *, status: int, what: str) -> None:
    require(answer.status == status, f"{what}: status {answer.status}, expected {status}")
    try:
        model.model_validate_json(answer.body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckFailed(f"{what}: {where}: {first['msg']}") from error


async def health_is_told(context: Context) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await request(context.target, "GET", path)
        require(answer.status == 200, f"GET {path}: status {answer.status} of a server that serves")
    metrics = await request(context.target, "GET", "/metrics")
    require(metrics.status == 200, f"GET /metrics: status {metrics.status}")


async def sessions_are_made_over_http(context: Context) -> None:
    target = context.target
    body = json.dumps({"protocol": 1, "prompt": target.prompt, "image": target.image}).encode()
    created = await request(target, "POST", "/v1/sessions", body=body)
    _require_shape(created, SessionCreated, status=201, what="POST /v1/sessions")
    session = created.json()
    path = f"/v1/sessions/{session['session_id']}"
    try:
        require(session["state"] == "parked", f"a session made over HTTP is {session['state']}, expected parked")
        _require_shape(await request(target, "GET", path), SessionView, status=200, what=f"GET {path}")
        listed = await request(target, "GET", "/v1/sessions")
        _require_shape(listed, SessionList, status=200, what="GET /v1/sessions")
        ids = [each["session_id"] for each in listed.json()["sessions"]]
        require(session["session_id"] in ids, "GET /v1/sessions does not list a session that was just made")
        async with await Socket.open(target) as socket:
            await socket.resume(session["resume_token"], -1)
            await socket.media()
            reset = await request(target, "POST", f"{path}/reset")
            _require_shape(reset, SessionView, status=200, what=f"POST {path}/reset")
            await socket.expect("session.state", state="active", run=1)
    finally:
        deleted = await request(target, "DELETE", path)
    require(deleted.status == 204, f"DELETE {path}: status {deleted.status}, expected 204")
    again = await request(target, "DELETE", path)
    require(again.status == 204, f"DELETE {path} for a second time: status {again.status}, expected 204")


async def http_errors_have_one_shape(context: Context) -> None:
    for path in ("/v1/sessions/no-such-session", "/no/such/page"):
        answer = await request(context.target, "GET", path)
        _require_shape(answer, RestError, status=404, what=f"GET {path}")
    wrong = await request(context.target, "POST", "/v1/sessions", body=b"{}")
    require(400 <= wrong.status < 500, f"POST /v1/sessions with an empty object: status {wrong.status}")
    _require_shape(wrong, RestError, status=wrong.status, what="POST /v1/sessions with an empty object")


async def uploads_begin_sessions(context: Context) -> None:
    answer = await request(context.target, "POST", "/v1/uploads", body=png(), content_type="image/png")
    _require_shape(answer, UploadCreated, status=201, what="POST /v1/uploads")
    async with await Socket.open(context.target) as socket:
        await socket.start(image={"upload_id": answer.json()["upload_id"]})
        await socket.media()
    wrong = await request(context.target, "POST", "/v1/uploads", body=b"not a picture", content_type="image/png")
    _require_shape(wrong, RestError, status=wrong.status, what="POST /v1/uploads with no picture")
    require(400 <= wrong.status < 500, f"POST /v1/uploads with no picture: status {wrong.status}")


CHECKS = (
    Check(name="http.health", section=SECTION, rule="/healthz, /readyz and /metrics answer", run=health_is_told),
    Check(
        name="http.sessions",
        section=SECTION,
        rule="create, list, resume, reset and delete",
        run=sessions_are_made_over_http,
    ),
    Check(
        name="http.errors", section=SECTION, rule="every error has the fields of error", run=http_errors_have_one_shape
    ),
    Check(name="http.uploads", section=SECTION, rule="an upload begins a session", run=uploads_begin_sessions),
)
