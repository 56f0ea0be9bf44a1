"""A parser of a program's arguments whose complaints are one sentence, as those of the other verbs are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from worldmodel.json_checks import nearest


class ToolParser(argparse.ArgumentParser):
    """The parser of `worldserve VERB`, and of its actions if it has some. No flag may be shortened."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Return the arguments. Prints the help or what is wrong, and leaves with exit code 0 or 2."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            flag = next((argument.partition("=")[0] for argument in unknown if argument.startswith("--")), None)
            hint = "" if flag is None else nearest(flag, self._option_string_actions)
            self.error(f"unknown arguments: {' '.join(unknown)}{hint}")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage, and leave with exit code 2."""
        verb = self.prog.split()[1]
        print(f"{verb}: {message.removeprefix('argument ')} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)
