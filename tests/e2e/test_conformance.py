"""`worldserve conformance` finds nothing wrong with the real server, and finds each rule that a wrong server breaks."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.conformance.__main__ import main
from clients.conformance.check import Context
from clients.conformance.client_check import check_client
from clients.conformance.client_judge import CUT_AFTER_CHUNK
from clients.conformance.errors import ConformanceError
from clients.conformance.picture import png
from clients.conformance.runner import ALL_CHECKS, Outcome, Result, find_context, run_check, select
from clients.python import WorldClient
from tests.support.server_process import ROOT, ServerProcess, server_process
from tests.support.wrong_server import Fault, pack, wrong_server

TOKEN = "the-token"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a single place, with a token, and with every format."""
    flags = ("--server.tokens", TOKEN, "--session.allow-latents", "true", "--session.max-pending-events", "8")
    with server_process(tmp_path_factory.mktemp("conformance"), *flags, capacity=1, chunk_ms=5) as process:
        yield process


def conformance(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "server", "conformance", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )


def test_the_server_conforms_to_every_rule(server: ServerProcess, tmp_path: Path):
    done = conformance(server.url, "--token", TOKEN, "--quiet", 0.3, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["conforming"]
    assert [check["outcome"] for check in report["checks"]] == ["PASS"] * len(ALL_CHECKS)
    assert f"conforming: {len(ALL_CHECKS)} checks passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("http://127.0.0.1:1",), "no server answers at http://127.0.0.1:1/v1/info"),
        (("nonsense",), "url: expected ws://, wss://, http:// or https://, got 'nonsense'"),
        (("http://127.0.0.1:1", "--only", "nonsense"), "there is no check 'nonsense'"),
    ],
)
def test_nothing_to_check_is_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    job = {"url": arguments[0], "only": list(arguments[2:]), "answer_s": 5.0, "quiet_s": 0.1}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(job).encode())))
    assert main() == 1
    text = capsys.readouterr().err
    assert text.startswith("worldserve: ")
    assert message in text
    assert text.count("\n") == 1


def test_a_token_is_asked_for(server: ServerProcess):
    done = conformance(server.url)
    assert done.returncode == 1
    assert "it asks for a token (--token)" in done.stderr


# ---------------------------------------------------------------- wrong servers


def swallow(kind: str) -> Fault:
    return Fault(text=lambda message: None if message["type"] == kind else message)


def change(kind: str, **fields: Any) -> Fault:
    return Fault(text=lambda message: {**message, **fields} if message["type"] == kind else message)


def change_media(change_header: Any) -> Fault:
    """Change the headers of media chunks by a function from the old header to new fields."""

    def binary(header: dict[str, Any], payload: bytes) -> bytes:
        changed = header if header["kind"] == "init" else {**header, **change_header(header)}
        return pack(changed, payload)

    return Fault(binary=binary)


def no_init(header: dict[str, Any], payload: bytes) -> bytes | None:
    return None if header["kind"] == "init" else pack(header, payload)


def cut_payload(header: dict[str, Any], payload: bytes) -> bytes:
    return pack(header, payload[:-1])


def little_endian(header: dict[str, Any], payload: bytes) -> bytes:
    return pack(header, payload, length="<I")


def forget_field(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "field": None} if message["type"] == "error" else message


class AppliedAgain:
    """Lists every applied event in the next chunk once more."""

    def __init__(self) -> None:
        self.last: list[Any] = []

    def __call__(self, header: dict[str, Any]) -> dict[str, Any]:
        again, self.last = self.last, header.get("applied", [])
        return {"applied": [*again, *self.last]}


