"""`python -m clients.conformance`: check a server against docs/protocol.md.

People call `worldserve conformance URL`, which starts this with a JSON object on standard input (`Job`). Exit codes:
0 every check passed or does not apply, 1 a check failed, or what must be seen of a client was not, or nothing could be
checked.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from clients.conformance.client_check import check_client
from clients.conformance.client_judge import CUT_AFTER_CHUNK
from clients.conformance.errors import ConformanceError
from clients.conformance.runner import addresses, describe, find_context, run_checks, select
from clients.conformance.table import conforms, show, to_json

PLAIN_WIDTH = 110
"""Columns where the output is no terminal, such as a log of a build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to check. `only`: names of checks, or their beginnings; none means all.

    With `client_port` a client is checked instead, which connects to that port of this machine.
    """

    url: str
    token: str | None = None
    only: list[str] = field(default_factory=list)
    answer_s: float
    quiet_s: float
    json_file: str | None = None
    client_port: int | None = None


def main() -> int:
    """Run the job on standard input and return the exit code."""
    logging.basicConfig(level=logging.CRITICAL)
    try:
        return asyncio.run(_run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job)))
    except (ConformanceError, msgspec.DecodeError) as error:
        print(f"worldserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(job: Job) -> int:
    checks = select(job.only)
    world, http = addresses(job.url)
    context = await find_context(world=world, http=http, token=job.token, answer_s=job.answer_s, quiet_s=job.quiet_s)
    about = f"{world}   {describe(context)}"
    if job.client_port is not None:
        results = await check_client(context, port=job.client_port, wait_s=job.answer_s, on_ready=_ask_to_connect)
        about = f"a client of {about}"
    else:
        with Console(stderr=True).status("checking") as status:
            results = await run_checks(context, checks, on_start=lambda check: status.update(f"checking {check.name}"))
    show(results, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH), about=about)
    if job.json_file is not None:
        try:
            await asyncio.to_thread(Path(job.json_file).write_bytes, to_json(results, url=job.url))
        except OSError as error:
            raise ConformanceError(f"{job.json_file}: {error.strerror or error}") from error
    return 0 if conforms(results) else 1


def _ask_to_connect(address: str) -> None:
    print(
        f"waiting for a client at {address}\nLet it walk for 10 chunks or more and close its session; "
        f"its link is cut once, behind chunk {CUT_AFTER_CHUNK}.",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
