"""How the examples are called, and how they end: what goes wrong is one line on standard error, and exit code 1."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from clients.python import WorldClientError

URL = "ws://127.0.0.1:8000"


def arguments_of(doc: str | None, *required: str, optional: Sequence[tuple[str, str | None]] = ()) -> list[Any]:
    """Read the command line: required words, then words with defaults, then `--token`. `doc` is what `--help` says."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in required:
        parser.add_argument(name, metavar=name)
    for name, default in optional:
        parser.add_argument(name, metavar=name, nargs="?", default=default)
    parser.add_argument("--token", help="where the server asks for one")
    return list(vars(parser.parse_args()).values())


def run(act: Callable[[], Coroutine[Any, Any, object] | None]) -> int:
    """Run an example, with asyncio or without. Returns its exit code."""
    try:
        if (coroutine := act()) is not None:
            asyncio.run(coroutine)
    except* (WorldClientError, ValueError, OSError) as group:
        print(first_of(group), file=sys.stderr)
        return_code = 1
    except* KeyboardInterrupt:
        return_code = 130
    else:
        return_code = 0
    return return_code


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, however deep it lies: a task group wraps what its body raises."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
