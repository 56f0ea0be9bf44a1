"""One worker process: spawned with one end of a socket pair, and ended without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import worldmodel
from server.worker_link import WorkerLink

EXIT_REASONS = {4: "its device is lost", 5: "page-locked memory can't be unlocked; its log says which"}
"""What the exit codes of `worldmodel/worker.py` mean that are sent no reason for."""

EXIT_GRACE_S = 1.0
"""How long a process that already closed its socket may take to exit before it is killed.

The other way round it is how long what an exited process left in its socket may take to be read.
"""

KEPT_ALLOCATION_BYTES = 32 * 1024 * 1024
KEPT_HEAP_BYTES = 512 * 1024 * 1024
"""What glibc keeps of freed memory: single allocations up to the first size, and the top of the heap up to the second.

The decoder frees and allocates the same ten megabytes over and over. Given back to the system each time they cost 16000
page faults a chunk of the demo world, 5 % of its time (2026-11-29).
"""


class WorkerProcess:
    """A running worker process. It leads its own session, so a terminal's Ctrl-C reaches the server only."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, module: str, link: WorkerLink, *, cpu_threads: int) -> WorkerProcess:
        """Start `python -m module --socket-fd N` and connect `link` to it. Raises OSError if that is not possible.

        The worker's standard output and error both go to the server's standard error.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    # Without -P a folder named `server` where the user happens to be would hide ours.
                    "-P",
                    "-m",
                    module,
                    "--socket-fd",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                    env=worker_environment(cpu_threads),
                )
            on_error.pop_all()
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def exits_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            # A loop that stood still finds the end of the time and that of the process in the same turn.
            return self._process.returncode is not None
        return True

    async def leave(self, stop_timeout_s: float, *, ask: Callable[[], None] | None) -> None:
        """End the process within `stop_timeout_s`: ask (half of the time), terminate (a quarter), kill.

        `ask=None` goes straight to SIGTERM, for a process that does not read its socket yet.
        """
        if ask is not None:
            ask()
            if await self.exits_within(stop_timeout_s / 2):
                return
        self._signal(signal.SIGTERM)
        if not await self.exits_within(stop_timeout_s / 4):
            await self.kill()

    async def kill(self) -> None:
        """Kill the process and its children, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def worker_environment(cpu_threads: int) -> dict[str, str]:
    """Return the server's environment, with what OpenMP and malloc must know before torch is imported.

    OpenMP threads that spin while they wait take the cores from the server's encoder: decode was measured four times
    slower on two cores. The folder of our packages is put on the path if it is a checkout.
    """
    environment = dict(os.environ)
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(cpu_threads)
    environment["MALLOC_MMAP_THRESHOLD_"] = str(KEPT_ALLOCATION_BYTES)
    environment["MALLOC_TRIM_THRESHOLD_"] = str(KEPT_HEAP_BYTES)
    root = packages_root()
    if root.name not in ("site-packages", "dist-packages"):
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *inherited])
    return environment


def packages_root() -> Path:
    """Return the folder that holds the package `worldmodel` this server imported."""
    assert worldmodel.__file__ is not None
    return Path(worldmodel.__file__).resolve().parents[1]


def describe_exit(returncode: int) -> str:
    """Say how a process ended, for people."""
    if returncode >= 0:
        reason = f": {EXIT_REASONS[returncode]}" if returncode in EXIT_REASONS else ""
        return f"the worker process ended with exit code {returncode}{reason}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"the worker process was ended by {name}"
