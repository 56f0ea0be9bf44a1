"""What a process holds once it has tidied up: not what its collector and malloc have not yet got round to."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from benchmarks.demo_process import process_use
from tests.support.server_process import loading

TIDIES_UP = loading("tidy")
"""The environment of Python processes that tidy up when they are asked to; so do the processes that they start."""

POLL_S = 0.3

TIMEOUT_S = 60.0
"""Only there to end a test that hangs."""


def own_bytes(process: psutil.Process) -> int:
    """Have a process tidy up, and return what it holds once that gets no less."""
    name, deadline = _name(process), time.monotonic() + TIMEOUT_S
    process.send_signal(signal.SIGUSR2)
    while _name(process) == name:
        assert time.monotonic() < deadline, f"process {process.pid} does not tidy up"
        time.sleep(0.02)
    held = [process_use(process).own_bytes]
    while len(held) < 2 or held[-1] < held[-2]:
        time.sleep(POLL_S)
        held.append(process_use(process).own_bytes)
    return held[-1]


def _name(process: psutil.Process) -> str:
    """Read the name that `tidy/sitecustomize.py` counts in."""
    return Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8")
