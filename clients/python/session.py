"""The session behind a `WorldClient`: one reader task, resume after lost links, events, requests and their answers.

Knows the protocol; knows nothing of keys, viewers or files.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clients.python.buffer import ChunkBuffer
from clients.python.chunk import Chunk
from clients.python.errors import (
    BadServerMessage,
    ConnectFailed,
    LinkLost,
    Refused,
    SessionFailed,
    SessionLost,
    WorldClientError,
)
from clients.python.flow import Flow
from clients.python.link import Link, LinkClosed, LinkSettings, to_text
from clients.python.receipts import Receipt, ReceiptBook
from server.wire.messages import (
    PROTOCOL_VERSION,
    ChunkHeader,
    DropReason,
    ErrorMessage,
    EventDropped,
    EventQueued,
    Playback,
    Pong,
    ServerMessage,
    SessionClose,
    SessionClosedMessage,
    SessionEvent,
    SessionPause,
    SessionQueued,
    SessionReset,
    SessionResume,
    SessionStart,
    SessionStarted,
    SessionState,
    SessionStateMessage,
    SessionUnpause,
    SessionWatching,
    WireModel,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
RESUMABLE_CLOSE_CODES = frozenset({1001, 1005, 1006, 1007, 1009})
"""Ends of a connection that leave the session parked; the others do not (docs/protocol.md, close codes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """`resume_delays_s`: waits before each try to resume. `clock` and `sleep` are seconds of one clock."""

    link: LinkSettings
    resume_delays_s: tuple[float, ...]
    max_buffered_chunks: int
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Request:
    """A message that a state answers."""

    model: type[WireModel]
    done: Callable[[SessionStateMessage], bool]
    answer: asyncio.Future[None]


class ClientSession:
    """One session on a server. `start` first, `stop` last; `buffer` is where chunks arrive."""

    def __init__(self, settings: SessionSettings, *, event_base: int) -> None:
        self._settings = settings
        self._event_ids = itertools.count(event_base)
        self._link: Link | None = None
        self._started: SessionStarted | None = None
        self._run = 0
        self._last_chunk_index = -1
        self._chunks_are_lost = False
        self._has_failed = False
        self._init = b""
        self._fatal: ErrorMessage | None = None
        self._ended = asyncio.Event()
        self._receipts = ReceiptBook()
        self._requests: list[_Request] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.buffer = ChunkBuffer(settings.max_buffered_chunks)
        self._flow = Flow(self.buffer, self._send_if_linked)
        self.queue_position: int | None = None

    @property
    def started(self) -> SessionStarted:
        """What the server said when it last started or resumed the session."""
        if self._started is None:
            raise RuntimeError("the session has not started: use `async with WorldClient(...)`")
        return self._started

    @property
    def run(self) -> int:
        return self._run

    async def start(self, fields: dict[str, Any]) -> None:
        """Connect and send `session.start`. Raises `ConnectFailed`, `Refused` or `ValueError`."""
        text = to_text(SessionStart, fields)
        link = await Link.open(self._settings.link)
        self._enter(link, await link.start(text, self._on_queued))
        self._tasks = [
            asyncio.create_task(self._read_until_the_end(link), name="world-reader"),
            asyncio.create_task(self._flow.run(), name="world-flow"),
        ]

    async def close(self) -> None:
        """Send `session.close` and wait for its answer; without a link the session is left to expire."""
        if self._ended.is_set() or self._link is None:
            return
        with self.buffer.unbounded():
            try:
                await self._link.send(to_text(SessionClose, {"type": "session.close"}))
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._ended.wait()
            except LinkLost:
                logger.info("the link broke before session.close; the session is left to expire")
            except TimeoutError:
                logger.warning("the server did not answer session.close within %g s", CLOSE_TIMEOUT_S)

    async def stop(self) -> None:
        """End the tasks and the link; settle everything that still waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        self._end(None, SessionLost("the client was closed"))

    async def send_event(self, *, prompt: str | None, controls: Sequence[dict[str, Any]] | None) -> Receipt:
        """Send one event and wait until it is queued. While the link is down it waits for the resume.

        Raises `Refused`, `SessionLost`, and `ValueError` for what cannot be a message.
        """
        if self._ended.is_set():
            raise SessionLost("the session is over")
        event_id = next(self._event_ids)
        fields = {"type": "session.event", "event_id": event_id, "prompt": prompt, "controls": controls}
        text = self._checked(SessionEvent, fields)
        queued, receipt = self._receipts.open(event_id, self._run, text)
        await self._send_if_linked(text)
        with self.buffer.unbounded():
            await queued
        return receipt

    async def report_shown(self, chunk: Chunk, *, buffered_s: float) -> None:
        """Send a `playback` report. One that finds no link or another run is not needed by the server."""
        if self._link is None or chunk.run != self._run:
            return
        fields = {
            "type": "playback",
            "epoch": self.started.epoch,
            "run": chunk.run,
            "chunk_index": chunk.chunk_index,
            "buffered_ms": buffered_s * 1000,
        }
        try:
            await self._link.send(to_text(Playback, fields))
        except LinkLost:
            logger.debug("playback report of chunk %d found no link", chunk.chunk_index)

    async def request(
        self, model: type[WireModel], fields: dict[str, Any], done: Callable[[SessionStateMessage], bool]
    ) -> None:
        """Send a message and wait for the state that answers it."""
        if self._ended.is_set():
            raise SessionLost("the session is over")
        if self._link is None:
            raise LinkLost("the link is down, the session is being resumed")
        text = self._checked(model, fields)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Request(model=model, done=done, answer=answer)
        self._requests.append(entry)
        try:
            with self.buffer.unbounded():
                await self._link.send(text)
                await answer
        finally:
            if entry in self._requests:
                self._requests.remove(entry)

    async def pause(self) -> None:
        """Stop making chunks, and wait for the answer. Raises as `request` does."""
        self._flow.is_paused = True
        try:
            await self.request(SessionPause, {"type": "session.pause"}, lambda said: said.state is SessionState.PAUSED)
        except WorldClientError:
            self._flow.is_paused = False
            raise

    async def unpause(self) -> None:
        """Go on making chunks, where too many wait to be taken once they are. Raises as `request` does."""
        self._flow.is_paused = False
        if not self._flow.is_held:
            fields = {"type": "session.unpause"}
            await self.request(SessionUnpause, fields, lambda said: said.state is SessionState.ACTIVE)

    async def _send_if_linked(self, text: str) -> None:
        """Send what is said again on the next link anyway."""
        if self._link is None:
            return
        try:
            await self._link.send(text)
        except LinkLost:
            logger.debug("waits for the link: %s", text)

    # ------------------------------------------------------------ link

    def _on_queued(self, queued: SessionQueued) -> None:
        self.queue_position = queued.position
        logger.info("waiting for a place: %d of %d", queued.position, queued.queued)

    def _enter(self, link: Link, started: SessionStarted) -> None:
        self._link = link
        self._started = started
        self._set_run(started.run)
        self.queue_position = None

    def _set_run(self, run: int) -> None:
        if run != self._run:
            self._run = run
            self._last_chunk_index = -1

    def _checked(self, model: type[WireModel], fields: dict[str, Any]) -> str:
        text = to_text(model, fields)
        limit = self.started.limits.max_message_bytes
        if len(text.encode()) > limit:
            raise ValueError(f"the message has {len(text.encode())} bytes, the server takes {limit}")
        return text

    async def _read_until_the_end(self, link: Link) -> None:
        """Read, and resume after each lost link, until the session is over."""
        try:
            while not self._ended.is_set():
                closed = await self._read(link)
                if self._ended.is_set():
                    return
                self._link = None
                self._fail_requests(LinkLost("the link broke before the answer"))
                link = await self._resume(closed)
        except WorldClientError as error:
            self._lose(error)
        except BaseException:
            self._lose(SessionLost("the client stopped reading"))
            raise

    async def _read(self, link: Link) -> LinkClosed:
        while True:
            match await link.receive():
                case LinkClosed() as closed:
                    return closed
                case (header, payload):
                    await self._on_chunk(header, payload)
                case message:
                    self._on_message(message)

    async def _resume(self, closed: LinkClosed) -> Link:
        """Open a new link to the same session. Raises `SessionLost`."""
        reason = self._fatal.message if self._fatal else closed.reason or "the link broke"
        if self._fatal is not None or closed.code not in RESUMABLE_CLOSE_CODES:
            raise SessionLost(f"the session is over: {reason}", close_code=closed.code)
        for delay_s in self._settings.resume_delays_s:
            await self._settings.sleep(delay_s)
            try:
                link = await Link.open(self._settings.link)
                fields = {
                    "type": "session.start",
                    "protocol": PROTOCOL_VERSION,
                    "resume_token": self.started.resume_token,
                    "last_chunk_index": self._last_chunk_index,
                    "run": self._run,
                }
                self._enter(link, await link.start(to_text(SessionResume, fields), self._on_queued))
                for text in self._receipts.unanswered():
                    await link.send(text)
                await self._flow.say_again()
                return link
            except (ConnectFailed, LinkLost) as error:
                logger.info("resume failed: %s", error)
            except Refused as error:
                if not error.retryable:
                    raise SessionLost(f"the session cannot be resumed: {error}", close_code=closed.code) from error
        raise SessionLost(
            f"the session could not be resumed in {len(self._settings.resume_delays_s)} tries: {reason}",
            close_code=closed.code,
        )

    # ------------------------------------------------------------ messages

    async def _on_chunk(self, header: ChunkHeader, payload: bytes) -> None:
        if header.kind == "init":
            self._init = payload
            return
        if header.run > self._run:
            self._set_run(header.run)
        # A chunk that was still being encoded when a reset was answered comes late, and is part of the stream.
        if header.run == self._run:
            self._check_order(header)
        self._receipts.applied(header)
        await self.buffer.room()
        self.buffer.put(
            Chunk(
                header=header,
                payload=payload,
                format=self.started.format,
                fps=self.started.fps,
                received_s=self._settings.clock(),
                init=self._init,
            )
        )

    def _check_order(self, header: ChunkHeader) -> None:
        expected, got = self._last_chunk_index + 1, header.chunk_index
        if got is None or got < expected or (got > expected and not self._chunks_are_lost):
            raise BadServerMessage(f"expected chunk {expected} of run {self._run}, got chunk {got} of run {header.run}")
        self._chunks_are_lost = False
        self._last_chunk_index = got

    def _on_message(self, message: ServerMessage) -> None:
        match message:
            case EventQueued(event_id=event_id):
                self._receipts.queued(event_id)
            case EventDropped(event_id=event_id, reason=reason):
                self._receipts.dropped(event_id, reason)
            case SessionStateMessage():
                self._on_state(message)
            case SessionClosedMessage(reason=reason):
                logger.info("the session was closed: %s", reason)
                self._end(DropReason.CLOSED, SessionLost(f"the session was closed: {reason}"))
            case ErrorMessage():
                self._on_error(message)
            case Pong():
                logger.debug("pong %g", message.t)
            case SessionStarted() | SessionQueued() | SessionWatching():
                raise BadServerMessage(f"{message.type} in the middle of a session")

    def _on_state(self, message: SessionStateMessage) -> None:
        self._set_run(message.run)
        if message.state is SessionState.FAILED:
            failed = SessionFailed(message.reason or "the session failed")
            self._receipts.drop_all(DropReason.FAILED, queued_only=True)
            # A session that has failed says so again to who asks for a pause. That is no news of a reset on its way,
            # and whoever takes chunks hears of each failure once.
            self._fail_requests(failed, but=SessionReset if self._has_failed else None)
            if not self._has_failed:
                self.buffer.put(failed)
            self._has_failed = True
            return
        self._has_failed = False
        for request in list(self._requests):
            if request.done(message) and not request.answer.done():
                request.answer.set_result(None)

    def _on_error(self, error: ErrorMessage) -> None:
        """Hand an error to whom it answers; fatal ones say why the connection is about to end."""
        if error.fatal:
            self._fatal = error
        if error.code == "resume_gap":
            logger.warning("chunks are lost: %s", error.message)
            self._chunks_are_lost = True
            return
        if self._receipts.refused(error):
            return
        pending = next((request.answer for request in self._requests if not request.answer.done()), None)
        if pending is not None and error.code != "bad_playback":
            pending.set_exception(Refused(error))
        elif error.code != "bad_json" or not self._receipts.refused_unread(error):
            logger.warning("the server reports %s: %s", error.code, error.message)

    def _fail_requests(self, error: WorldClientError, *, but: type[WireModel] | None = None) -> None:
        for request in self._requests:
            if request.model is not but and not request.answer.done():
                request.answer.set_exception(error)

    def _lose(self, error: WorldClientError) -> None:
        """End the session with an error that whoever takes chunks will see."""
        if not self._ended.is_set():
            self.buffer.put(error)
            self._end(None, error)

    def _end(self, reason: DropReason | None, error: WorldClientError) -> None:
        self._receipts.drop_all(reason)
        self._fail_requests(error)
        self.buffer.end()
        self._ended.set()
