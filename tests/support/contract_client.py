"""The whole server in one event loop without a port: real endpoint, dialect, table and sessions, in-loop sockets.

Made for virtual time; see `virtual_time.py`. Each client checks what every client may rely on while it listens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.app import create_app
from server.context import ServerContext
from server.dialects.world import world_endpoint
from server.session_table import SessionTable
from server.wire.binary import unpack_chunk
from server.wire.messages import ChunkHeader
from tests.support.contract_worker import ContractWorker
from tests.support.server_client import fake_config, image_field
from tests.support.virtual_time import now, settle

Message = dict[str, Any]
IMAGE = image_field()


class LoopSocket:
    """Stands in for the WebSocket of a client; `room` frames fit before the server has to wait."""

    def __init__(self, *, room: int = 10_000, headers: dict[str, str] | None = None) -> None:
        self.headers = headers or {}
        self.scope: dict[str, Any] = {"subprotocols": []}
        self.url = SimpleNamespace(scheme="ws")
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.to_client: asyncio.Queue[str | bytes | int] = asyncio.Queue(room)
        self.is_cut = False
        self.was_closed = False

    def cut(self) -> None:
        """Lose the connection: what is under way is gone."""
        if not self.is_cut:
            self.is_cut = True
            while not self.to_client.empty():
                self.to_client.get_nowait()
            self.to_server.put_nowait({"type": "websocket.disconnect", "code": 1006})

    # ------------------------------------------------------------ the server's side

    async def accept(self, subprotocol: str | None = None) -> None:
        return

    async def receive(self) -> dict[str, Any]:
        return await self.to_server.get()

    async def send_text(self, text: str) -> None:
        await self._put(text)

    async def send_bytes(self, data: bytes) -> None:
        await self._put(data)

    async def send(self, message: dict[str, Any]) -> None:
        self._require_open()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._put(code)
        self.was_closed = True
        self.to_server.put_nowait({"type": "websocket.disconnect", "code": code})

    async def _put(self, frame: str | bytes | int) -> None:
        self._require_open()
        await self.to_client.put(frame)
        self._require_open()

    def _require_open(self) -> None:
        if self.is_cut:
            raise WebSocketDisconnect(1006)


@dataclass
class Ledger:
    """What a user knows of one session across all its sockets."""

    session_id: str = ""
    resume_token: str = ""
    watch_token: str = ""
    epoch: int = 0
    run: int = 0
    last_chunk_index: int = -1
    next_event_id: int = 0
    queued: set[int] = field(default_factory=set)
    applied: dict[int, tuple[int, int]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    wait_ms: dict[int, float] = field(default_factory=dict)
    gaps: int = 0
    ended: str | None = None
    state: str = ""

    @property
    def open_events(self) -> set[int]:
        return self.queued - self.applied.keys() - self.dropped


class LoopClient:
    """One socket of one user. `speed`: media seconds watched per second, None reads and reports at once."""

    def __init__(
        self, server: LoopServer, ledger: Ledger | None = None, *, speed: float | None = None, room: int = 10_000
    ) -> None:
        self.server = server
        self.ledger = ledger or Ledger()
        self.socket = LoopSocket(room=room)
        self.speed = speed
        self.reports = True
        self.messages: list[Message] = []
        self.headers: list[ChunkHeader] = []
        self.close_code: int | None = None
        self.keeps = True
        self.shown = -1
        self.shown_at: dict[int, float] = {}
        self._epoch: int | None = None
        self._changed = asyncio.Event()
        self._endpoint = asyncio.ensure_future(self._serve())
        self._reading = asyncio.ensure_future(self._read())
        self._reading.add_done_callback(lambda _: self._changed.set())
        # A socket lives as long as its connection, whether or not the user thinks of it.
        server.open_clients.add(self)
        self._endpoint.add_done_callback(lambda _: server.open_clients.discard(self))

    async def _serve(self) -> None:
        await world_endpoint(cast(WebSocket, self.socket), self.server.context)
        if not self.socket.was_closed:
            # What uvicorn does when the application leaves without a close.
            self.cut()

    # ------------------------------------------------------------ what a user does

    def send(self, type: str, **fields: Any) -> None:
        text = json.dumps({"type": type, **fields})
        self.socket.to_server.put_nowait({"type": "websocket.receive", "text": text})

    def start(self, **fields: Any) -> None:
        self.send("session.start", **{"protocol": 1, "prompt": "a town", "image": IMAGE, "format": "rgb24", **fields})

    def resume(self) -> None:
        ledger = self.ledger
        self.send(
            "session.start",
            protocol=1,
            resume_token=ledger.resume_token,
            last_chunk_index=ledger.last_chunk_index,
            run=ledger.run,
        )

    def event(self, **fields: Any) -> int:
        event_id = self.ledger.next_event_id
        self.ledger.next_event_id += 1
        self.send("session.event", **{"event_id": event_id, "prompt": f"p{event_id}", **fields})
        return event_id

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is true of what was received."""
        while not condition():
            self.check()
            assert not self._reading.done(), f"the socket is over ({self.close_code}) and it never came"
            self._changed.clear()
            await self._changed.wait()

    async def expect(self, type: str, **fields: Any) -> Message:
        """Return the first message of this type with these fields, received already or to come."""
        found: list[Message] = []

        def matches() -> bool:
            found[:] = [
                message
                for message in self.messages
                if message["type"] == type and all(message.get(name) == value for name, value in fields.items())
            ]
            return bool(found)

        await self.until(matches)
        return found[0]

    async def chunks(self, number: int) -> None:
        """Wait for this many media chunks of this socket."""
        await self.until(lambda: len(self.headers) >= number)

    async def over(self) -> int | None:
        """Wait until the server is done with the socket and return its close code."""
        await self._endpoint
        await asyncio.wait({self._reading})
        self.check()
        return self.close_code

    async def over_despite_not_reading(self) -> int | None:
        """Wait until the server is done with a socket that nobody reads, and return the close code in its buffer."""
        await self._endpoint
        frames = [self.socket.to_client.get_nowait() for _ in range(self.socket.to_client.qsize())]
        return next((frame for frame in frames if isinstance(frame, int)), None)

    def check(self) -> None:
        """Raise the first thing that this client saw and must never see."""
        if self._reading.done() and not self._reading.cancelled() and (error := self._reading.exception()) is not None:
            raise error

    def cut(self) -> None:
        self.socket.cut()
        self._reading.cancel()

    def stop_reading(self) -> None:
        """Leave the connection open and read no more."""
        self._reading.cancel()

    async def leave(self) -> None:
        self.check()
        self.cut()
        await self._endpoint

    @property
    def is_over(self) -> bool:
        return self._endpoint.done()

    # ------------------------------------------------------------ what a user sees

    async def _read(self) -> None:
        while True:
            frame = await self.socket.to_client.get()
            if isinstance(frame, int):
                self.close_code = frame
                self._changed.set()
                return
            if isinstance(frame, str):
                self._on_message(json.loads(frame))
            else:
                await self._on_chunk(unpack_chunk(frame)[0])
            self._changed.set()

    def _on_message(self, message: Message) -> None:
        ledger = self.ledger
        if self.keeps:
            self.messages.append(message)
        match message["type"]:
            case "session.started":
                assert message["epoch"] > ledger.epoch, "epochs only rise"
                assert ledger.session_id in ("", message["session_id"])
                ledger.session_id, ledger.resume_token = message["session_id"], message["resume_token"]
                ledger.watch_token = message["watch_token"]
                ledger.epoch = self._epoch = message["epoch"]
                if message["run"] != ledger.run:
                    ledger.run, ledger.last_chunk_index = message["run"], -1
            case "session.state":
                assert message["epoch"] == self._epoch, "a state of another epoch"
                ledger.state = message["state"]
                if message["run"] != ledger.run:
                    assert message["run"] == ledger.run + 1, "runs are counted one by one"
                    ledger.run, ledger.last_chunk_index = message["run"], -1
            case "event.queued":
                assert message["event_id"] not in ledger.queued, "queued twice"
                ledger.queued.add(message["event_id"])
            case "event.dropped":
                event_id = message["event_id"]
                assert event_id not in ledger.dropped, "dropped twice"
                assert event_id not in ledger.applied, "applied and dropped"
                ledger.dropped.add(event_id)
            case "session.closed":
                ledger.ended = message["reason"]
            case "error" if message["code"] == "resume_gap":
                ledger.gaps += 1

    async def _on_chunk(self, header: ChunkHeader) -> None:
        ledger = self.ledger
        assert header.session_id == ledger.session_id, "a chunk of another session"
        assert header.epoch == self._epoch, "a chunk of another epoch"
        assert header.chunk_index is not None
        if header.run == ledger.run:
            expected = ledger.last_chunk_index + 1
            assert header.chunk_index == expected or (ledger.gaps and header.chunk_index > expected), (
                f"chunk {header.chunk_index} of run {header.run}, expected {expected}"
            )
            ledger.last_chunk_index = header.chunk_index
        else:
            assert header.run < ledger.run, "a run that nobody announced"
        if self.keeps:
            self.headers.append(header)
        for receipt in header.applied:
            assert receipt.event_id not in ledger.dropped, "dropped and applied"
            place = (header.run, header.chunk_index)
            assert ledger.applied.setdefault(receipt.event_id, place) == place, "applied twice"
            ledger.wait_ms[receipt.event_id] = receipt.wait_ms
        self.shown = header.chunk_index
        if self.keeps:
            self.shown_at[header.chunk_index] = now()
        if self.speed is not None:
            self._report(header, buffered_ms=header.num_frames / self.server.fps * 1000)
            await asyncio.sleep(header.num_frames / self.server.fps / self.speed)
        else:
            self._report(header, buffered_ms=0.0)

    def _report(self, header: ChunkHeader, *, buffered_ms: float) -> None:
        if self.reports and not self.socket.is_cut:
            self.send(
                "playback",
                epoch=header.epoch,
                run=header.run,
                chunk_index=header.chunk_index,
                buffered_ms=buffered_ms,
            )


