"""What `--list-settings` prints: for every setting its flag, its environment variable and the value in effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from server.argument_parser import VerbParser
from server.config import SECTIONS, ServerConfig
from server.config_reading import load_config, settable_keys
from server.config_values import ConfigError, flag_of, variable_of
from server.package_files import bundled_config
from server.settings_arguments import add_settings, given_settings, unknown_arguments

SECRET_KEYS = frozenset({"server.tokens"})

POSITIONAL_VERBS = frozenset({"serve", "doctor"})
"""Verbs that take their configuration as CONFIG; the others as `--config`."""


def list_settings(argv: Sequence[str]) -> None:
    """Print the settings of a call that asks for them; what the verb takes besides is of no account here.

    Without a configuration file the values are those of the embedded demo world. Raises `ConfigError`.
    """
    verb = argv[0]
    parser = VerbParser(prog=f"worldserve {verb}", add_help=False)
    parser.add_argument(*(("config",) if verb in POSITIONAL_VERBS else ("--config",)), nargs="?", type=Path)
    add_settings(parser)
    arguments, others = parser.parse_known_args(argv[1:])
    if any(other.startswith("--") and "." in other.partition("=")[0] for other in others):
        raise ConfigError(unknown_arguments(others))
    path = arguments.config or bundled_config("demo")
    for line in settings_lines(load_config(path, flags=given_settings(arguments)), about=str(path)):
        print(line)


def settings_lines(config: ServerConfig, *, about: str) -> Iterator[str]:
    """Yield the lines of the list in aligned columns; `about` says where the values come from."""
    yield f"Settings of {about}, with this environment and these flags:"
    yield ""
    rows = [("FLAG", "VARIABLE", "VALUE")]
    rows += [(flag_of(key), variable_of(key), _shown(config, key)) for key in settable_keys()]
    flag_width, variable_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for flag, variable, value in rows:
        yield f"{flag:<{flag_width}}  {variable:<{variable_width}}  {value}"
    yield ""
    yield f"Only in the file: {'; '.join(_file_only(config))}"


def _value(config: ServerConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _shown(config: ServerConfig, key: str) -> str:
    """Write a value as its flag takes it; of secrets only how many there are."""
    value = _value(config, key)
    if key in SECRET_KEYS and isinstance(value, tuple) and value:
        return f"({len(value)}, not shown)"
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(value) or '""'
        case _:
            return str(value) or '""'


def _file_only(config: ServerConfig) -> Iterator[str]:
    """Yield the keys that no flag can set, lists of tables and tables, with what the file puts there."""
    settable = set(settable_keys())
    for section, kind in SECTIONS.items():
        for entry in fields(kind):
            key = f"{section}.{entry.name}"
            if key not in settable:
                value = _value(config, key)
                yield f"{key} ({_names(value)})"


def _names(value: object) -> str:
    assert isinstance(value, tuple | dict), "a setting is a scalar, a list or a table"
    return ", ".join(item if isinstance(item, str) else item.name for item in value) or "none"