WRONG: dict[str, tuple[Fault, str, str]] = {
    "events are never queued": (swallow("event.queued"), "events", "came within"),
    "no answer to ping": (swallow("pong"), "ping", "came within"),
    "pong says another time": (change("pong", t=-1), "ping", "came within"),
    "errors are swallowed": (swallow("error"), "start.refusals", "came within"),
    "no field in errors": (Fault(text=forget_field), "start.refusals", "no prompt: field is None, expected 'prompt'"),
    "another error code": (change("error", code="oops"), "frames.bad", "expected the error bad_json, got oops"),
    "fatal errors": (change("error", fatal=True), "start.twice", "fatal is True, expected False"),
    "an unknown field": (change("session.started", colour="red"), "start", "session.started: colour"),
    "a field is missing": (change("session.started", fps=None), "start", "session.started: fps"),
    "an unknown message": (change("event.queued", type="event.seen"), "events", "unknown type 'event.seen'"),
    "the seed is ignored": (change("session.started", seed=1), "start", "seed is 1, expected 42"),
    "header length the other way round": (Fault(binary=little_endian), "chunks", "a binary frame says"),
    "no init segment": (Fault(binary=no_init), "start.init", "came before the init segment"),
    "chunks are counted from 1": (
        change_media(lambda header: {"chunk_index": header["chunk_index"] + 1}),
        "chunks",
        "expected chunk 0 of run 0, got chunk 1",
    ),
    "pts in other units": (change_media(lambda header: {"pts": header["pts"] * 2}), "chunks", "pts"),
    "no keyframes": (change_media(lambda header: {"keyframe": False}), "chunks", "keyframe false"),
    "another session's chunk": (change_media(lambda header: {"session_id": "s-0"}), "chunks", "session_id"),
    "another epoch's chunk": (change_media(lambda header: {"epoch": header["epoch"] + 1}), "resume", "epoch"),
    "an event is applied twice": (change_media(AppliedAgain()), "events", "is applied for a second time"),
    "events that nobody sent": (change_media(lambda header: {"applied": []}), "events", "and not applied"),
    "half a fragment": (Fault(binary=cut_payload), "chunks", "MP4 box"),
    "sizes do not add up": (
        change_media(lambda header: {"sizes": [size + 1 for size in header["sizes"]]}),
        "format.h264",
        "sizes add up to",
    ),
    "another shape": (change_media(lambda header: {"shape": [1, 2, 3]}), "format.rgb24", "shape"),
    "no pacing": (Fault(reports=True), "pacing.playback", "without a report"),
    "events stay queued over a reset": (swallow("event.dropped"), "reset", "came within"),
    "the run is not counted": (change("session.state", run=0), "reset", "came within"),
    "another close code": (Fault(close_code=1001), "close", "ends with close code 1001, expected 1000"),
    "a wrong token is let go quietly": (Fault(close_code=1000), "start.token", "closed with 1000, expected 1008"),
    "spectators count epochs": (change_media(lambda header: {"epoch": 1}), "watch", "epoch 1, this socket's is 0"),
}


FAST = (
    "events are never queued",
    "no field in errors",
    "an unknown field",
    "header length the other way round",
    "chunks are counted from 1",
    "sizes do not add up",
    "no pacing",
    "another epoch's chunk",
    "another close code",
)
"""Those that the default test set has; the slow one has them all."""


PATIENCE_S = 4.0
"""How long is waited for what never comes, and also what does come may take no longer."""


async def check_of(server: ServerProcess, name: str, fault: Fault | None, *, answer_s: float) -> Result:
    """Run one check against the server, behind a proxy with a fault if there is one."""
    http = server.url.rstrip("/")
    world = http.replace("http://", "ws://") + "/v1/world"
    context: Context = await find_context(world=world, http=http, token=TOKEN, answer_s=30.0, quiet_s=0.3)
    (check,) = (each for each in select([name]) if each.name == name)
    if fault is None:
        return await run_check(context, check)
    async with wrong_server(world, fault) as proxy:
        # What must not come, and does, is waited for as long as an answer.
        target = replace(context.target, world=proxy, answer_s=answer_s, quiet_s=answer_s)
        return await run_check(replace(context, target=target), check)


@pytest.mark.parametrize(
    "wrong", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in WRONG]
)
async def test_a_broken_rule_is_found(server: ServerProcess, wrong: str):
    fault, name, reason = WRONG[wrong]
    result = await check_of(server, name, fault, answer_s=PATIENCE_S if reason == "came within" else 30.0)
    assert result.outcome is Outcome.FAIL
    assert re.search(re.escape(reason), result.reason), result.reason


@pytest.mark.parametrize("name", ["events", "chunks", "resume", "close"])
async def test_the_proxy_alone_breaks_nothing(server: ServerProcess, name: str):
    result = await check_of(server, name, Fault(), answer_s=30.0)
    assert result.outcome is Outcome.PASS, result.reason


# ---------------------------------------------------------------- clients


async def test_our_client_conforms(server: ServerProcess):
    http = server.url.rstrip("/")
    world = http.replace("http://", "ws://") + "/v1/world"
    context = await find_context(world=world, http=http, token=TOKEN, answer_s=30.0, quiet_s=0.3)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    checking = asyncio.create_task(check_client(context, port=0, wait_s=30.0, on_ready=listening.set_result))
    address = await listening
    start = {"prompt": "a town", "image": png(), "token": TOKEN, "resume_delays_s": (0.0, 0.1)}
    async with WorldClient(address, **start) as client:
        receipt = await client.hold("w")
        async for chunk in client.chunks():
            if chunk.chunk_index == CUT_AFTER_CHUNK + 4:
                break
        await receipt
    results = await checking
    assert [(each.name, each.outcome, each.reason) for each in results if each.outcome is not Outcome.PASS] == []


async def test_a_client_that_never_comes_is_one_sentence(server: ServerProcess):
    http = server.url.rstrip("/")
    context = await find_context(world=http, http=http, token=TOKEN, answer_s=30.0, quiet_s=0.3)
    with pytest.raises(ConformanceError, match=r"no client came within 0\.01 s"):
        await check_client(context, port=0, wait_s=0.01, on_ready=lambda address: None)
