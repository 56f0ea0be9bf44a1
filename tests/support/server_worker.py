"""A scripted `Worker` for tests: answers at once, or when the test says so, or with the failure asked for.

Media is real pixels, so that the real encoders run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from server.worker import CommittedTick, WorkerStatus
from tests.support.media_chunks import part_of, yuv_chunk
from worldmodel.errors import RequestRefused, WorkerUnavailable, WorldModelError
from worldmodel.messages import (
    AppliedEvent,
    ChunkMedia,
    CloseSession,
    LoadProgress,
    LoadStage,
    MediaFormat,
    MemoryStats,
    ModelInfo,
    OpenSession,
    ResetSession,
    SessionClosed,
    SessionId,
    SessionOpened,
    SessionReset,
    StageTimings,
    Tick,
    TickCommitted,
)

PAGES_PER_SESSION = 10


def model_info(*, width: int = 32, height: int = 32, fps: int = 12, capacity_sessions: int = 2) -> ModelInfo:
    return ModelInfo(
        model="fake",
        width=width,
        height=height,
        fps=fps,
        latent_frames_per_chunk=3,
        first_chunk_media_frames=9,
        chunk_media_frames=12,
        sink_latent_frames=1,
        window_latent_frames=6,
        capacity_sessions=capacity_sessions,
        total_pages=PAGES_PER_SESSION * capacity_sessions,
        kv_bytes_per_session=1000,
        device="cpu",
        precision="fp32",
        attention_backend="none",
        checkpoint_digest="0" * 16,
        parameters=0,
        noise_layout="per_chunk",
        sampler="nominal",
        versions={"python": "3"},
    )


@dataclass
class WorkerSession:
    """What the double keeps of a session."""

    prompt: str
    seed: int
    image_bytes: int
    output: MediaFormat
    next_chunk_index: int = 0
    num_resets: int = 0
    ticks: list[Tick] = field(default_factory=list)


class ScriptedWorker:
    """Implements `server.worker.Worker` without a process.

    `tick_failures`, `open_failures`, `reset_failures`, `close_failures` and `media_failures` are used up one per
    request (None: succeed). `hold()` makes ticks wait until `release()`. `alter_tick` changes an answer on its way.
    """

    def __init__(self, info: ModelInfo | None = None, *, ready: bool = True) -> None:
        self.loaded_info = info or model_info()
        self.status = WorkerStatus.READY if ready else WorkerStatus.LOADING
        self.info: ModelInfo | None = self.loaded_info if ready else None
        self.progress: LoadProgress | None = None
        self.generation = 1
        self.failure: str | None = None
        self.sessions: dict[SessionId, WorkerSession] = {}
        self.leaked_pages = 0
        self.tick_failures: deque[WorldModelError | None] = deque()
        self.open_failures: deque[WorldModelError | None] = deque()
        self.reset_failures: deque[WorldModelError | None] = deque()
        self.close_failures: deque[WorldModelError | None] = deque()
        self.media_failures: deque[WorldModelError | None] = deque()
        self.alter_tick: Callable[[TickCommitted], TickCommitted] = lambda committed: committed
        self.num_ticks_in_flight = 0
        self.max_ticks_in_flight = 0
        self.served: list[SessionId] = []
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._lost = asyncio.Event()
        self._subscribers: list[Callable[[], None]] = []

    @property
    def memory(self) -> MemoryStats | None:
        if self.info is None:
            return None
        used = PAGES_PER_SESSION * len(self.sessions) + self.leaked_pages
        return MemoryStats(
            sessions=len(self.sessions), total_pages=self.info.total_pages, free_pages=self.info.total_pages - used
        )

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        self._change(WorkerStatus.STOPPED)

    async def wait_ready(self) -> None:
        assert self.status is WorkerStatus.READY

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    # ------------------------------------------------------------ what tests do to it

    def hold(self) -> None:
        self._may_go.clear()

    def release(self) -> None:
        self._may_go.set()

    def progresses(self, stage: LoadStage, fraction: float) -> None:
        self.progress = LoadProgress(stage=stage, fraction=fraction)
        self._notify()

    def becomes_ready(self) -> None:
        self.info = self.loaded_info
        self._change(WorkerStatus.READY)

    def dies(self, reason: str = "the worker was killed by signal 9") -> None:
        """End the process: requests fail, sessions are gone, a new process loads."""
        self.failure = reason
        self.sessions.clear()
        lost, self._lost = self._lost, asyncio.Event()
        lost.set()
        self._change(WorkerStatus.RESTARTING)

    def is_back(self) -> None:
        self.generation += 1
        self.failure = None
        self._change(WorkerStatus.READY)

    def fails_for_good(self, reason: str) -> None:
        self.failure = reason
        self._change(WorkerStatus.FAILED)

    def _change(self, status: WorkerStatus) -> None:
        self.status = status
        self._notify()

    def _notify(self) -> None:
        for callback in tuple(self._subscribers):
            callback()

    # ------------------------------------------------------------ requests

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened:
        await self._begin(self.open_failures)
        assert self.info is not None
        if len(self.sessions) >= self.info.capacity_sessions:
            raise RequestRefused("all places are taken", code="capacity")
        assert message.session_id not in self.sessions, "opened twice"
        assert len(image) == message.image.width * message.image.height * 3
        self.sessions[message.session_id] = WorkerSession(
            prompt=message.prompt, seed=message.seed, image_bytes=len(image), output=message.outputs[0]
        )
        return SessionOpened(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def reset_session(self, message: ResetSession, image: bytes | None) -> SessionReset:
        await self._begin(self.reset_failures)
        session = self.sessions[message.session_id]
        session.next_chunk_index = 0
        session.num_resets += 1
        session.prompt, session.seed = message.prompt, message.seed
        return SessionReset(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def close_session(self, message: CloseSession) -> SessionClosed:
        await self._begin(self.close_failures)
        self.sessions.pop(message.session_id, None)
        return SessionClosed(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        self.num_ticks_in_flight += 1
        self.max_ticks_in_flight = max(self.max_ticks_in_flight, self.num_ticks_in_flight)
        try:
            return await self._tick(message)
        finally:
            self.num_ticks_in_flight -= 1

    async def _tick(self, message: Tick) -> CommittedTick:
        await self._begin(self.tick_failures)
        session = self.sessions[message.session_id]
        assert message.chunk_index == session.next_chunk_index, "chunk index is not contiguous"
        session.next_chunk_index += 1
        session.ticks.append(message)
        self.served.append(message.session_id)
        num_frames = 9 if message.chunk_index == 0 else 12
        committed = TickCommitted(
            request_id=message.request_id,
            session_id=message.session_id,
            chunk_index=message.chunk_index,
            applied_event_ids=message.event_ids,
            applied=tuple(AppliedEvent(event_id=event_id, latent_frame=1) for event_id in message.event_ids),
            num_media_frames=num_frames,
            pose=tuple(float(index) for index in range(16)),
            timings=StageTimings(denoise_ms=1.0, commit_ms=2.0, decode_ms=3.0),
            memory=self._memory(),
        )
        media: asyncio.Future[tuple[ChunkMedia, memoryview]] = asyncio.get_running_loop().create_future()
        failure = self.media_failures.popleft() if self.media_failures else None
        if failure is not None:
            media.set_exception(failure)
            media.exception()
        else:
            media.set_result(self._media(message, num_frames))
        return CommittedTick(committed=self.alter_tick(committed), media=media)

    def _media(self, message: Tick, num_frames: int) -> tuple[ChunkMedia, memoryview]:
        info = self.loaded_info
        if self.sessions[message.session_id].output is MediaFormat.RGB24:
            parts, payload = part_of(np.zeros((num_frames, info.height, info.width, 3), np.uint8), MediaFormat.RGB24)
        else:
            frames = yuv_chunk(
                width=info.width, height=info.height, num_frames=num_frames, first_frame=12 * message.chunk_index
            )
            parts, payload = part_of(frames, MediaFormat.YUV420)
        chunk = ChunkMedia(
            request_id=message.request_id,
            session_id=message.session_id,
            chunk_index=message.chunk_index,
            num_media_frames=num_frames,
            parts=parts,
            transfer_ms=0.5,
        )
        return chunk, payload

    async def _begin(self, failures: deque[WorldModelError | None]) -> None:
        """Wait as long as the test wants, then fail as it wants, also if the worker dies meanwhile."""
        self._require_alive()
        lost = self._lost
        while True:
            waits = [asyncio.ensure_future(lost.wait()), asyncio.ensure_future(self._may_go.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            # `hold()` may have been called since it could go.
            if lost.is_set() or self._may_go.is_set():
                break
        if lost.is_set():
            raise WorkerUnavailable(self.failure or "the worker is gone")
        failure = failures.popleft() if failures else None
        if failure is not None:
            raise failure

    def _require_alive(self) -> None:
        if self.status is not WorkerStatus.READY:
            raise WorkerUnavailable(self.failure or f"the worker is {self.status}")

    def _memory(self) -> MemoryStats:
        memory = self.memory
        assert memory is not None
        return memory


def other_tick(committed: TickCommitted) -> TickCommitted:
    """Answer for another chunk than was asked."""
    return replace(committed, chunk_index=committed.chunk_index + 1)
