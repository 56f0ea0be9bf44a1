"""A parser of command lines whose complaints are one sentence, and which takes no flag that is not written out."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class VerbParser(argparse.ArgumentParser):
    """The parser of the command and of each verb; argparse makes those of verbs in the class of the command's."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        # A shortened flag would mean another setting as soon as a second one begins like it.
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage, and leave with exit code 2."""
        print(f"worldserve: {message.removeprefix('argument ')} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)
