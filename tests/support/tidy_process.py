"""What a process holds once it has tidied up: not what its collector and malloc have not yet got round to."""

from __future__ import annotations

import os
import signal
import time

import psutil

from benchmarks.demo_process import process_use
from tests.support.server_process import ROOT

TIDIES_UP = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support/tidy")])}
"""The environment of Python processes that tidy up when they are asked to; so do the processes that they start."""

POLL_S = 0.3


def own_bytes(process: psutil.Process) -> int:
    """Ask a process to tidy up, and return what it holds once that gets no less."""
    process.send_signal(signal.SIGUSR2)
    held = [process_use(process).own_bytes]
    while len(held) < 3 or held[-1] < held[-2]:
        time.sleep(POLL_S)
        held.append(process_use(process).own_bytes)
    return held[-1]
