"""The client that keeps one worker process running: the real `Worker`.

No torch in here, not even indirectly. One supervising task owns the process from spawn to exit; requests go through
`server/worker_link.py`. A process that dies, breaks the protocol or lets a request run out of time is killed and
replaced, because its sessions' state can't be known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, assert_never

from server.config import ServerConfig
from server.worker import CommittedTick, WorkerStatus
from server.worker_link import SOCKET_CLOSED, Answer, Media, Notice, Request, WorkerLink
from server.worker_process import EXIT_GRACE_S, WorkerProcess, describe_exit
from worldmodel.errors import LoadFailed, WorkerUnavailable
from worldmodel.messages import (
    CloseSession,
    LoadProgress,
    LoadStage,
    MemoryStats,
    ModelInfo,
    OpenSession,
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

AnswerT = TypeVar("AnswerT", bound=Answer)

STOPPED = "the worker was stopped"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPolicy:
    """How long to wait for a worker, and how to replace it.

    The n-th crash in a row is followed by a pause of `restart_backoff_s * 2 ** (n - 1)`, at most
    `max_restart_backoff_s`; a process that was ready for `healthy_s` starts the count again. `max_load_crashes` crashes
    in a row without one ready process are final.
    """

    start_timeout_s: float = 900.0
    stop_timeout_s: float = 5.0
    tick_timeout_s: float = 120.0
    request_timeout_s: float = 60.0
    restart_backoff_s: float = 0.5
    max_restart_backoff_s: float = 30.0
    healthy_s: float = 60.0
    max_load_crashes: int = 5

    @classmethod
    def from_config(cls, config: ServerConfig) -> WorkerPolicy:
        return cls(
            start_timeout_s=config.worker.start_timeout_s,
            stop_timeout_s=min(config.worker.stop_timeout_s, config.server.last_s),
            tick_timeout_s=config.session.tick_timeout_s,
            request_timeout_s=config.session.request_timeout_s,
            restart_backoff_s=config.worker.restart_backoff_s,
            max_restart_backoff_s=config.worker.max_restart_backoff_s,
        )

    def pause_s(self, crashes_in_a_row: int) -> float:
        """Return the pause before the next start; the exponent is bounded to keep the power finite."""
        return min(self.max_restart_backoff_s, self.restart_backoff_s * 2.0 ** min(crashes_in_a_row - 1, 32))


class WorkerClient:
    """The real `Worker`: spawns `python -m worldmodel.worker` and supervises it.

    `module` is the program to run, another one only in tests.
    """

    def __init__(
        self, start: StartWorker, policy: WorkerPolicy | None = None, *, module: str = "worldmodel.worker"
    ) -> None:
        self._start = start
        self._policy = policy or WorkerPolicy()
        self._module = module
        self._status = WorkerStatus.LOADING
        self._info: ModelInfo | None = None
        self._memory: MemoryStats | None = None
        self._progress: LoadProgress | None = None
        self._failure: str | None = None
        self._failure_code: str | None = None
        self._generation = 0
        self._process: WorkerProcess | None = None
        self._link: WorkerLink | None = None
        self._run: _Run | None = None
        self._subscribers: list[Callable[[], None]] = []
        self._stopping = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ what can be seen

    @property
    def status(self) -> WorkerStatus:
        return self._status

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def memory(self) -> MemoryStats | None:
        return self._memory

    @property
    def progress(self) -> LoadProgress | None:
        return self._progress

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def pid(self) -> int | None:
        """Process id of the current process, if there is one."""
        return None if self._process is None else self._process.pid

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    async def wait_ready(self) -> None:
        changed = asyncio.Event()
        unsubscribe = self.subscribe(changed.set)
        try:
            while self._status is not WorkerStatus.READY:
                if self._status in (WorkerStatus.FAILED, WorkerStatus.STOPPED):
                    raise LoadFailed(self._failure or STOPPED, code=self._failure_code)
                changed.clear()
                await changed.wait()
        finally:
            unsubscribe()

    # ------------------------------------------------------------ requests

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened:
        return await self._ask(message, [image], SessionOpened)

    async def reset_session(self, message: ResetSession, image: bytes | None) -> SessionReset:
        return await self._ask(message, [image or b""], SessionReset)

    async def close_session(self, message: CloseSession) -> SessionClosed:
        return await self._ask(message, (), SessionClosed)

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        answer, media = self._request(message, payload, self._policy.tick_timeout_s)
        committed = await answer
        assert isinstance(committed, TickCommitted)
        return CommittedTick(committed=committed, media=media)

    async def _ask(self, message: Request, payload: Sequence[bytes], kind: type[AnswerT]) -> AnswerT:
        answer, _ = self._request(message, payload, self._policy.request_timeout_s)
        result = await answer
        assert isinstance(result, kind)
        return result

    def _request(
        self, message: Request, payload: Sequence[bytes | memoryview], timeout_s: float
    ) -> tuple[asyncio.Future[Answer], asyncio.Future[Media]]:
        if self._link is None or self._status is not WorkerStatus.READY:
            raise WorkerUnavailable(self._failure or f"no worker is ready: its status is {self._status}")
        return self._link.request(message, payload, timeout_s=timeout_s)

    # ------------------------------------------------------------ life of the processes

    async def start(self) -> None:
        if self._supervisor is not None:
            raise RuntimeError("this worker client was started before")
        self._supervisor = asyncio.create_task(self._supervise(), name="worker supervisor")

    async def stop(self) -> None:
        self._stopping.set()
        if self._run is not None:
            self._run.over.set()
        if self._supervisor is None:
            self._change(WorkerStatus.STOPPED)
        else:
            await asyncio.shield(self._supervisor)

    async def _supervise(self) -> None:
        """Keep a process running; what stops that is told, so that nobody waits for a worker that never comes."""
        try:
            await self._run_processes()
        except Exception as error:
            log.exception("the worker can't be kept running")
            self._change(WorkerStatus.FAILED, failure=f"the worker can't be kept running: {error}")

    async def _run_processes(self) -> None:
        crashes = load_crashes = 0
        while not self._stopping.is_set():
            ended = await self._run_one_process()
            if ended.final:
                self._change(WorkerStatus.FAILED, failure=ended.reason)
                return
            if self._stopping.is_set():
                break
            was_ready, healthy = ended.ready_for_s is not None, (ended.ready_for_s or 0.0) >= self._policy.healthy_s
            crashes = 1 if healthy else crashes + 1
            load_crashes = 0 if was_ready else load_crashes + 1
            if load_crashes >= self._policy.max_load_crashes:
                reason = f"the worker died {load_crashes} times in a row while loading; the last time: {ended.reason}"
                self._change(WorkerStatus.FAILED, failure=reason)
                return
            self._change(WorkerStatus.RESTARTING, failure=ended.reason)
            await self._pause(self._policy.pause_s(crashes))
        self._change(WorkerStatus.STOPPED)

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _run_one_process(self) -> _Ended:
        """Run one process from spawn to its end and leave nothing of it behind."""
        self._generation += 1
        self._memory = None
        run = _Run()
        self._run = run
        self._on_notice(run, LoadProgress(stage=LoadStage.SPAWN, fraction=0.0))
        link = WorkerLink(
            on_notice=lambda notice: self._on_notice(run, notice),
            on_memory=self._on_memory,
            on_lost=lambda reason: self._on_lost(run, reason),
        )
        try:
            process = await WorkerProcess.spawn(self._module, link, cpu_threads=self._start.cpu_threads)
        except OSError as error:
            run.end(f"the worker process could not be started: {error}")
            return run.ended()
        self._process, self._link = process, link
        watcher = asyncio.create_task(_end_on_exit(process, run))
        timer = asyncio.get_running_loop().call_later(self._policy.start_timeout_s, self._start_timed_out, run)
        try:
            link.send(self._start)
            await run.over.wait()
            await self._let_go(run, process, link)
        finally:
            timer.cancel()
            watcher.cancel()
            link.fail(STOPPED)
            await process.kill()
            self._process = self._link = None
        return run.ended()

    async def _let_go(self, run: _Run, process: WorkerProcess, link: WorkerLink) -> None:
        """End the process in the gentlest way that its state allows."""
        if self._stopping.is_set() and run.reason is None:
            link.end_reason = STOPPED
            ask = partial(link.send, StopWorker()) if run.ready_at_s is not None else None
            await process.leave(self._policy.stop_timeout_s, ask=ask)
            return
        self._failure_code = run.code
        self._change(WorkerStatus.FAILED if run.final else WorkerStatus.RESTARTING, failure=run.reason)
        # Closing the socket makes a process that still runs leave by itself.
        link.fail(run.reason or SOCKET_CLOSED)
        if await process.exits_within(min(EXIT_GRACE_S, self._policy.stop_timeout_s)):
            run.exited(process.returncode)

    def _start_timed_out(self, run: _Run) -> None:
        if run.ready_at_s is None:
            run.final = True
            run.end(f"the model was not ready within {self._policy.start_timeout_s:g} s ([worker] start_timeout_s)")

    # ------------------------------------------------------------ what the link reports

    def _on_notice(self, run: _Run, notice: Notice) -> None:
        match notice:
            case LoadProgress():
                self._progress = notice
                self._notify()
            case WorkerReady():
                run.ready_at_s = asyncio.get_running_loop().time()
                self._info, self._memory = notice.info, notice.memory
                self._progress = LoadProgress(stage=LoadStage.READY, fraction=1.0)
                self._change(WorkerStatus.READY)
            case WorkerFailed():
                run.final, run.code = True, notice.code
                run.end(notice.message)
            case _:
                assert_never(notice)

    def _on_lost(self, run: _Run, reason: str) -> None:
        run.end(reason)
        if self._status is WorkerStatus.READY and not self._stopping.is_set():
            self._change(WorkerStatus.RESTARTING, failure=run.reason)

    def _on_memory(self, memory: MemoryStats) -> None:
        self._memory = memory

    def _change(self, status: WorkerStatus, *, failure: str | None = None) -> None:
        self._status = status
        self._failure = failure
        self._notify()

    def _notify(self) -> None:
        for callback in tuple(self._subscribers):
            callback()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a process ended. `final`: another one would end the same way."""

    reason: str
    final: bool
    ready_for_s: float | None


class _Run:
    """What is known of one process while it runs. `over` is set when it is of no more use, or the client is to stop."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.reason: str | None = None
        self.final = False
        self.code: str | None = None
        self.ready_at_s: float | None = None
        self._over_at_s = 0.0

    def end(self, reason: str) -> None:
        """Note why the process is of no more use; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._over_at_s = asyncio.get_running_loop().time()
        self.over.set()

    def exited(self, returncode: int | None) -> None:
        """Put the exit code in the place of a mere closed socket."""
        if self.reason == SOCKET_CLOSED and returncode is not None:
            self.reason = describe_exit(returncode)

    def ended(self) -> _Ended:
        ready_for_s = None if self.ready_at_s is None else self._over_at_s - self.ready_at_s
        return _Ended(reason=self.reason or STOPPED, final=self.final, ready_for_s=ready_for_s)


async def _end_on_exit(process: WorkerProcess, run: _Run) -> None:
    """Note the exit of a process, but first let its socket be read to the end: there it may say why it leaves."""
    returncode = await process.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_GRACE_S):
            await run.over.wait()
    run.end(describe_exit(returncode))
