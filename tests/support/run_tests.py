"""Run the test sets that this machine can run, installing Chromium and openpi-client where that is possible.

`make test` and `make test-slow` call this. A set that cannot run here is not skipped quietly: the last lines say what
did not run and why. On a CI machine (`CI=true`) that is a failure.

The default set runs in two lanes at the same time: tests with servers and browsers mostly wait, the others compute.
The slow set measures, so it runs in one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import openpi_process

WAITING_TESTS = ("tests/e2e", "tests/browser")
"""Servers and browsers: they mostly wait. All other tests mostly compute."""

APT_INSTALL = ("apt-get", "install", "-y", "--no-install-recommends", "chromium")


def install_chromium() -> str | None:
    """Make sure there is a Chromium; return why not, or None."""
    if shutil.which("chromium"):
        return None
    if shutil.which("apt-get") is None:
        return "no `chromium` on the PATH, and this is not a Debian system where it could be installed"
    if os.geteuid() != 0:
        return f"no `chromium` on the PATH; as root: {' '.join(APT_INSTALL)}"
    print("Installing Chromium for the browser tests ...", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (("apt-get", "update", "-qq"), (*APT_INSTALL, "-qq")):
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            return f"`{' '.join(command)}` failed with exit code {done.returncode}"
    return None if shutil.which("chromium") else "the package `chromium` put no `chromium` on the PATH"


def pytest_command(marker: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", marker, "--durations=15", *more]


def test_environment() -> dict[str, str]:
    """The tests' tensors are tiny: a second OpenMP thread costs more in waiting than it computes.

    The tests start a hundred processes of ours. What one of them has compiled the others read.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def run_pytest(marker: str, *more: str) -> int:
    return subprocess.run(pytest_command(marker, *more), env=test_environment(), check=False).returncode


def run_two_lanes(marker: str) -> int:
    """Run the computing tests beside the waiting ones, whose output is shown as it comes; the other's follows it."""
    with tempfile.TemporaryFile(mode="w+") as output:
        others = (f"--ignore={folder}" for folder in WAITING_TESTS)
        command = pytest_command(marker, *others, "-p", "no:cacheprovider")
        computing = subprocess.Popen(command, env=test_environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            waiting_code = run_pytest(marker, *WAITING_TESTS)
            computing_code = computing.wait()
        finally:
            computing.kill()
            computing.wait()
        output.seek(0)
        print(output.read(), flush=True)
    return waiting_code or computing_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="run the slow set instead of the default one")
    arguments = parser.parse_args()
    marker = "slow and not gpu" if arguments.slow else "not gpu and not slow"
    not_run = []
    for name, reason in (("browser", install_chromium()), ("openpi", openpi_process.install())):
        if reason:
            marker += f" and not {name}"
            not_run.append(f"the {name} tests: {reason}")
    code = run_pytest(marker) if arguments.slow else run_two_lanes(marker)
    for what in not_run:
        print(f"\nNOT RUN: {what}.", flush=True)
    if not_run and os.environ.get("CI") == "true" and code == 0:
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
