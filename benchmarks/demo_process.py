"""A real demo server in a process of its own, and what it uses of this machine. For benchmarks and tests."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """What one process holds at one moment. Threads and file descriptors are counts.

    `own_bytes` is the resident memory the process has filled itself, without files of libraries that it has mapped.
    """

    rss_bytes: int
    own_bytes: int
    num_threads: int
    num_fds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoProcess:
    """A ready server. `url` ends in a slash."""

    url: str
    process: psutil.Process

    @property
    def world_url(self) -> str:
        """The WebSocket of the `world` dialect."""
        return self.url.replace("http://", "ws://") + "v1/world"

    @property
    def worker(self) -> psutil.Process:
        """The one worker process."""
        (worker,) = self.process.children()
        return worker

    def server_use(self) -> ProcessUse:
        return process_use(self.process)

    def worker_use(self) -> ProcessUse:
        return process_use(self.worker)

    def info(self) -> dict[str, Any]:
        """Ask `/v1/info`. Blocks."""
        with urllib.request.urlopen(f"{self.url}v1/info") as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def metrics(self) -> dict[str, float]:
        """Ask `/metrics`: samples by name and labels, as the text has them. Blocks."""
        with urllib.request.urlopen(f"{self.url}metrics") as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


def process_use(process: psutil.Process) -> ProcessUse:
    """Look at a process (Linux)."""
    with process.oneshot():
        return ProcessUse(
            rss_bytes=process.memory_info().rss,
            own_bytes=_own_bytes(process.pid),
            num_threads=process.num_threads(),
            num_fds=process.num_fds(),
        )


def _own_bytes(pid: int) -> int:
    """Read anonymous memory, swapped out or not. Other processes that use the same libraries do not change it."""
    with Path(f"/proc/{pid}/status").open() as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


@contextmanager
def demo_process(log: Path, *arguments: str, verb: Sequence[str] = ("demo", "--no-browser")) -> Iterator[DemoProcess]:
    """Run `worldserve demo` on a free port until the caller is done. Everything it says goes to `log`.

    `arguments` are further flags; `verb` replaces the start of the command line. Raises RuntimeError with the log if
    the server ends before it is ready.
    """
    command = [str(Path(sys.executable).with_name("worldserve")), *verb, "--port", "0", *arguments]
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as popen:
        try:
            yield DemoProcess(url=_wait_until_ready(popen, log), process=psutil.Process(popen.pid))
        finally:
            popen.terminate()
            try:
                popen.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                popen.kill()
                raise


def _wait_until_ready(popen: subprocess.Popen[str], log: Path) -> str:
    """Read what the command prints up to its line "ready: URL  (...)" and return the URL."""
    assert popen.stdout is not None
    for line in popen.stdout:
        word, _, rest = line.partition(" ")
        if word == "ready:":
            return rest.split()[0]
    raise RuntimeError(f"the server ended before it was ready:\n{log.read_text()}")
