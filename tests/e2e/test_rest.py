"""REST, health, metrics and the page, over a real socket with a scripted worker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from server.app import create_app
from server.config import LimitsSection, ModelSection, ServerSection, SessionSection, StartImageConfig
from tests.support.server_client import WorldSocket, fake_config, image_field, png, running
from tests.support.server_worker import ScriptedWorker, model_info
from worldmodel.errors import OutcomeUnknown
from worldmodel.messages import LoadStage

MODEL = ModelSection(
    name="fake",
    checkpoint="package:worldmodel/data/demo_world",
    width=32,
    height=32,
    fps=12,
    prompts=("a town", "a desert"),
    notice="a test",
    start_images=(
        StartImageConfig(name="day", file="examples/day.png", prompt="a town"),
        StartImageConfig(name="gone", file="examples/gone.png", prompt="nothing"),
    ),
)
CREATE = {"prompt": "a town", "image": image_field()}


class Rest:
    """A running application, its worker, and an HTTP client for it."""

    def __init__(self, url: str, worker: ScriptedWorker, http: httpx.AsyncClient) -> None:
        self.url = url
        self.worker = worker
        self.http = http

    async def error(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Ask for something that fails; returns status and the body's `error`."""
        response = await self.http.request(method, path, **options)
        body = response.json()
        assert body.keys() == {"error"}, body
        assert response.headers["content-type"] == "application/json"
        error: dict[str, Any] = body["error"]
        return response.status_code, error

    async def until_gone(self, session_id: str) -> None:
        """Wait until a session that was closed is not found; the time-out only ends a test that hangs."""
        async with asyncio.timeout(60):
            while (response := await self.http.get(f"/v1/sessions/{session_id}")).status_code == 200:
                assert response.json()["state"] in ("closing", "closed")
        assert response.status_code == 404

    async def create(self, **fields: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/sessions", json={**CREATE, **fields})
        assert response.status_code == 201, response.text
        created: dict[str, Any] = response.json()
        return created


@asynccontextmanager
async def serving(worker: ScriptedWorker | None = None, **sections: Any) -> AsyncIterator[Rest]:
    worker = worker or ScriptedWorker()
    config = fake_config(model=MODEL, **sections)
    async with (
        running(create_app(config, worker=worker), config) as url,
        # A loaded machine may need longer than the default of five seconds.
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http,
    ):
        yield Rest(url, worker, http)


@pytest.fixture
async def rest() -> AsyncIterator[Rest]:
    async with serving() as it:
        yield it


# ---------------------------------------------------------------- sessions


async def test_a_session_made_over_rest_is_taken_up_by_a_socket(rest: Rest) -> None:
    created = await rest.create(seed=7, event_base=3)
    assert (created["state"], created["epoch"], created["seed"]) == ("parked", 0, 7)
    assert (await rest.http.get(f"/v1/sessions/{created['session_id']}")).json()["state"] == "parked"
    async with await WorldSocket.open(rest.url) as socket:
        started = await socket.resume(created["resume_token"], -1)
        assert (started["session_id"], started["epoch"]) == (created["session_id"], 1)
        assert (await socket.media()).header.chunk_index == 0
        (listed,) = (await rest.http.get("/v1/sessions")).json()["sessions"]
        assert (listed["state"], listed["epoch"]) == ("active", 1)
        assert "resume_token" not in listed
        response = await rest.http.post(f"/v1/sessions/{created['session_id']}/reset", json={"prompt": "night"})
        assert (response.status_code, response.json()["run"], response.json()["prompt"]) == (200, 1, "night")
        await socket.expect("session.state", state="active", run=1)
        assert (await rest.http.delete(f"/v1/sessions/{created['session_id']}")).status_code == 204
        assert (await socket.expect("session.closed"))["reason"] == "deleted"
        assert await socket.closed() == 1000


async def test_a_reset_clears_the_prompt_and_keeps_the_seed_unless_they_are_given(rest: Rest) -> None:
    created = await rest.create(prompt="a town", seed=7)
    path = f"/v1/sessions/{created['session_id']}/reset"
    (session,) = rest.worker.sessions.values()
    for body, expected in [({}, ("", 7)), ({"prompt": "night", "seed": 8}, ("night", 8)), ({}, ("", 8))]:
        view = (await rest.http.post(path, json=body)).json()
        assert (view["prompt"], view["seed"]) == (session.prompt, session.seed) == expected


async def test_a_reset_while_parked_is_seen_by_the_next_socket(rest: Rest) -> None:
    created = await rest.create()
    async with await WorldSocket.open(rest.url) as socket:
        await socket.resume(created["resume_token"], -1)
        for _ in range(3):
            await socket.media()
    assert (await rest.http.post(f"/v1/sessions/{created['session_id']}/reset")).status_code == 200
    async with await WorldSocket.open(rest.url) as socket:
        assert (await socket.resume(created["resume_token"], 2, run=0))["run"] == 1
        # A chunk that was under way when the reset came may still arrive, ahead of the new run.
        while (header := (await socket.media()).header).run == 0:
            assert header.chunk_index is not None
            assert header.chunk_index > 2
        assert (header.run, header.chunk_index) == (1, 0)


async def test_closing_twice_succeeds_and_a_stranger_is_not_found(rest: Rest) -> None:
    created = await rest.create()
    path = f"/v1/sessions/{created['session_id']}"
    assert (await rest.http.delete(path)).status_code == 204
    assert rest.worker.sessions == {}
    assert (await rest.http.delete(path)).status_code == 204
    assert (await rest.error("GET", path))[0] == 404
    assert (await rest.error("DELETE", "/v1/sessions/s-unknown"))[0] == 404


async def test_a_close_that_failed_is_an_error_until_it_succeeds(rest: Rest, caplog: pytest.LogCaptureFixture) -> None:
    created = await rest.create()
    rest.worker.close_failures.append(OutcomeUnknown("stuck"))
    path = f"/v1/sessions/{created['session_id']}"
    status, error = await rest.error("DELETE", path)
    assert (status, error["code"]) == (500, "cleanup_failed")
    assert (await rest.http.get(path)).json()["state"] == "cleanup_failed"
    assert (await rest.error("POST", f"{path}/reset"))[1]["code"] == "bad_state"
    assert (await rest.http.delete(path)).status_code == 204
    assert "did not close it" in caplog.text


@pytest.mark.parametrize(
    ("change", "status", "code", "field"),
    [
        ({"prompt": None}, 422, "bad_message", "prompt"),
        ({"prompt": "x" * 2001}, 422, "prompt_too_long", "prompt"),
        ({"image": {"name": "mars"}}, 422, "unknown_image", "image.name"),
        ({"image": {"name": "gone"}}, 422, "unknown_image", "image.name"),
        ({"image": {"base64": ""}}, 422, "bad_image", "image.base64"),
        ({"image": {}}, 422, "bad_image", "image"),
        ({"protocol": 3}, 422, "bad_protocol", "protocol"),
        ({"model": "x"}, 422, "unknown_model", "model"),
        ({"size": "1x1"}, 422, "bad_size", "size"),
        ({"format": "latent"}, 422, "format_not_allowed", "format"),
        ({"type": "session.start"}, 422, "bad_message", "type"),
    ],
)
async def test_bad_fields_are_named(rest: Rest, change: dict[str, Any], status: int, code: str, field: str) -> None:
    got, error = await rest.error("POST", "/v1/sessions", json={**CREATE, **change})
    assert (got, error["code"], error["field"]) == (status, code, field)
    assert rest.worker.sessions == {}


async def test_the_prompt_of_a_reset_is_bounded_too(rest: Rest) -> None:
    created = await rest.create()
    path = f"/v1/sessions/{created['session_id']}"
    got, error = await rest.error("POST", f"{path}/reset", json={"prompt": "x" * 2001})
    assert (got, error["code"], error["field"]) == (422, "prompt_too_long", "prompt")
    assert (await rest.http.get(path)).json()["run"] == 0


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {"content-type": "application/json"}, 400, "bad_json"),
        (b"\xff", {"content-type": "application/json"}, 400, "bad_json"),
        (b"[]", {"content-type": "application/json"}, 400, "bad_json"),
        (b"", {"content-type": "application/json"}, 400, "bad_json"),
        (b'{"a":' * 100_000, {"content-type": "application/json"}, 400, "bad_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "bad_content_type"),
        (b"{}", {}, 415, "bad_content_type"),
        (b" " * 2_000_001, {"content-type": "application/json"}, 413, "too_large"),
    ],
    ids=["open", "not UTF-8", "a list", "empty", "deep", "text", "no type", "long"],
)
async def test_bad_bodies_are_refused(body: bytes, headers: dict[str, str], status: int, code: str) -> None:
    async with serving(limits=LimitsSection(max_message_bytes=2_000_000)) as rest:
        got, error = await rest.error("POST", "/v1/sessions", content=body, headers=headers)
        assert (got, error["code"]) == (status, code)
        assert error["field"] == ("content-type" if code == "bad_content_type" else "body")
        assert code != "too_large" or "(limits.max_message_bytes)" in error["message"]


