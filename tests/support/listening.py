"""Where a server process listens, from what it says: a port found free may be taken by the time it is used."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

START_TIMEOUT_S = 180.0
"""Only ends a test that hangs."""

LISTENS = re.compile(r"worldserve listens on (http://\S+)\n")


def address_in(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Wait until a server that writes to a log says where it listens, and return that; it ends with a slash."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        found = LISTENS.search(log.read_text(encoding="utf-8", errors="replace"))
        if found is not None:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not say where it listens:\n{log.read_text(encoding='utf-8')}")
