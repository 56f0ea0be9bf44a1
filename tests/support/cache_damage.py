"""Ways in which an entry of the weight cache gets damaged."""

from __future__ import annotations

import os
from pathlib import Path

from offload.cache_manifest import MANIFEST
from tests.support.weight_cache import FILES


def flip(file: Path, position: int) -> None:
    """Flip one bit of a published file."""
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "data": lambda entry: flip(entry / FILES[1], -1),
    "first data byte": lambda entry: flip(
        entry / FILES[0], int.from_bytes((entry / FILES[0]).read_bytes()[:8], "little") + 8
    ),
    "header text": lambda entry: flip(entry / FILES[0], 20),
    "header padding": lambda entry: flip(
        entry / FILES[0], int.from_bytes((entry / FILES[0]).read_bytes()[:8], "little") + 7
    ),
    "header length, low": lambda entry: flip(entry / FILES[0], 0),
    "header length, high": lambda entry: flip(entry / FILES[0], 7),
    "manifest": lambda entry: flip(entry / MANIFEST, 40),
    "manifest's digest of a file": lambda entry: flip(
        entry / MANIFEST, (entry / MANIFEST).read_text().index('"sha256"') + 12
    ),
    "file cut off": lambda entry: os.truncate(entry / FILES[0], 100),
    "file too long": lambda entry: ((entry / FILES[0]).chmod(0o644), os.truncate(entry / FILES[0], 10**4)),
    "file missing": lambda entry: (entry / FILES[0]).unlink(),
    "file replaced by a link": lambda entry: (
        (entry / FILES[0]).rename(entry.parent / "elsewhere"),
        (entry / FILES[0]).symlink_to(entry.parent / "elsewhere"),
    ),
    "manifest missing": lambda entry: (entry / MANIFEST).unlink(),
    "manifest replaced by a pipe": lambda entry: ((entry / MANIFEST).unlink(), os.mkfifo(entry / MANIFEST)),
}
