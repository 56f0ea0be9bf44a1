"""Compiled C++ sources: built once per content, and kept in a folder that no other user can write to."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

NUM_KEPT = 4


class CompilerMissing(Exception):
    """There is no compiler; says which, and how to install it."""


def private_folder() -> Path:
    """Return a folder of ours for compiled libraries: in the user's cache, or, without one, in the temp folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "worldserve-demo-world"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        folder = Path(tempfile.gettempdir()) / f"worldserve-demo-world-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder where someone else could have put a library for us to load.

    Raises:
        PermissionError: It is a link or no folder, belongs to another user, or others have rights to it.
    """
    # Of the link itself, which may be another user's.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"expected a folder for compiled libraries at {folder}, got a link or a file; remove it")
    if status.st_uid != os.getuid():
        raise PermissionError(f"expected {folder} to belong to user {os.getuid()}, it belongs to {status.st_uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"expected {folder} to have mode 700, got {mode:o}; empty it and `chmod 700` it")


def library(
    name: str, sources: Sequence[Path], compile_command: Sequence[str], link_command: Sequence[str], folder: Path
) -> ctypes.CDLL:
    """Load what the last of `sources` compiles to; the others are what it includes.

    Raises:
        CompilerMissing: There is no compiler.
    """
    # `-march=native` is for this host's CPU, and a user's cache may be shared by several hosts.
    content = " ".join([os.uname().nodename, *compile_command, *link_command]).encode() + b"".join(
        path.read_bytes() for path in sources
    )
    path = folder / f"{name}_{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            compiled, linked = Path(unfinished) / "compiled.o", Path(unfinished) / "linked.so"
            _run([*compile_command, str(sources[-1]), "-o", str(compiled)])
            _run([*link_command, str(compiled), "-o", str(linked)])
            linked.rename(path)
    # What is in use counts as new.
    os.utime(path)
    loaded = ctypes.CDLL(str(path))
    _keep_newest(folder, name)
    return loaded


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError as error:
        raise CompilerMissing(
            f"drawing the demo world on a CPU needs the C++ compiler {command[0]}, which is not on PATH; install it "
            "(Debian and Ubuntu: `apt-get install g++`; Fedora: `dnf install gcc-c++`)"
        ) from error


def _keep_newest(folder: Path, name: str) -> None:
    def age(path: Path) -> float:
        try:
            return -path.stat().st_mtime
        except FileNotFoundError:  # Another process removed it.
            return 0.0

    for path in sorted(folder.glob(f"{name}_*.so"), key=age)[NUM_KEPT:]:
        path.unlink(missing_ok=True)
