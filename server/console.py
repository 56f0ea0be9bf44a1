"""What the terminal shows while the server or a job runs."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from server.worker import Worker, WorkerStatus
from worldmodel.messages import LoadProgress, LoadStage

STAGE_TEXT = {
    LoadStage.SPAWN: "starting the worker",
    LoadStage.CHECKPOINT: "reading the checkpoint",
    LoadStage.TRANSFORMER: "loading the transformer",
    LoadStage.VAE: "loading the VAE",
    LoadStage.TEXT_ENCODER: "loading the text encoder",
    LoadStage.KV_POOL: "allocating the KV pool",
    LoadStage.WARM_UP: "warming up",
    LoadStage.READY: "ready",
}


log = logging.getLogger(__name__)


class LoadBar:
    """A bar that follows the load stages of a worker; one line per stage where the output is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._stage: LoadStage | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        self._task = self._progress.add_task(STAGE_TEXT[LoadStage.SPAWN], total=1.0)
        return self

    def show(self, progress: LoadProgress | None) -> None:
        if progress is None or self._task is None:
            return
        text = STAGE_TEXT[progress.stage] + (f" ({progress.detail})" if progress.detail else "")
        if not self._console.is_terminal and progress.stage is not self._stage:
            self._console.print(text, markup=False, highlight=False)
        self._stage = progress.stage
        self._progress.update(self._task, description=text, completed=progress.fraction)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class LoadLog:
    """Logs each load stage once, where standard error is for machines."""

    def __init__(self) -> None:
        self._stage: LoadStage | None = None

    def show(self, progress: LoadProgress | None) -> None:
        if progress is not None and progress.stage is not self._stage:
            self._stage = progress.stage
            log.info(STAGE_TEXT[progress.stage])


async def follow_loading(worker: Worker, bar: LoadBar | LoadLog) -> None:
    """Show the load stages until the worker is ready, or never will be."""
    changed = asyncio.Event()
    unsubscribe = worker.subscribe(changed.set)
    try:
        while worker.status in (WorkerStatus.LOADING, WorkerStatus.RESTARTING):
            bar.show(worker.progress)
            await changed.wait()
            changed.clear()
    finally:
        unsubscribe()
