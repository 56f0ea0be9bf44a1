"""Run the test sets that this machine can run, installing Chromium and openpi-client where that is possible.

`make test` and `make test-slow` call this. A set that cannot run here is not skipped quietly: the last lines say what
did not run and why. On a CI machine (`CI=true`) that is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import openpi_process

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
    # The tests' tensors are tiny: a second OpenMP thread costs more in waiting than it computes.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "pytest", "-m", marker, "--durations=15"]
    code = subprocess.run(command, env=environment, check=False).returncode
    for what in not_run:
        print(f"\nNOT RUN: {what}.", flush=True)
    if not_run and os.environ.get("CI") == "true" and code == 0:
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
