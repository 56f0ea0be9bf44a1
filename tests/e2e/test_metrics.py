"""Broken states as operators see them, and that every metric is documented."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.app import create_app
from server.session import Phase
from tests.support.server_client import fake_config, image_field
from tests.support.server_scripted import Server, serving
from tests.support.server_worker import ScriptedWorker, WorkerSession
from worldmodel.errors import OutcomeUnknown, TickRolledBack
from worldmodel.messages import LoadStage, MediaFormat, OpenSession, SessionId, SessionOpened

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


class Operator:
    """Looks at a server from outside."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def reason(self) -> str | None:
        """Return why the server isn't ready."""
        response = await self._http.get("readyz")
        body = response.json()
        assert response.status_code == (200 if body["ready"] else 503)
        assert (await self.metric("worldserve_ready")) == float(body["ready"])
        reason: str | None = body.get("reason")
        return reason

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self._http.get("metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no metric {name} {labels}")


def http_to(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60)


async def loading(server: Server) -> None:
    server.worker.progresses(LoadStage.VAE, 0.5)


async def dies(server: Server) -> None:
    server.worker.becomes_ready()
    server.worker.dies()


async def fails_for_good(server: Server) -> None:
    server.worker.fails_for_good("no such checkpoint")


async def is_stopped(server: Server) -> None:
    await server.worker.stop()


async def leaks(server: Server) -> None:
    server.worker.becomes_ready()
    server.worker.leaked_pages = 11


async def cannot_release(server: Server) -> None:
    server.worker.becomes_ready()
    for _ in range(2):
        socket = await server.connect()
        await socket.start()
        server.worker.close_failures.append(OutcomeUnknown("stuck"))
        await socket.send("session.close")
        await socket.error(code="cleanup_failed")
    assert [actor.session.phase for actor in server.context.table.all()] == [Phase.CLEANUP_FAILED] * 2


async def keeps_what_nobody_knows(server: Server) -> None:
    server.worker.becomes_ready()
    for name in ("s-1", "s-2"):
        lost = WorkerSession(prompt="", seed=0, image_bytes=0, output=MediaFormat.YUV420)
        server.worker.sessions[SessionId(name)] = lost


async def keeps_what_was_never_opened(server: Server) -> None:
    """Both opens come to an unknown end behind which the sessions are there, and cannot be closed either."""
    server.worker.becomes_ready()
    open_session = server.worker.open_session

    async def open_and_fail(message: OpenSession, image: bytes) -> SessionOpened:
        await open_session(message, image)
        raise OutcomeUnknown("stuck")

    server.worker.open_session = open_and_fail  # type: ignore[method-assign]
    # Closing them is tried again and again.
    server.worker.close_failures.extend(OutcomeUnknown("stuck") for _ in range(1000))
    for _ in range(2):
        socket = await server.connect()
        await socket.send("session.start", protocol=1, prompt="a town", image=image_field())
        await socket.error(code="worker_unavailable")
    assert (len(server.worker.sessions), server.context.table.all()) == (2, ())


async def loses_its_scheduler(server: Server) -> None:
    server.worker.becomes_ready()
    (task,) = [task for task in asyncio.all_tasks() if "Scheduler.run" in repr(task)]
    task.cancel()
    await asyncio.wait({task})


async def shuts_down(server: Server) -> None:
    server.context.table.say_goodbye()