async def test_a_number_that_is_none_is_named_in_the_body(rest: Rest) -> None:
    headers = {"content-type": "application/json"}
    status, error = await rest.error("POST", "/v1/sessions", content=b'{"image": {"seed": NaN}}', headers=headers)
    assert (status, error["code"], error["field"]) == (400, "bad_json", "image.seed")


async def test_a_full_server_refuses_but_parked_sessions_make_room() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as rest:
        first = await rest.create()
        second = await rest.create()
        assert list(rest.worker.sessions) == [second["session_id"]]
        await rest.until_gone(first["session_id"])
        async with await WorldSocket.open(rest.url) as socket:
            await socket.resume(second["resume_token"], -1)
            status, error = await rest.error("POST", "/v1/sessions", json=CREATE)
            assert (status, error["code"]) == (503, "capacity")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/sessions/none", 404, "not_found"),
        ("GET", "/v1/sessions/", 404, "not_found"),
        ("POST", "/v1/sessions/none/reset", 404, "not_found"),
        ("PUT", "/v1/sessions", 405, "method_not_allowed"),
        ("GET", "/v1/start-images/mars", 404, "not_found"),
        ("GET", "/v1/start-images/gone", 404, "not_found"),
        ("GET", "/v1/start-images/..%2f..%2fmodel_index.json", 404, "not_found"),
        ("GET", "/static/none.js", 404, "not_found"),
        ("GET", "/static/__init__.py", 404, "not_found"),
        ("GET", "/static/%2e%2e/__init__.py", 404, "not_found"),
        ("GET", "/static/..%2f..%2fpyproject.toml", 404, "not_found"),
        ("GET", "/static/%00", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/world", 426, "method_not_allowed"),
        ("GET", "/v1/realtime/video", 426, "method_not_allowed"),
    ],
)
async def test_every_error_has_the_same_shape(rest: Rest, method: str, path: str, status: int, code: str) -> None:
    got, error = await rest.error(method, path)
    assert (got, error["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/sessions", "GET, POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/v1/start-images/day", "GET, HEAD"),
        ("PATCH", "/v1/sessions/x", "DELETE, GET"),
    ],
)
async def test_a_method_that_is_not_possible_is_answered_with_those_that_are(
    rest: Rest, method: str, path: str, allowed: str
) -> None:
    response = await rest.http.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json()["error"]["message"] == f"{method} is not possible at {path}: expected {allowed}"


