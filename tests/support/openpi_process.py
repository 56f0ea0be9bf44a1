"""The real, unmodified openpi-client in an environment of its own, because it needs numpy below 2.

`run_tests.py` installs it; a test that finds none fails and says how to get it, and never skips. The client runs as a
child process that reads orders and writes answers as lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

VERSION = "0.1.2"
ENVIRONMENT = Path(sys.prefix) / "openpi-client"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
DRIVER = Path(__file__).with_name("openpi_driver.py")
# The client imports typing_extensions and does not ask for it.
PACKAGES = (f"openpi-client=={VERSION}", "typing_extensions")
INSTALL = (str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)


def installed_version() -> str | None:
    """Return the version that is installed and can be imported, None if there is none."""
    if not PYTHON.exists():
        return None
    code = (
        "import importlib.metadata as m, openpi_client.websocket_client_policy as client; "
        "print(m.version('openpi-client'))"
    )
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def install() -> str | None:
    """Make sure that the client is there; return why not, or None."""
    if installed_version() == VERSION:
        return None
    print(f"Installing openpi-client {VERSION} into an environment of its own ...", flush=True)
    for command in ((sys.executable, "-m", "venv", str(ENVIRONMENT)), INSTALL):
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            return f"`{' '.join(command)}` failed with exit code {done.returncode}"
    return None if installed_version() == VERSION else f"{ENVIRONMENT} has openpi-client {installed_version()}"


class OpenPiClient:
    """One `WebsocketClientPolicy` in a child process. Arrays travel by file, so that the client packs them itself."""

    def __init__(self, address: str, folder: Path, *, api_key: str | None = None) -> None:
        """Connect to `address`, a ws:// URL. Raises `RuntimeError` if the client is not installed, or can't connect."""
        if installed_version() != VERSION:
            raise RuntimeError(
                f"openpi-client {VERSION} is not installed in {ENVIRONMENT}: run the tests with `make test`, or "
                f"`python -m venv {ENVIRONMENT}` and `{' '.join(INSTALL)}`"
            )
        self._folder = folder
        self._num_requests = 0
        self._process = subprocess.Popen(
            # -P: what lies beside the driver is ours and not the client's.
            [str(PYTHON), "-P", str(DRIVER), address, *([api_key] if api_key else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.metadata: dict[str, Any] = self._receive()["metadata"]
        except BaseException:
            self.close()
            raise

    def infer(self, observation: dict[str, Any]) -> Any:
        """Call `policy.infer` and return what it returned, arrays or plain values. Raises `RuntimeError` as it did."""
        self.send(observation)
        return self.receive()

    def send(self, observation: dict[str, Any]) -> None:
        """Begin a call without waiting for its end."""
        self._num_requests += 1
        path = self._folder / f"{id(self)}-{self._num_requests}.npz"
        arrays = {name: value for name, value in observation.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in observation.items() if not isinstance(value, np.ndarray)}
        np.savez(path, **{name.replace("/", "|"): array for name, array in arrays.items()})
        self._write({"arrays": str(path), "plain": plain})

    def receive(self) -> Any:
        answer = self._receive()
        return np.load(answer["array"]) if "array" in answer else answer["value"]

    def reset(self) -> None:
        """Call `policy.reset`, which does nothing in this client."""
        self._write({"reset": True})
        assert self._receive() == {"value": None}

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client's process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
