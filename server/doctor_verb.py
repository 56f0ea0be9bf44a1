"""The `doctor` verb: can this host run a configuration? A row for each check and a verdict.

The server's half is here (ports, packages, encoder, disk); the worker's half (`worldmodel/tools/doctor.py`) needs torch
and runs as a program of its own.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.app import start_message
from server.config import ServerConfig
from server.serving import ServeError, bind
from server.start_image_check import start_image_problems
from server.worker_process import worker_environment

PACKAGES = ("av", "torch", "transformers", "safetensors")
LOW_DISK_BYTES = 1_000_000_000
PLAIN_WIDTH = 110
"""Columns where the output is no terminal, as for `conformance`."""

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report; `status` is OK, WARN or FAIL, `details` has in full what is cut in `found`."""

    status: str
    name: str
    expected: str
    found: str
    details: tuple[str, ...] = ()


def doctor(config: ServerConfig, *, as_json: bool) -> int:
    """Run all checks, print them, and return 1 if one failed."""
    checks = [*server_checks(config), *worker_checks(config)]
    if as_json:
        print(json.dumps([msgspec.to_builtins(check) for check in checks], indent=2))
    else:
        _show(
            checks,
            Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH),
            about=f"{config.model.name}, {config.model.checkpoint}",
        )
    return 1 if any(check.status == "FAIL" for check in checks) else 0


def server_checks(config: ServerConfig) -> Iterator[Check]:
    """Check what the server process needs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    found = f"missing {', '.join(missing)}: pip install 'worldserve[demo]'" if missing else "installed"
    yield _check("packages", ok=not missing, expected=", ".join(PACKAGES), found=found)
    if "av" not in missing:
        yield _check_encoder()
    yield _check_port(config)
    yield _check_temporary()
    if config.model.start_images:
        yield _check_start_images(config)
    if config.recording.folder:
        yield _check_recordings(Path(config.recording.folder), config.recording.max_bytes)


def _check(name: str, *, ok: bool, expected: str, found: str) -> Check:
    return Check(status="OK" if ok else "FAIL", name=name, expected=expected, found=found)


def _check_encoder() -> Check:
    import av

    is_there = "libx264" in av.codecs_available
    return _check("encoder", ok=is_there, expected="H.264 by libx264", found="available" if is_there else "not in PyAV")


def _check_port(config: ServerConfig) -> Check:
    expected = f"{config.server.host}:{config.server.port} free"
    try:
        bind(config.server, stall_timeout_s=config.session.stall_timeout_s).close()
    except ServeError as error:
        return _check("port", ok=False, expected=expected, found=str(error))
    return _check("port", ok=True, expected=expected, found="free")


def _check_temporary() -> Check:
    """Say what is left where torch and other libraries put short-lived files."""
    expected = f"{LOW_DISK_BYTES / 1e9:.1f} GB for temporary files"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return _check("disk", ok=False, expected=expected, found="no folder that can be written to")
    free_bytes = shutil.disk_usage(folder).free
    return Check(
        status="OK" if free_bytes >= LOW_DISK_BYTES else "WARN",
        name="disk",
        expected=expected,
        found=f"{free_bytes / 1e9:.1f} GB free in {folder}",
    )


def _check_start_images(config: ServerConfig) -> Check:
    problems = tuple(f"{key}: {problem}" for key, problem in start_image_problems(config))
    return Check(
        status="FAIL" if problems else "OK",
        name="start images",
        expected=f"{len(config.model.start_images)} that can be decoded",
        found=f"{len(problems)} cannot: {problems[0]}" if problems else "decoded",
        details=problems,
    )


def _check_recordings(folder: Path, max_bytes: int | None) -> Check:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    wanted_bytes = LOW_DISK_BYTES if max_bytes is None else max_bytes
    status = "OK" if free_bytes >= wanted_bytes else "WARN" if free_bytes >= LOW_DISK_BYTES else "FAIL"
    return Check(
        status=status,
        name="disk for recordings",
        expected=f"{wanted_bytes / 1e9:.1f} GB in {folder}",
        found=f"{free_bytes / 1e9:.1f} GB free",
    )


def worker_checks(config: ServerConfig) -> list[Check]:
    """Check what the worker process needs, in a process like it."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "worldmodel.tools.doctor"],
        input=msgspec.json.encode(start_message(config)),
        capture_output=True,
        env=worker_environment(config.cpu_threads),
        check=False,
    )
    if ended.returncode != 0:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        found = f"it ended with exit code {ended.returncode}: {last}"
        return [_check("worker", ok=False, expected="a program that can be started", found=found)]
    return msgspec.json.decode(ended.stdout, type=list[Check])


def _show(checks: list[Check], console: Console, *, about: str) -> None:
    """Print what was asked, a row for each check, and one line that sums up."""
    console.print(Text.assemble(("worldserve doctor", "bold"), f"   {about}", overflow="fold"))
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
    for column in ("", "check", "found", "expected"):
        table.add_column(column, style="dim" if column == "expected" else "", overflow="fold")
    for check in checks:
        style = STYLES[check.status]
        found = Text(check.found, style="" if check.status == "OK" else style)
        table.add_row(Text(check.status, style=style), check.name, found, check.expected)
    console.print(table)
    console.print()
    console.print(Text(verdict(checks), style="bold red" if _names(checks, "FAIL") else "bold green"))


def verdict(checks: list[Check]) -> str:
    """Say in one line whether this host can run the configuration."""
    failed, warned = _names(checks, "FAIL"), _names(checks, "WARN")
    if failed:
        return f"CAN NOT RUN HERE: {', '.join(failed)}"
    return "can run here" + (f", but look at: {', '.join(warned)}" if warned else "")


def _names(checks: list[Check], status: str) -> list[str]:
    return [check.name for check in checks if check.status == status]