# ---------------------------------------------------------------- uploads and images


async def test_an_upload_starts_sessions(rest: Rest) -> None:
    raw = await rest.http.post("/v1/uploads", content=png(20, 10), headers={"content-type": "image/png"})
    form = await rest.http.post("/v1/uploads", files={"image": ("x.jpg", png(8, 8, format="JPEG"), "image/jpeg")})
    assert (raw.status_code, raw.json()["width"], raw.json()["height"]) == (201, 20, 10)
    assert form.json()["upload_id"] != raw.json()["upload_id"]
    created = await rest.create(image={"upload_id": raw.json()["upload_id"]})
    assert next(iter(rest.worker.sessions.values())).image_bytes == 20 * 10 * 3
    assert created["state"] == "parked"


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"content": b"GIF89a", "headers": {"content-type": "image/png"}}, 422, "bad_image"),
        ({"content": b"", "headers": {"content-type": "image/png"}}, 422, "bad_image"),
        ({"content": png(), "headers": {"content-type": "text/plain"}}, 415, "bad_content_type"),
        ({"content": b"x" * 60_000, "headers": {"content-type": "image/png"}}, 413, "too_large"),
        ({"content": png(101, 100), "headers": {"content-type": "image/png"}}, 422, "bad_image"),
        ({"files": {"image": ("x.png", b"x" * 70_000, "image/png")}}, 413, "too_large"),
        ({"files": {"other": ("x.png", png(), "image/png")}}, 422, "bad_message"),
        ({"data": {"image": "text"}, "files": {"x": b""}}, 422, "bad_message"),
        ({"files": [("image", png()), ("image", png())]}, 422, "bad_message"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, 422, "bad_message"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 422, "bad_message"),
    ],
)
async def test_bad_uploads_are_refused(options: dict[str, Any], status: int, code: str) -> None:
    async with serving(limits=LimitsSection(max_image_bytes=50_000, max_image_pixels=10_000)) as rest:
        got, error = await rest.error("POST", "/v1/uploads", **options)
        assert (got, error["code"]) == (status, code)
        assert error["field"] == ("content-type" if code == "bad_content_type" else "image")
        if code == "too_large":
            # The same number for a file alone and in a form.
            assert error["message"] == "image: expected at most 50000 bytes (limits.max_image_bytes), got more"


