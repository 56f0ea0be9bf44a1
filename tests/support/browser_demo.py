"""`worldserve demo` in a process of its own, for tests and pictures of the page."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.listening import address_in

READY_WITHIN_S = 180.0
RESUME_S = 120
"""A reload of the page takes a while on a busy machine."""


@contextmanager
def demo_server(log: Path, *, wait: bool = True) -> Iterator[str]:
    """Address of the demo server. `wait`: until its model is ready; else until it answers."""
    command = "import sys; from server.cli import main; sys.exit(main())"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", command, "demo", "--no-browser", "--port", "0", "--session.resume-s", str(RESUME_S)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    try:
        url = address_in(log, server)
        _wait_for(f"{url}{'readyz' if wait else 'healthz'}", server, log)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the demo server did not become ready:\n{log.read_text()}")
