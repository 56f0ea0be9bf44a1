"""A `Worker` that takes its time and fails as told, and that notices when the server breaks the contract.

Requests run one at a time in the order of the calls, as over the real socket. What the server does wrong is an
`AssertionError` in `violations`, because the server may well survive an exception.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from server.worker import CommittedTick, WorkerStatus
from tests.support.media_chunks import part_of
from tests.support.server_worker import PAGES_PER_SESSION, model_info
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack, WorkerUnavailable, WorldModelError
from worldmodel.messages import (
    AppliedEvent,
    ChunkMedia,
    CloseSession,
    LoadProgress,
    MediaFormat,
    MemoryStats,
    ModelInfo,
    OpenSession,
    RequestId,
    ResetSession,
    SessionClosed,
    SessionId,
    SessionOpened,
    SessionReset,
    StageTimings,
    Tick,
    TickCommitted,
)


class Fate(StrEnum):
    """What becomes of a request. Those from `WRONG_SESSION` on are lies and only befall ticks."""

    DONE = "done"
    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"
    DIES = "dies"
    LOSES_MEDIA = "loses_media"
    WRONG_SESSION = "wrong_session"
    WRONG_REQUEST = "wrong_request"
    WRONG_CHUNK = "wrong_chunk"
    FEWER_EVENTS = "fewer_events"
    MORE_EVENTS = "more_events"
    FOREIGN_PLACE = "foreign_place"
    WRONG_MEDIA = "wrong_media"


TICK_FATES = tuple(Fate)
REQUEST_FATES = (Fate.DONE, Fate.REFUSED, Fate.UNKNOWN, Fate.DIES)

_LIES: dict[Fate, Callable[[TickCommitted], TickCommitted]] = {
    Fate.WRONG_SESSION: lambda it: replace(it, session_id=SessionId("s-other")),
    Fate.WRONG_REQUEST: lambda it: replace(it, request_id=RequestId("r-other")),
    Fate.WRONG_CHUNK: lambda it: replace(it, chunk_index=it.chunk_index + 1),
    Fate.FEWER_EVENTS: lambda it: replace(it, applied_event_ids=it.applied_event_ids[:-1], num_media_frames=12),
    Fate.MORE_EVENTS: lambda it: replace(it, applied_event_ids=(*it.applied_event_ids, 10**9)),
    Fate.FOREIGN_PLACE: lambda it: replace(it, applied=(AppliedEvent(event_id=10**9, latent_frame=0),)),
}


@dataclass(slots=True, kw_only=True)
class Held:
    """State the worker holds of a session. `is_known` is false once an answer left the server in doubt."""

    next_chunk_index: int = 0
    is_known: bool = True
    retry_of: Tick | None = None
    ticks: list[Tick] = field(default_factory=list)


class ContractWorker:
    """Implements `server.worker.Worker`. Fates are used up one per request; then everything is done."""

    def __init__(
        self,
        info: ModelInfo | None = None,
        *,
        tick_s: float = 0.1,
        request_s: float = 0.01,
        media_s: float = 0.01,
        restart_s: float = 2.0,
        keeps_ticks: bool = True,
    ) -> None:
        self.loaded_info = info or model_info(width=2, height=2)
        self.status = WorkerStatus.READY
        self.progress: LoadProgress | None = None
        self.generation = 1
        self.failure: str | None = None
        self.sessions: dict[SessionId, Held] = {}
        self.images: deque[bytes] = deque(maxlen=4)
        self.tick_fates: deque[Fate] = deque()
        self.request_fates: deque[Fate] = deque()
        self.open_fates: deque[Fate] = deque()
        self.violations: list[str] = []
        self.num_ticks: Counter[Fate] = Counter()
        self.request_ids: set[RequestId] = set()
        self.tick_s = tick_s
        self.on_tick: Callable[[Tick], None] | None = None
        self._request_s = request_s
        self._media_s = media_s
        self._restart_s = restart_s
        self._keeps_ticks = keeps_ticks
        self._turn = asyncio.Lock()
        self._lost = asyncio.Event()
        self._subscribers: list[Callable[[], None]] = []
        self._pixels = {
            num_frames: part_of(np.zeros((num_frames, 2, 2, 3), np.uint8), MediaFormat.RGB24) for num_frames in (9, 12)
        }

    # ------------------------------------------------------------ what can be seen

    @property
    def info(self) -> ModelInfo | None:
        return self.loaded_info

    @property
    def memory(self) -> MemoryStats | None:
        total = self.loaded_info.total_pages
        num_sessions = len(self.sessions)
        return MemoryStats(
            sessions=num_sessions, total_pages=total, free_pages=total - PAGES_PER_SESSION * num_sessions
        )

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        self._change(WorkerStatus.STOPPED)

    async def wait_ready(self) -> None:
        assert self.status is WorkerStatus.READY

    # ------------------------------------------------------------ death

    def dies(self, reason: str = "the worker was killed by signal 9") -> None:
        """End the process now; a new one is ready after the restart time."""
        if self.status is not WorkerStatus.READY:
            return
        self.failure = reason
        self.sessions.clear()
        lost, self._lost, self._turn = self._lost, asyncio.Event(), asyncio.Lock()
        lost.set()
        self._change(WorkerStatus.RESTARTING)
        asyncio.get_running_loop().call_later(self._restart_s, self._is_back)

    def _is_back(self) -> None:
        if self.status is WorkerStatus.RESTARTING:
            self.generation += 1
            self.failure = None
            self._change(WorkerStatus.READY)

    def _change(self, status: WorkerStatus) -> None:
        self.status = status
        for callback in tuple(self._subscribers):
            callback()

    # ------------------------------------------------------------ requests

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened:
        def opens() -> None:
            self._check(message.session_id not in self.sessions, f"{message.session_id} was opened twice")
            self._check(len(self.sessions) < self.loaded_info.capacity_sessions, "opened above the capacity")
            self.sessions[message.session_id] = Held()
            self.images.append(image)

        await self._run(message, self._request_s, self.open_fates or self.request_fates, opens)
        return SessionOpened(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def reset_session(self, message: ResetSession, image: bytes | None) -> SessionReset:
        self._require_ready()
        self._check(self._is_known(message.session_id), f"{message.session_id} was reset in an unknown state")

        def resets() -> None:
            self.sessions[message.session_id] = Held()

        await self._run(message, self._request_s, self.request_fates, resets)
        return SessionReset(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def close_session(self, message: CloseSession) -> SessionClosed:
        def closes() -> None:
            self.sessions.pop(message.session_id, None)

        await self._run(message, self._request_s, self.request_fates, closes)
        return SessionClosed(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        num_frames = 12 if message.chunk_index else 9
        if self.on_tick is not None:
            self.on_tick(message)
        self._require_ready()
        self._check(self._is_known(message.session_id), f"{message.session_id} was ticked in an unknown state")

        def ticks() -> None:
            held = self.sessions.get(message.session_id)
            if held is None or not held.is_known:
                # The pixels of the chunk before were lost while this tick was under way.
                return
            self._check(message.chunk_index == held.next_chunk_index, "chunk index is not contiguous")
            held.next_chunk_index += 1
            held.retry_of = None
            if self._keeps_ticks:
                held.ticks.append(message)

        fate = await self._run(message, self.tick_s, self.tick_fates, ticks)
        committed = TickCommitted(
            request_id=message.request_id,
            session_id=message.session_id,
            chunk_index=message.chunk_index,
            applied_event_ids=message.event_ids,
            applied=tuple(AppliedEvent(event_id=event_id, latent_frame=1) for event_id in message.event_ids),
            num_media_frames=num_frames,
            pose=None,
            timings=StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0),
            memory=self._memory(),
        )
        return CommittedTick(committed=self._told(committed, fate), media=self._media(message, num_frames, fate))

    def _told(self, committed: TickCommitted, fate: Fate) -> TickCommitted:
        lie = _LIES.get(fate)
        if lie is None or (fate is Fate.FEWER_EVENTS and not committed.applied_event_ids):
            return committed
        self._doubt(committed.session_id)
        return lie(committed)

    def _media(self, message: Tick, num_frames: int, fate: Fate) -> asyncio.Future[tuple[ChunkMedia, memoryview]]:
        loop = asyncio.get_running_loop()
        media: asyncio.Future[tuple[ChunkMedia, memoryview]] = loop.create_future()
        parts, payload = self._pixels[num_frames]
        chunk = ChunkMedia(
            request_id=RequestId("r-other") if fate is Fate.WRONG_MEDIA else message.request_id,
            session_id=message.session_id,
            chunk_index=message.chunk_index,
            num_media_frames=num_frames,
            parts=parts,
            transfer_ms=0.5,
        )
        lost = self._lost

        def arrives() -> None:
            if fate in (Fate.LOSES_MEDIA, Fate.WRONG_MEDIA):
                self._doubt(message.session_id)
            if lost.is_set():
                media.set_exception(WorkerUnavailable(self.failure or "the worker is gone"))
            elif fate is Fate.LOSES_MEDIA:
                media.set_exception(OutcomeUnknown("the pixels were lost"))
            else:
                media.set_result((chunk, payload))
                return
            media.exception()

        loop.call_later(self._media_s, arrives)
        return media

    # ------------------------------------------------------------ inside

    async def _run(
        self,
        message: OpenSession | ResetSession | CloseSession | Tick,
        duration_s: float,
        fates: deque[Fate],
        effect: Callable[[], None],
    ) -> Fate:
        self._require_ready()
        self._check(message.request_id not in self.request_ids, f"request id {message.request_id} was used twice")
        if isinstance(message, Tick):
            self._check(not self._turn.locked() or not self._ticking, "two ticks were outstanding")
        self.request_ids.add(message.request_id)
        lost = self._lost
        # The work goes on and is waited for even if the caller leaves, as in the real worker.
        work = asyncio.ensure_future(self._work(message, duration_s, fates, effect, self._turn, lost))
        dead = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait({work, dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
        if lost.is_set():
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()
            raise WorkerUnavailable(self.failure or "the worker is gone")
        return await work

    _ticking = False

    async def _work(
        self,
        message: OpenSession | ResetSession | CloseSession | Tick,
        duration_s: float,
        fates: deque[Fate],
        effect: Callable[[], None],
        turn: asyncio.Lock,
        lost: asyncio.Event,
    ) -> Fate:
        async with turn:
            self._ticking = isinstance(message, Tick)
            try:
                await asyncio.sleep(duration_s)
            finally:
                self._ticking = False
            if lost.is_set():
                raise WorkerUnavailable("what a dead process was asked for has no effect on the next one")
            fate = fates.popleft() if fates else Fate.DONE
            if isinstance(message, Tick):
                self.num_ticks[fate] += 1
            error = self._failure_of(message, fate)
            if error is None:
                effect()
                return fate
            raise error

    def _failure_of(
        self, message: OpenSession | ResetSession | CloseSession | Tick, fate: Fate
    ) -> WorldModelError | None:
        match fate:
            case Fate.REFUSED:
                held = self.sessions.get(message.session_id)
                if held is not None and isinstance(message, Tick):
                    # The server goes on with another tick, unless there were no events to go on without.
                    held.retry_of = None
                    held.is_known = held.is_known and bool(message.events)
                return RequestRefused("not with me", code="bad_control")
            case Fate.ROLLED_BACK:
                self._doubt(message.session_id)
                return TickRolledBack("rolled back")
            case Fate.TRANSIENT:
                held = self.sessions.get(message.session_id)
                if held is not None and isinstance(message, Tick):
                    if held.retry_of is not None:
                        self._check(
                            replace(held.retry_of, request_id=message.request_id) == message,
                            "a retry differs from its tick",
                        )
                        held.is_known = False
                    held.retry_of = message
                return TickRolledBack("rolled back", transient=True)
            case Fate.UNKNOWN:
                self._doubt(message.session_id)
                return OutcomeUnknown("who knows")
            case Fate.DIES:
                self.dies()
                return WorkerUnavailable(self.failure or "the worker is gone")
            case _:
                return None

    def _is_known(self, session_id: SessionId) -> bool:
        held = self.sessions.get(session_id)
        return held is not None and held.is_known

    def _doubt(self, session_id: SessionId) -> None:
        held = self.sessions.get(session_id)
        if held is not None:
            held.is_known = False

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    def _require_ready(self) -> None:
        if self.status is not WorkerStatus.READY:
            raise WorkerUnavailable(self.failure or f"the worker is {self.status}")

    def _memory(self) -> MemoryStats:
        memory = self.memory
        assert memory is not None
        return memory
