"""The runtime weight cache on the command line: `python -m worldmodel.tools.cache list|verify|prune FOLDER`.

`list` and `verify` write nothing. Exit codes: 0 done, 1 the folder can't be used, or an entry is damaged or can't be
read, 2 the call is wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from offload.cache_folder import CacheFolder
from offload.cache_upkeep import (
    EntryFacts,
    EntryKind,
    list_entries,
    list_leftovers,
    prune,
    verify_entry,
)
from offload.errors import CacheError
from worldmodel.tools.amounts import bytes_text
from worldmodel.tools.argument_parser import ToolParser

HOUR_S = 3600.0
ADDRESS_DIGITS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is asked and return the exit code."""
    arguments = _parser().read(argv)
    try:
        if not arguments.folder.is_dir():
            return _fail(f"{arguments.folder}: no such folder")
        folder = CacheFolder(arguments.folder)
        if not folder.is_there:
            return _fail(f"{arguments.folder}: is no weight cache, expected a folder with entries/ in it")
        match arguments.action:
            case "list":
                return _list(folder)
            case "verify":
                return _verify(folder)
            case _:
                return _prune(folder, arguments)
    except (CacheError, OSError) as error:
        return _fail(str(error))


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="worldserve cache",
        description="Look after a cache of final weights (host = 'runtime_cache').",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    lines = {
        "list": "show what is in the cache",
        "verify": "read every byte and compare it with what was published",
        "prune": "delete what was not used for long, by --max-bytes, --max-age-hours, or both; entries in use stay",
    }
    for name, line in lines.items():
        action = actions.add_parser(name, help=line)
        action.add_argument("folder", type=Path, metavar="FOLDER", help="the cache_folder of the section [offload]")
        if name == "prune":
            action.add_argument("--max-bytes", type=_number, help="keep at most so much, by last use")
            action.add_argument("--max-age-hours", type=_hours, help="delete what was not used for so long")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise argparse.ArgumentTypeError(f"expected bytes from 0, got {text[:40]!r}")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < 1e9:
        raise argparse.ArgumentTypeError(f"expected hours from 0, got {text[:40]!r}")
    return hours


def _list(folder: CacheFolder) -> int:
    entries = list(list_entries(folder))
    for entry in entries:
        print(_line(entry))
    for left in list_leftovers(folder):
        state = "being written or deleted" if left.is_in_use else "left by a process that was killed, prune deletes it"
        print(f"temporary         {bytes_text(left.num_bytes):>9}  {state}: {left.name}")
    ours = [entry for entry in entries if entry.kind is EntryKind.OURS]
    print(f"{len(ours)} {'entry' if len(ours) == 1 else 'entries'}, {_size(ours)}")
    return 0


def _line(entry: EntryFacts) -> str:
    used = datetime.fromtimestamp(entry.used_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = ", ".join(f"{name} {value}" for name, value in entry.metadata.items())
    start = f"{entry.address[:ADDRESS_DIGITS]}  {bytes_text(entry.num_bytes):>9}  used {used}"
    return f"{start}  {_state(entry)}  {about}".rstrip()


def _state(entry: EntryFacts) -> str:
    match entry.kind:
        case EntryKind.OTHER:
            return f"NO ENTRY OF OURS: {entry.problem}"
        case EntryKind.UNREADABLE:
            return f"CAN'T BE READ: {entry.problem}"
        case _ if entry.problem:
            return f"DAMAGED{', in use' if entry.is_in_use else ''}: {entry.problem}"
        case _:
            return "in use" if entry.is_in_use else "idle"


def _size(entries: Sequence[EntryFacts]) -> str:
    return bytes_text(sum(entry.num_bytes for entry in entries))


def _verify(folder: CacheFolder) -> int:
    """Tell of every entry; what can't be read can't be told to be whole."""
    num_bad = 0
    for entry in list_entries(folder):
        state, is_bad = _state(entry), entry.kind is EntryKind.UNREADABLE
        if entry.kind is EntryKind.OURS:
            problem = verify_entry(folder, entry.address)
            if problem is not None and not (folder.entries / entry.address).exists():
                # Another process evicted it meanwhile.
                continue
            state, is_bad = "OK" if problem is None else f"DAMAGED: {problem}", problem is not None
        num_bad += is_bad
        print(f"{entry.address[:ADDRESS_DIGITS]}  {state}", flush=True)
    return 1 if num_bad else 0


def _prune(folder: CacheFolder, arguments: argparse.Namespace) -> int:
    if arguments.max_bytes is None and arguments.max_age_hours is None:
        print("cache: expected --max-bytes, --max-age-hours, or both", file=sys.stderr)
        return 2
    max_age_s = None if arguments.max_age_hours is None else HOUR_S * arguments.max_age_hours
    pruned = prune(folder, max_bytes=arguments.max_bytes, max_age_s=max_age_s, now_s=time.time())
    for name in pruned.leftovers:
        print(f"{name}  left by a process that was killed, deleted")
    for entry in pruned.removed:
        print(f"{entry.address[:ADDRESS_DIGITS]}  deleted")
    for entry in pruned.stuck:
        print(f"{entry.address[:ADDRESS_DIGITS]}  STAYS: {entry.problem}")
    print(f"{len(pruned.removed)} deleted, {_size(pruned.removed)}")
    return 1 if pruned.stuck else 0


def _fail(message: str) -> int:
    print(f"cache: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    # A reader that has enough, `head` for example, ends this program without a word.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
