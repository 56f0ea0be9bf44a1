"""Running a verb of the command line in a process of its own, to its end."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the process ended, and all that it printed."""

    code: int
    out: str
    err: str


async def worldserve(*arguments: str | Path) -> Outcome:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "server"),
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Outcome(code=process.returncode, out=out.decode(), err=err.decode())
