"""Verbs whose work needs torch: they run as a program of their own, so that the command line stays light."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from server.worker_process import packages_root, worker_environment

TOOLS = {
    "evaluate": (
        "training.demo_world.evaluation",
        "compare the served demo world with its renderer (source tree only)",
    ),
    "inspect": ("worldmodel.tools.inspect", "show what a checkpoint holds and what it takes to serve it"),
    "make-checkpoint": (
        "worldmodel.tools.make_checkpoint",
        "write a random checkpoint like a published one",
    ),
    "cache": ("worldmodel.tools.cache", "list, verify or prune a cache of final weights"),
}
"""Verb: the module that does it, and its line in the help. All arguments go to the module."""

CLEAR_AWAY_S = 40.0
"""How long a program may take to end after Ctrl-C; a second one ends it at once."""


def run_tool(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb's program on this terminal and return its exit code, 128 + N if signal N ended it.

    SIGTERM is handed on: a program that nobody waits for would write its 74 GB to the end.
    """
    module, _ = TOOLS[verb]
    if not packages_root().joinpath(*module.split(".")).with_suffix(".py").is_file():
        print(
            f"worldserve: {verb}: works from the source tree only, this installation has no {module}", file=sys.stderr
        )
        return 2
    command = [sys.executable, "-P", "-m", module, *arguments]
    asked: list[int] = []
    programs: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: object) -> None:
        if programs:
            programs[0].send_signal(number)
        else:
            asked.append(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        with subprocess.Popen(command, env=worker_environment(cpu_threads=1)) as program:
            programs.append(program)
            # What was asked while the program was starting.
            for number in asked:
                program.send_signal(number)
            try:
                code = program.wait()
            except KeyboardInterrupt:
                _let_finish(program)
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def _let_finish(program: subprocess.Popen[bytes]) -> None:
    """Wait while the program clears away what it has begun, such as a server: the terminal has told it too."""
    try:
        program.wait(CLEAR_AWAY_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        program.kill()