class LoopServer:
    """An application without uvicorn."""

    def __init__(self, app: FastAPI, worker: ContractWorker) -> None:
        self.app = app
        self.worker = worker
        self.context: ServerContext = app.state.context
        self.fps = worker.loaded_info.fps
        self.open_clients: set[LoopClient] = set()

    @property
    def table(self) -> SessionTable:
        return self.context.table

    def client(self, ledger: Ledger | None = None, **options: Any) -> LoopClient:
        return LoopClient(self, ledger, **options)

    async def started(self, *, speed: float | None = None, room: int = 10_000, **fields: Any) -> LoopClient:
        """Open a session and return its client."""
        client = self.client(speed=speed, room=room)
        client.start(**fields)
        await client.expect("session.started")
        return client

    def counter(self, name: str, **labels: str) -> float:
        """Return a value of `/metrics`, 0 if it was never set."""
        return self.context.metrics.registry.get_sample_value(name, labels) or 0.0


async def assert_the_books_balance(server: LoopServer) -> None:
    """Check that nothing is left once every session has ended: places, pages, receipts, sessions, tasks."""
    table, worker = server.table, server.worker
    assert table.all() == ()
    assert (table.num_resident, table.num_waiting) == (0, 0)
    assert worker.violations == [], worker.violations
    assert worker.sessions == {}
    memory = worker.memory
    assert memory is not None
    assert memory.free_pages == memory.total_pages
    answered = sum(
        server.counter("worldserve_events_total", result=result)
        for result in ("applied", "dropped_failed", "dropped_reset", "dropped_closed")
    )
    assert server.counter("worldserve_events_total", result="queued") == answered
    ended = sum(
        sample.value
        for metric in server.context.metrics.ended.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
    assert server.counter("worldserve_sessions_started_total") == ended
    assert server.counter("worldserve_connections") == 0


@asynccontextmanager
async def loop_serving(worker: ContractWorker | None = None, **sections: Any) -> AsyncIterator[LoopServer]:
    """Run a server in virtual time; afterwards nothing may be left of it and the worker saw no violation."""
    worker = worker or ContractWorker()
    before = asyncio.all_tasks()
    app = create_app(fake_config(**sections), worker=worker, clock=now)
    server = LoopServer(app, worker)
    async with app.router.lifespan_context(app):
        yield server
    await settle()
    assert worker.violations == [], worker.violations
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
