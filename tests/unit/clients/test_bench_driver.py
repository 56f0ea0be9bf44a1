"""The benchmark against a stand-in server: what ends early, and what is not there to be measured at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from clients.bench.__main__ import choose_beginning, read_run
from clients.bench.driver import Beginning, Driver
from clients.bench.errors import BenchError
from clients.bench.job import Job, read_job
from clients.bench.probe import memory_sample, read_info, require_room
from server.wire.messages import ErrorMessage, StartImage
from server.wire.rest import CapacityView, LoadView, MemoryView, ServerInfo
from tests.support.client_standin_server import FIRST_FRAMES, FRAMES, StandinServer, standin_server


@pytest.fixture
async def server() -> AsyncIterator[StandinServer]:
    async with standin_server() as standin:
        yield standin


def make_job(**fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "url": None,
        "spare_image": Path("spare.png"),
        "prompt": "a town",
        "num_sessions": 1,
        "num_chunks": 6,
        "pacing": "free",
        "events_per_second": 0.0,
        "seed": 3,
        "time_limit_s": 60.0,
        "chunk_timeout_s": 60.0,
        "command": "worldserve bench",
    }
    return Job(**(defaults | fields))


def make_driver(server: StandinServer, job: Job) -> Driver:
    return Driver(job, server.url, Beginning(image="day", prompt="a town"), on_chunk=lambda: None)


# ---------------------------------------------------------------- sessions


async def test_each_session_gets_its_chunks(server: StandinServer) -> None:
    counted = []
    job = make_job(num_sessions=2)
    driver = Driver(job, server.url, Beginning(image="day", prompt="a town"), on_chunk=lambda: counted.append(1))
    sessions = await driver.run()
    assert len(counted) == 12
    for session in sessions:
        assert [chunk.chunk_index for chunk in session.chunks] == list(range(6))
        assert [chunk.num_frames for chunk in session.chunks] == [FIRST_FRAMES] + 5 * [FRAMES]
        times_s = [session.began_s, session.started_s or 0.0, *(chunk.arrived_s for chunk in session.chunks)]
        assert times_s == sorted(times_s)
        assert all(chunk.num_bytes > 0 for chunk in session.chunks)
        assert session.ended is None
    assert sorted(start["seed"] for start in server.sent("session.start")) == [3, 4]


async def test_a_lost_link_keeps_what_came_before(server: StandinServer) -> None:
    server.behaviour.cut_before_chunks = {4}
    (session,) = await make_driver(server, make_job()).run()
    assert [chunk.chunk_index for chunk in session.chunks] == [0, 1, 2, 3]
    assert session.ended is not None
    assert session.ended.startswith("session 0 ended after 4 chunks: ")
    assert len(server.sent("session.start")) == 1, "a lost link must not be resumed"


async def test_a_refused_start_is_the_whole_error(server: StandinServer) -> None:
    server.behaviour.refuse_start = ErrorMessage(code="capacity", message="all places are taken", retryable=True)
    with pytest.raises(BenchError, match="session 0 did not start: capacity: all places are taken"):
        await make_driver(server, make_job()).run()


async def test_a_server_that_stops_making_chunks_is_given_up(server: StandinServer) -> None:
    """The time for a chunk is short from the third one on; before that it has as much as a busy machine needs."""
    server.behaviour.max_chunks = 3
    counted = []

    def on_chunk() -> None:
        counted.append(1)
        if len(counted) == 3:
            driver._job = make_job(chunk_timeout_s=0.05)

    driver = Driver(make_job(), server.url, Beginning(image="day", prompt="a town"), on_chunk=on_chunk)
    (session,) = await driver.run()
    assert len(session.chunks) == 3
    assert session.ended == "session 0 ended after 3 chunks: no chunk came for 0.05 s"


async def test_the_time_limit_ends_the_run(server: StandinServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over as soon as there are two chunks."""
    server.behaviour.max_chunks = 2
    loop, timeout_at = asyncio.get_running_loop(), asyncio.timeout_at
    began_s, limits, counted = loop.time(), list[asyncio.Timeout](), []

    def note_first(when_s: float) -> asyncio.Timeout:
        limit = timeout_at(when_s)
        if not limits:
            assert began_s + 60.0 <= when_s <= loop.time() + 60.0
            limits.append(limit)
        return limit

    def on_chunk() -> None:
        counted.append(1)
        if len(counted) == 2:
            limits[0].reschedule(loop.time())

    monkeypatch.setattr("clients.bench.driver.asyncio.timeout_at", note_first)
    job = make_job(time_limit_s=60.0)
    (session,) = await Driver(job, server.url, Beginning(image="day", prompt="a town"), on_chunk=on_chunk).run()
    assert len(session.chunks) == 2
    assert session.ended == "the time limit of 60 s was reached"


async def test_no_chunk_is_an_error(server: StandinServer) -> None:
    server.behaviour.max_chunks = 0
    with pytest.raises(BenchError, match="session 0 ended after 0 chunks: no chunk came"):
        await make_driver(server, make_job(chunk_timeout_s=0.05)).run()