async def test_start_images_are_offered_and_served(rest: Rest) -> None:
    info = (await rest.http.get("/v1/info")).json()
    offer = info["start_images"][0]
    assert offer == {"name": "day", "prompt": "a town", "url": "/v1/start-images/day"}
    response = await rest.http.get(offer["url"])
    assert response.headers["content-type"] == "image/png"
    assert response.content.startswith(b"\x89PNG")
    await rest.create(image={"name": "day"})


# ---------------------------------------------------------------- rights


async def test_rest_asks_for_the_token_and_knows_owners() -> None:
    async with serving(server=ServerSection(tokens=("alpha", "beta"))) as rest:
        alpha, beta = ({"Authorization": f"Bearer {token}"} for token in ("alpha", "beta"))
        for method, path in (
            ("GET", "/v1/info"),
            ("GET", "/v1/sessions"),
            ("POST", "/v1/sessions"),
            ("POST", "/v1/uploads"),
        ):
            status, error = await rest.error(method, path)
            assert (status, error["code"]) == (401, "unauthorized")
        created = (await rest.http.post("/v1/sessions", json=CREATE, headers=alpha)).json()
        path = f"/v1/sessions/{created['session_id']}"
        assert (await rest.http.get(path, headers=alpha)).status_code == 200
        assert (await rest.error("GET", path, headers=beta))[0] == 404
        assert (await rest.error("DELETE", path, headers=beta))[0] == 404
        assert (await rest.http.get("/v1/sessions", headers=beta)).json() == {"sessions": []}
        for open_path in ("/healthz", "/readyz", "/metrics", "/", "/v1/start-images/day", "/v1/layout"):
            assert (await rest.http.get(open_path)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/info", "/v1/sessions", "/healthz", "/", "/static/player.js", "/nothing"])
async def test_a_name_that_was_bent_to_this_machine_is_refused(rest: Rest, path: str) -> None:
    status, error = await rest.error("GET", path, headers={"host": "evil.example"})
    assert (status, error["code"], error["field"]) == (403, "origin_not_allowed", "host")
    assert (await rest.http.get("/v1/info", headers={"host": "localhost:1"})).status_code == 200


@pytest.mark.parametrize("path", ["v1/world", "v1/robot"])
async def test_a_bent_name_gets_no_socket_either(rest: Rest, path: str) -> None:
    port = httpx.URL(rest.url).port
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"ws://evil.example:{port}/{path}", host="127.0.0.1", port=port)
    assert caught.value.response.status_code == 403
    assert b"origin_not_allowed" in (caught.value.response.body or b"")


@pytest.mark.parametrize("path", ["v1/worlds", "healthz"])
async def test_a_socket_at_a_wrong_address_is_answered_with_404(rest: Rest, path: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"ws://127.0.0.1:{httpx.URL(rest.url).port}/{path}")
    assert caught.value.response.status_code == 404
    error = json.loads(caught.value.response.body or b"")["error"]
    assert (error["code"], error["message"]) == ("not_found", f"there is no WebSocket at /{path}")


async def test_a_proxy_may_hand_on_the_name_of_a_listed_origin() -> None:
    async with serving(server=ServerSection(allowed_origins=("https://world.example",))) as rest:
        assert (await rest.http.get("/v1/info", headers={"host": "world.example"})).status_code == 200


async def test_pages_of_other_origins_change_nothing(rest: Rest) -> None:
    headers = {"Origin": "http://evil.example"}
    status, error = await rest.error("POST", "/v1/sessions", json=CREATE, headers=headers)
    assert (status, error["code"]) == (403, "origin_not_allowed")
    assert rest.worker.sessions == {}


# ---------------------------------------------------------------- health


