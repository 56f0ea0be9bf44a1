"""The settings of the configuration as flags: `--section.key VALUE`, and what a flag that nobody knows is like."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from server.config_reading import settable_keys
from server.config_values import flag_of

ALIASES = {"host": "server.host", "port": "server.port", "device": "worker.device"}
"""Short flags for the settings that are set most."""

LIST_FLAG = "--list-settings"


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting."""
    short = parser.add_argument_group("settings")
    for alias, key in ALIASES.items():
        short.add_argument(f"--{alias}", dest=f"set:{key}", metavar=alias.upper(), help=f"same as --{key}")
    every = parser.add_argument_group("all settings (also keys of the file, and WORLDSERVE_SECTION_KEY)")
    for key in settable_keys():
        every.add_argument(flag_of(key), dest=f"set:{key}", metavar="VALUE", help=argparse.SUPPRESS)
    every.add_argument(LIST_FLAG, action="store_true", help="list all settings with their values and exit")


def given_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the texts of the flags that were given, by "section.key"."""
    return {
        name.removeprefix("set:"): value
        for name, value in vars(arguments).items()
        if name.startswith("set:") and value is not None
    }


def unknown_arguments(unknown: Sequence[str]) -> str:
    """Say what was not understood, with the setting that the first unknown flag is like."""
    flag = next((argument.partition("=")[0] for argument in unknown if argument.startswith("-")), "")
    flags = [flag_of(key) for key in (*ALIASES, *settable_keys())]
    longer = [known for known in flags if flag and known.startswith(flag)]
    like = longer or difflib.get_close_matches(flag, flags, n=1)
    return f"unknown arguments: {' '.join(unknown)}" + (f" (did you mean {like[0]!r}?)" if like else "")
