"""One socket to one worker process: requests out one at a time, answers back to their futures.

Owns the order of requests, their time limits, and what every pending future gets when the link is lost. It knows no
process and restarts nothing; `server/worker_client.py` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from server.logs import about
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack, WorkerUnavailable, WorldModelError
from worldmodel.framing import Frame, FrameReader, FrameTooLarge, FramingError, encode_frame
from worldmodel.messages import (
    ChunkMedia,
    CloseSession,
    FailureOutcome,
    LoadProgress,
    MemoryStats,
    OpenSession,
    RequestFailed,
    RequestId,
    ResetSession,
    SessionClosed,
    SessionOpened,
    SessionReset,
    StartWorker,
    StopWorker,
    Tick,
    TickCommitted,
    WorkerFailed,
    WorkerReady,
)

Request = OpenSession | ResetSession | CloseSession | Tick
Answer = SessionOpened | SessionReset | SessionClosed | TickCommitted
Notice = LoadProgress | WorkerReady | WorkerFailed
Media = tuple[ChunkMedia, memoryview]

SOCKET_CLOSED = "the worker closed its socket"

log = logging.getLogger(__name__)

_ANSWERS: dict[type[Request], type[Answer]] = {
    OpenSession: SessionOpened,
    ResetSession: SessionReset,
    CloseSession: SessionClosed,
    Tick: TickCommitted,
}


@dataclass(slots=True, kw_only=True)
class _Pending:
    message: Request
    buffers: list[bytes | memoryview]
    timeout_s: float
    answer: asyncio.Future[Answer]
    media: asyncio.Future[Media]
    timer: asyncio.TimerHandle | None = field(default=None)


class WorkerLink(asyncio.BufferedProtocol):
    """Protocol on the server's end of the socket.

    `on_notice` gets what the worker says unasked, `on_memory` the accounting of every answer, `on_lost` is called once
    with the reason when the link can't be used any more: end of stream, bytes that are no frame, an answer to nothing,
    or a request that ran out of time. All pending requests have failed with `WorkerUnavailable` by then.
    `end_reason` is what they are told when the stream just ends.
    """

    def __init__(
        self,
        *,
        on_notice: Callable[[Notice], None],
        on_memory: Callable[[MemoryStats], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_notice = on_notice
        self._on_memory = on_memory
        self._on_lost = on_lost
        self.end_reason = SOCKET_CLOSED
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._queue: deque[_Pending] = deque()
        self._active: _Pending | None = None
        self._media: dict[RequestId, _Pending] = {}
        self._lost_reason: str | None = None

    # ------------------------------------------------------------ requests

    def send(self, message: StartWorker | StopWorker) -> None:
        """Send a message that has no answer; nothing happens on a lost link."""
        if self._lost_reason is None:
            self._write(encode_frame(message))

    def request(
        self, message: Request, payload: Sequence[bytes | memoryview] = (), *, timeout_s: float
    ) -> tuple[asyncio.Future[Answer], asyncio.Future[Media]]:
        """Queue a request; its time runs from when it is sent. The second future is used by a `Tick` only.

        The parts of the payload are not copied and must stay unchanged until the answer. Raises `WorkerUnavailable` on
        a lost link, `RequestRefused` for a message above the frame limits.
        """
        if self._lost_reason is not None:
            raise WorkerUnavailable(self._lost_reason)
        try:
            buffers = encode_frame(message, payload)
        except FrameTooLarge as error:
            raise RequestRefused(error.message, code=error.code) from error
        loop = asyncio.get_running_loop()
        pending = _Pending(
            message=message,
            buffers=buffers,
            timeout_s=timeout_s,
            answer=loop.create_future(),
            media=loop.create_future(),
        )
        self._queue.append(pending)
        self._send_next()
        return pending.answer, pending.media

    def _send_next(self) -> None:
        while self._active is None and self._queue:
            pending = self._queue.popleft()
            if pending.answer.cancelled():
                continue
            self._active = pending
            self._start_timer(pending, "answer")
            self._write(pending.buffers)
            pending.buffers = []

    def _start_timer(self, pending: _Pending, missing: str) -> None:
        self._stop_timer(pending)
        timer = asyncio.get_running_loop().call_later(pending.timeout_s, self._timed_out, pending, missing)
        pending.timer = timer

    def _timed_out(self, pending: _Pending, missing: str) -> None:
        """Give the link up. Only who asked is told which request it was: all others have sessions of their own."""
        message, within = pending.message, f"within {pending.timeout_s:g} s"
        kind = type(message).__name__
        reason = f"the worker gave no {missing} to {kind} {message.request_id} of session {message.session_id} {within}"
        log.error("%s", reason, extra=about(session_id=message.session_id, request_id=message.request_id))
        _reject(pending.answer, WorkerUnavailable(reason))
        _reject(pending.media, WorkerUnavailable(reason))
        self.fail(f"the worker gave no {missing} to a request ({kind}) {within}")

    @staticmethod
    def _stop_timer(pending: _Pending) -> None:
        if pending.timer is not None:
            pending.timer.cancel()

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        assert self._transport is not None
        self._transport.writelines(buffers)

    # ------------------------------------------------------------ answers

    def _received(self, frame: Frame) -> None:
        match frame.message:
            case LoadProgress() | WorkerReady() | WorkerFailed() as notice:
                self._on_notice(notice)
            case SessionOpened() | SessionReset() | SessionClosed() | TickCommitted() as answer:
                self._answered(answer)
            case ChunkMedia() as media:
                self._media_arrived(media, frame.payload)
            case RequestFailed() as failed:
                self._request_failed(failed)
            case StartWorker() | OpenSession() | Tick() | ResetSession() | CloseSession() | StopWorker() as message:
                self.fail(f"the worker sent a {type(message).__name__}, which only the server sends")
            case _:
                assert_never(frame.message)

    def _answered(self, answer: Answer) -> None:
        pending = self._active
        if (
            pending is None
            or answer.request_id != pending.message.request_id
            or not isinstance(answer, _ANSWERS[type(pending.message)])
        ):
            self.fail(
                f"unexpected {type(answer).__name__} for request {answer.request_id}: expected {_wanted(pending)}"
            )
            return
        self._on_memory(answer.memory)
        self._stop_timer(pending)
        if isinstance(answer, TickCommitted):
            self._media[answer.request_id] = pending
            self._start_timer(pending, "media")
        _resolve(pending.answer, answer)
        self._active = None
        self._send_next()

    def _media_arrived(self, media: ChunkMedia, payload: memoryview) -> None:
        pending = self._media.pop(media.request_id, None)
        if pending is None:
            self.fail(f"unexpected ChunkMedia for request {media.request_id}: no such tick was committed")
            return
        self._stop_timer(pending)
        num_bytes = sum(part.num_bytes for part in media.parts)
        if num_bytes != len(payload):
            self._media[media.request_id] = pending
            self.fail(f"media of {len(payload)} bytes for request {media.request_id}: its parts are {num_bytes}")
            return
        _resolve(pending.media, (media, payload))

    def _request_failed(self, failed: RequestFailed) -> None:
        lost_media = self._media.pop(failed.request_id, None)
        if lost_media is not None:
            self._stop_timer(lost_media)
            self._on_memory(failed.memory)
            _reject(lost_media.media, OutcomeUnknown(failed.message, code=failed.code))
            return
        pending = self._active
        if pending is None or failed.request_id != pending.message.request_id:
            self.fail(f"unexpected RequestFailed for request {failed.request_id}: expected {_wanted(pending)}")
            return
        self._stop_timer(pending)
        self._on_memory(failed.memory)
        _reject(pending.answer, failure_error(failed))
        self._active = None
        self._send_next()

    # ------------------------------------------------------------ the end

    def fail(self, reason: str) -> None:
        """Give the link up: fail everything pending with `WorkerUnavailable` and close the socket. Only once."""
        if self._lost_reason is not None:
            return
        self._lost_reason = reason
        pending = [*self._media.values(), *([self._active] if self._active else []), *self._queue]
        self._media.clear()
        self._queue.clear()
        self._active = None
        for entry in pending:
            self._stop_timer(entry)
            _reject(entry.answer, WorkerUnavailable(reason))
            _reject(entry.media, WorkerUnavailable(reason))
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(reason)

    # ------------------------------------------------------------ asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._lost_reason is not None:
            return
        try:
            frame = self._reader.advance(nbytes)
        except FramingError as error:
            self.fail(f"the worker sent bytes that are no message: {error}")
            return
        if frame is not None:
            self._received(frame)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        # A worker that dies with unread bytes resets the connection; that is no other news than a closed one.
        broken = exc is not None and not isinstance(exc, ConnectionError)
        self.fail(f"the socket to the worker broke: {exc}" if broken else self.end_reason)


def failure_error(failed: RequestFailed) -> WorldModelError:
    """Return the exception that tells the caller what is left after a failed request."""
    match failed.outcome:
        case FailureOutcome.REFUSED:
            return RequestRefused(failed.message, code=failed.code, field=failed.field)
        case FailureOutcome.ROLLED_BACK:
            return TickRolledBack(failed.message, code=failed.code, field=failed.field, transient=failed.transient)
        case FailureOutcome.UNKNOWN:
            return OutcomeUnknown(failed.message, code=failed.code, field=failed.field)
        case _:
            assert_never(failed.outcome)


def _wanted(pending: _Pending | None) -> str:
    if pending is None:
        return "no answer"
    return f"{_ANSWERS[type(pending.message)].__name__} for {pending.message.request_id}"


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    """Set a result unless the caller has gone."""
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    """Set an exception unless the caller has gone, and count it as seen: nobody has to await it."""
    if not future.done():
        future.set_exception(error)
        future.exception()
