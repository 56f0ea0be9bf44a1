"""A real `worldserve serve` in a process of its own, with the fake model in a real worker process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
"""All three are only there to end a test that hangs."""

NOTHING: Mapping[str, str] = MappingProxyType({})


def loading(folder: str) -> Mapping[str, str]:
    """Return the environment of Python processes that load the `sitecustomize.py` of a folder here as they start."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support" / folder)])}


CONFIG = """\
[model]
name = "fake"
checkpoint = "package:worldmodel/data/demo_world"
width = 64
height = 48
fps = 12
precision = "fp32"

[model.options]
chunk_ms = {chunk_ms}
load_ms = {load_ms}
prompt_commands = true

[session]
# Longer than a busy machine takes to start another worker.
resume_s = 120.0

[kvcache]
requested_sessions = {capacity}

[worker]
cpu_threads = 1
restart_backoff_s = 0.1
"""


class ServerProcess:
    """A running server. `url` ends with a slash."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.ps = psutil.Process(process.pid)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=ANSWER_TIMEOUT_S)

    def post(self, path: str) -> httpx.Response:
        return httpx.post(self.url + path, trust_env=False, timeout=ANSWER_TIMEOUT_S)

    def end_all_sessions(self) -> None:
        """Close every session, parked ones too, and wait until nothing is left of them."""
        for session in self.get("v1/sessions").json()["sessions"]:
            path = f"{self.url}v1/sessions/{session['session_id']}"
            assert httpx.delete(path, trust_env=False, timeout=ANSWER_TIMEOUT_S).status_code == 204
        self.until_empty()

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.get("v1/info").json()
        return info

    def metric(self, name: str) -> float:
        match = re.search(rf"^{re.escape(name)} (\S+)$", self.get("metrics").text, re.MULTILINE)
        assert match, f"no metric {name}"
        return float(match[1])

    def worker(self) -> psutil.Process:
        """Return the worker's process."""
        (worker,) = (child for child in self.ps.children() if "--socket-fd" in child.cmdline())
        return worker

    def until(self, condition: Callable[[], object], *, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for something outside this process; the time-out only ends a test that hangs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"gave up waiting until {what}"
            time.sleep(0.05)

    def until_ready(self) -> None:
        self.until(lambda: self.get("readyz").status_code == 200, what="the server is ready")

    def until_empty(self) -> None:
        """Wait until no session holds a place and all pages are free."""
        self.until(self.is_empty, what="no session is left, and all pages are free")

    def is_empty(self) -> bool:
        capacity = self.info()["capacity"]
        return bool(capacity["resident"] == 0 and capacity["free_pages"] == capacity["total_pages"])

    def terminate(self) -> None:
        """Send SIGTERM and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=STOP_TIMEOUT_S)


@contextmanager
def server_process(
    folder: Path,
    *flags: str,
    capacity: int = 3,
    chunk_ms: float = 20.0,
    load_ms: float = 0.0,
    wait: bool = True,
    environment: Mapping[str, str] = NOTHING,
) -> Iterator[ServerProcess]:
    """Start a server of the fake model on a free port; with `wait` until it is ready."""
    text = CONFIG.format(capacity=capacity, chunk_ms=chunk_ms, load_ms=load_ms)
    with running_configuration(folder, text, *flags, wait=wait, environment=environment) as server:
        yield server


@contextmanager
def running_configuration(
    folder: Path, text: str, *flags: str, wait: bool = True, environment: Mapping[str, str] = NOTHING
) -> Iterator[ServerProcess]:
    """Start a server of a configuration, kept in a folder, on a free port; with `wait` until it is ready."""
    config = folder / "server.toml"
    config.write_text(text, encoding="utf-8")
    with running_command("server", "serve", str(config), "--port", "0", *flags, environment=environment) as server:
        if wait:
            server.until_ready()
        yield server


@contextmanager
def running_command(*arguments: str, environment: Mapping[str, str] = NOTHING) -> Iterator[ServerProcess]:
    """Run `python -m ARGUMENTS`, which says where it listens, until the caller is done; nothing of it may be left."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, env=whole, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, f"the server said {line!r}"
        yield ServerProcess(process, match[0])
    finally:
        children = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        _, alive = psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)
        assert not alive, f"the server left {alive} behind"