async def test_nobody_there() -> None:
    job = make_job()
    driver = Driver(job, "ws://127.0.0.1:1", Beginning(image="day", prompt="a town"), on_chunk=lambda: None)
    with pytest.raises(BenchError, match=r"cannot connect to ws://127\.0\.0\.1:1"):
        await driver.run()


# ---------------------------------------------------------------- the server's word


def make_info(*, ready: bool = True, sessions: int = 3, resident: int = 0, **fields: Any) -> ServerInfo:
    defaults: dict[str, Any] = {
        "version": "0.1",
        "protocol": 1,
        "status": "ready",
        "ready": ready,
        "reason": None if ready else "the model is loading: vae, 40%",
        "error": None,
        "load": LoadView(stage="ready", fraction=1.0, percent=100, detail=""),
        "served_model": "fake",
        "width": 64,
        "height": 48,
        "fps": 12,
        "model": None,
        "capacity": CapacityView(
            sessions=sessions, resident=resident, waiting=0, total_pages=9, free_pages=9, kv_bytes_per_session=7
        ),
        "memory": MemoryView(worker_rss_bytes=2, device_bytes=0, server_peak_rss_bytes=1),
        "versions": {},
        "notice": "",
        "start_images": [],
        "begin_image": None,
        "prompts": [],
    }
    return ServerInfo(**(defaults | fields))


def test_a_server_with_room_will_do():
    require_room(make_info(resident=1), url="u", num_sessions=2)


def test_a_server_that_loads_is_not_ready():
    with pytest.raises(BenchError, match="the server at u is not ready: the model is loading: vae, 40%"):
        require_room(make_info(ready=False), url="u", num_sessions=1)


def test_too_little_room_is_said_in_numbers():
    with pytest.raises(BenchError, match=r"3 sessions were asked for, .* at u has room for 2: 3 places .*1 taken"):
        require_room(make_info(resident=1), url="u", num_sessions=3)


def test_memory_of_a_server_without_a_device():
    sample = memory_sample(make_info())
    assert (sample.server_bytes, sample.worker_bytes, sample.device_bytes) == (1, 2, None)


def test_the_start_image_is_the_servers_own_if_it_has_one(tmp_path: Path):
    spare = tmp_path / "spare.png"
    spare.write_bytes(b"a picture")
    job = make_job(spare_image=spare)
    offers = [StartImage(name=name, prompt=f"{name} prompt", url="/") for name in ("day", "night")]
    assert choose_beginning(job, make_info(start_images=offers, begin_image="night")) == (
        Beginning(image="night", prompt="night prompt"),
        "night",
    )
    assert choose_beginning(job, make_info(start_images=offers))[1] == "day"
    given = make_job(spare_image=spare, prompt="snow", prompt_given=True)
    assert choose_beginning(given, make_info(start_images=offers))[0].prompt == "snow"
    assert choose_beginning(job, make_info()) == (Beginning(image=b"a picture", prompt="a town"), "synthetic")


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://[::1"])
def test_a_wrong_url_is_one_sentence(url: str):
    with pytest.raises(BenchError, match=r"url|Invalid IPv6"):
        read_info(url, None)


@contextmanager
def http_server(status: int, body: bytes) -> Iterator[str]:
    """A server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", "is no worldserve of this version: body: Invalid JSON"),
        (200, json.dumps({"name": "else"}).encode(), "is no worldserve of this version: version: Field required"),
        (404, b"", r"can't be read: it answered 404"),
        (401, b"", r"it asks for a token: --token"),
    ],
)
def test_something_else_at_the_url(status: int, body: bytes, message: str):
    with http_server(status, body) as url, pytest.raises(BenchError, match=message):
        read_info(url, None)


def test_nothing_at_the_url():
    with pytest.raises(BenchError, match=r"no server answers at http://127\.0\.0\.1:1/v1/info"):
        read_info("http://127.0.0.1:1", None)


async def test_the_info_of_a_server_is_read():
    with http_server(200, make_info().model_dump_json().encode()) as url:
        assert await asyncio.to_thread(read_info, url, "t") == make_info()


# ---------------------------------------------------------------- files


def test_a_job_comes_as_json():
    job = make_job(json_file=Path("out.json"))
    document = {name: str(value) if isinstance(value, Path) else value for name, value in _fields(job).items()}
    assert read_job(msgspec.json.encode(document)) == job


@pytest.mark.parametrize("text", [b"{}", b"[", b'{"url": 3}'])
def test_what_is_no_job(text: bytes):
    with pytest.raises(BenchError, match="the job is not what was expected"):
        read_job(text)


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__dataclass_fields__}


@pytest.mark.parametrize("text", ["", "{}", '{"sessions": []}', '{"sessions": [{"began_s": 0.0}]}'])
def test_a_run_without_chunks_is_an_error(tmp_path: Path, text: str):
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(BenchError):
        read_run(file)
