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

TIDIES_WITHIN_S = 0.5


def own_bytes(process: psutil.Process) -> int:
    """Ask a process to tidy up, and return what it then holds."""
    process.send_signal(signal.SIGUSR2)
    time.sleep(TIDIES_WITHIN_S)
    return process_use(process).own_bytes