@pytest.mark.parametrize(
    ("breaks", "reason", "metric", "labels", "value"),
    [
        (loading, "the model is loading", "worldserve_worker_ready", {}, 0),
        (dies, "the worker is being restarted", "worldserve_worker_ready", {}, 0),
        (fails_for_good, "the model can't be served", "worldserve_worker_ready", {}, 0),
        (is_stopped, "the worker was stopped", "worldserve_worker_ready", {}, 0),
        (leaks, "pages have leaked", "worldserve_pages", {"state": "free"}, 9),
        (cannot_release, "all 2 places are held", "worldserve_sessions", {"state": "cleanup_failed"}, 2),
        (keeps_what_was_never_opened, "all 2 places are held", "worldserve_sessions", {"state": "cleanup_failed"}, 2),
        (keeps_what_nobody_knows, "the worker holds sessions of nobody", "worldserve_resident_sessions", {}, 0),
        (loses_its_scheduler, "the scheduler has stopped", "worldserve_chunks_total", {}, 0),
        (shuts_down, "the server is shutting down", "worldserve_ready", {}, 0),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_broken_states_are_not_ready_and_seen_in_the_metrics(
    breaks: Callable[[Server], Awaitable[None]], reason: str, metric: str, labels: dict[str, str], value: float
) -> None:
    async with serving(ScriptedWorker(ready=False)) as server, http_to(server) as http:
        await breaks(server)
        operator = Operator(http)
        got = await operator.reason()
        assert got is not None
        assert got.startswith(reason)
        assert await operator.metric(metric, **labels) == value
    documented = reason.replace("all 2 places", "all N places")
    (row,) = [line for line in DOCUMENT.splitlines() if line.startswith("|") and f"`{documented}`" in line]
    assert metric == "worldserve_ready" or metric in row


async def test_a_full_server_is_ready_and_shows_who_waits() -> None:
    async with serving() as server, http_to(server) as http:
        for _ in range(2):
            await (await server.connect()).start()
        waiting = await server.connect()
        await waiting.send("session.start", protocol=1, prompt="", image=image_field())
        await waiting.expect("session.queued")
        operator = Operator(http)
        assert await operator.reason() is None
        assert await operator.metric("worldserve_queued_sessions") == 1
        assert await operator.metric("worldserve_resident_sessions") == 2
        assert await operator.metric("worldserve_capacity_sessions") == 2


async def test_faults_and_drops_are_counted() -> None:
    async with serving() as server, http_to(server) as http:
        operator = Operator(http)
        socket = await server.connect()
        await socket.start()
        await server.pause(socket)
        await socket.send("session.event", event_id=1, prompt="x")
        await socket.expect("event.queued")
        server.worker.tick_failures.append(TickRolledBack("boom"))
        await socket.send("session.unpause")
        await socket.expect("session.state", state="active")
        await socket.error(code="tick_failed")
        await socket.expect("event.dropped", event_id=1)
        assert await operator.metric("worldserve_ticks_failed_total") == 1
        assert await operator.metric("worldserve_events_total", result="dropped_failed") == 1
        assert await operator.metric("worldserve_errors_total", code="tick_failed") == 1
        await socket.send("session.reset")
        await socket.expect("session.state", state="active", run=1)
        await socket.send("session.close")
        await socket.closed()
        assert await operator.metric("worldserve_sessions_ended_total", reason="client") == 1
        generation = await operator.metric("worldserve_worker_generation")
        server.worker.dies()
        server.worker.is_back()
        assert await operator.metric("worldserve_worker_generation") == generation + 1


async def test_waits_and_stages_are_histograms() -> None:
    async with serving() as server, http_to(server) as http:
        operator = Operator(http)
        socket = await server.connect()
        await socket.start()
        # Else the event may act in the first chunk, and that may be all there is.
        await socket.media()
        await socket.send("session.event", event_id=1, prompt="x")
        while not (await socket.media()).header.applied:
            pass
        assert await operator.metric("worldserve_event_wait_seconds_count") == 1
        for stage in ("queue", "denoise", "commit", "decode", "transfer", "encode"):
            assert await operator.metric("worldserve_chunk_stage_seconds_bucket", stage=stage, le="+Inf") >= 2


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    app = create_app(fake_config(), worker=ScriptedWorker())
    registry = app.state.context.metrics.registry
    existing = {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}
    documented = set(re.findall(r"`(worldserve_\w+)", DOCUMENT))
    assert documented == existing
