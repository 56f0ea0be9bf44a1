"""The `conformance` verb: checks a running server, ours or anybody's, or a client, against docs/protocol.md.

The checks are a client, so they run as a process of their own: `python -m clients.conformance`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec

from server.config_values import ConfigError
from server.worker_process import worker_environment


def add_conformance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the verb takes."""
    parser.add_argument("url", metavar="URL", help="a running server, for example http://127.0.0.1:8000")
    parser.add_argument("--token", help="token of the server")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only checks of this name or group")
    parser.add_argument(
        "--client",
        type=int,
        metavar="PORT",
        help="check a client instead: it connects to this port of this machine, and is led to the server",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--answer-timeout", type=float, default=60.0, help="seconds an answer or a chunk may take (default 60)"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=1.0,
        help="seconds to wait, at least, where nothing may come (default 1; twice as long as a chunk takes, if more)",
    )


def check_conformance(arguments: argparse.Namespace) -> int:
    """Run the checks and return their exit code. Raises `ConfigError` for a wrong call."""
    for flag, seconds in (("--answer-timeout", arguments.answer_timeout), ("--quiet", arguments.quiet)):
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"{flag}: expected seconds above 0, got {seconds:g}")
    if arguments.client is not None and not 0 <= arguments.client < 2**16:
        raise ConfigError(f"--client: expected a port from 0 to 65535, got {arguments.client}")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        raise ConfigError(f"{arguments.json}: expected the name of a file in a folder that exists")
    job = {
        "url": arguments.url,
        "token": arguments.token,
        "only": arguments.only,
        "answer_s": arguments.answer_timeout,
        "quiet_s": arguments.quiet,
        "client_port": arguments.client,
        "json_file": None if arguments.json is None else str(arguments.json),
    }
    command = [sys.executable, "-P", "-m", "clients.conformance"]
    done = subprocess.run(command, input=msgspec.json.encode(job), env=worker_environment(1), check=False)
    return done.returncode