async def test_health_tells_the_truth_from_the_first_moment() -> None:
    worker = ScriptedWorker(ready=False)
    async with serving(worker) as rest:
        assert (await rest.http.get("/healthz")).status_code == 200
        worker.progresses(LoadStage.VAE, 0.4)
        response = await rest.http.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "status": "loading", "reason": "the model is loading: vae, 40%"}
        info = (await rest.http.get("/v1/info")).json()
        assert (info["ready"], info["load"]["stage"], info["load"]["percent"]) == (False, "vae", 40)
        assert (info["model"], info["capacity"], info["error"]) == (None, None, None)
        status, error = await rest.error("POST", "/v1/sessions", json=CREATE)
        assert (status, error["code"]) == (503, "worker_unavailable")
        worker.becomes_ready()
        assert (await rest.http.get("/readyz")).json() == {"ready": True}
        worker.dies()
        assert "killed by signal 9" in (await rest.http.get("/readyz")).json()["reason"]
        worker.fails_for_good("no such checkpoint")
        response = await rest.http.get("/readyz")
        assert response.json()["status"] == "failed"
        assert (await rest.http.get("/v1/info")).json()["error"] == "no such checkpoint"
        assert (await rest.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(("leaked", "ready"), [(0, True), (10, True), (11, False)])
async def test_leaked_pages_that_would_refuse_a_session_make_it_unready(leaked: int, ready: bool) -> None:
    async with serving() as rest:
        rest.worker.leaked_pages = leaked
        response = await rest.http.get("/readyz")
        assert response.status_code == (200 if ready else 503)
        assert ready or "pages have leaked" in response.json()["reason"]


async def test_a_full_worker_is_ready(rest: Rest) -> None:
    for _ in range(2):
        await rest.create()
    assert (await rest.http.get("/readyz")).status_code == 200


async def test_info_shows_effective_values(rest: Rest) -> None:
    await rest.create()
    info = (await rest.http.get("/v1/info")).json()
    assert info["ready"] is True
    assert (info["model"]["precision"], info["model"]["attention_backend"]) == ("fp32", "none")
    assert info["capacity"] == {
        "sessions": 2,
        "resident": 1,
        "waiting": 0,
        "total_pages": 20,
        "free_pages": 10,
        "kv_bytes_per_session": 1000,
    }
    assert (info["notice"], info["prompts"]) == ("a test", ["a town", "a desert"])


async def test_metrics_count_what_happened(rest: Rest) -> None:
    async with await WorldSocket.open(rest.url) as socket:
        await socket.start()
        await socket.media()
        await socket.send("session.event", event_id=1, prompt="x")
        while not (await socket.media()).header.applied:
            pass
        await socket.send("session.event", event_id=1, prompt="x")
        await socket.error(code="duplicate")
        response = await rest.http.get("/metrics")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["worldserve_sessions", "active"] == 1
    assert samples["worldserve_connections",] == 1
    assert samples["worldserve_chunks_total",] >= 2
    assert samples["worldserve_events_total", "queued"] == 1
    assert samples["worldserve_events_total", "applied"] == 1
    assert samples["worldserve_events_total", "refused"] == 1
    assert samples["worldserve_errors_total", "duplicate"] == 1
    assert samples["worldserve_pages", "free"] == 10
    assert samples["worldserve_chunk_stage_seconds_count", "encode"] >= 2
    received_bytes = sum(len(chunk.payload) for chunk in socket.chunks)
    assert samples["worldserve_sent_bytes_total",] >= received_bytes > 0


async def test_two_applications_count_apart() -> None:
    async with serving() as one, serving() as other:
        await one.create()
        assert "worldserve_sessions_started_total 0.0" in (await other.http.get("/metrics")).text


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize(
    ("path", "mime"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/static/app.js", "text/javascript; charset=utf-8"),
        ("/static/style.css", "text/css; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml"),
    ],
)
async def test_the_page_is_served_with_its_types_and_policy(rest: Rest, path: str, mime: str) -> None:
    response = await rest.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == mime
    assert response.headers["cache-control"] == "no-cache"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_openapi_document_names_every_path(rest: Rest) -> None:
    document = (await rest.http.get("/openapi.json")).json()
    assert {"/v1/sessions", "/v1/sessions/{session_id}", "/v1/uploads", "/v1/info"} <= document["paths"].keys()
    body = document["paths"]["/v1/sessions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["required"]) == {"prompt", "image"}


def test_the_server_never_imports_torch() -> None:
    code = (
        "import sys, json\n"
        "import server.app, server.serving, server.cli\n"
        "from tests.support.server_client import fake_config\n"
        "server.app.create_app(fake_config())\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] in ('torch', 'diffusers', 'kvcache')]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(result.stdout) == []


async def test_sessions_end_by_themselves_when_nobody_comes() -> None:
    async with serving(session=SessionSection(resume_s=0.0)) as rest:
        created = await rest.create()
        # Expired at once: closed, or about to be.
        response = await rest.http.delete(f"/v1/sessions/{created['session_id']}")
        assert response.status_code == 204
        assert rest.worker.sessions == {}
