"""From TOML values and texts to the checked values of one section. It knows no section and no file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

ENVIRONMENT_PREFIX = "WORLDSERVE_"

TEST_VARIABLES = frozenset({"WORLDSERVE_GOLDEN_DIR"})
"""Variables with our prefix that belong to the test suite, not to the configuration."""


def flag_of(key: str) -> str:
    """Return the flag that sets a "section.key"."""
    return f"--{key.replace('_', '-')}"


def variable_of(key: str) -> str:
    """Return the environment variable that sets a "section.key"."""
    return f"{ENVIRONMENT_PREFIX}{key.replace('.', '_').upper()}"


def is_variable(name: str) -> bool:
    """Return whether an environment variable claims to be a setting of ours."""
    return name.startswith(ENVIRONMENT_PREFIX) and name not in TEST_VARIABLES


class ConfigError(Exception):
    """Report a configuration that cannot be used: one sentence with file, key and what was expected.

    `key` is the "section.key" whose value is wrong, if it is one.
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


MAX_NUMBER = 2**63 - 1
"""Bound of every number: beyond it the operating system and the encoder take no time and no size."""


def require(condition: bool, key: str, expected: str, value: object) -> None:
    """Raise `ConfigError` that says what was expected of a key."""
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, got {value!r}", key=key)


def build_section(kind: type, name: str, table: dict[str, Any], file: str, origins: Mapping[str, str]) -> Any:
    """Build one section. `origins` says where a value came from that is not the file's. Raises `ConfigError`."""
    known = [entry.name for entry in fields(kind)]
    for key in table:
        if key not in known:
            raise ConfigError(f"{file}: unknown key {name}.{key}{nearest(key, known)}")
    try:
        return msgspec.convert({key: _without_none(value, kind, key) for key, value in table.items()}, kind)
    except msgspec.ValidationError as error:
        # A section that is not the server's own says by itself which of its keys is wrong.
        problem = str(error)
        key = problem.partition(": ")[0]
        if key in [f"{name}.{each}" for each in known]:
            raise ConfigError(placed(problem, key, file, origins), key=key) from error
        raise ConfigError(f"{file}: section [{name}]: {problem.replace('`$.', '`')}") from error
    except ConfigError as error:
        raise ConfigError(placed(str(error), error.key or "", file, origins)) from error


def placed(problem: str, key: str, file: str, origins: Mapping[str, str]) -> str:
    """Say where a wrong value came from; a flag and a variable name the key already."""
    if key in origins:
        return f"{origins[key]}: {problem.removeprefix(f'{key}: ')}"
    return f"{file}: {problem}"


def _without_none(value: object, kind: type, name: str) -> object:
    """Read "none" for a number that may have no limit: TOML has no word for it."""
    hint = get_type_hints(kind)[name]
    is_unlimited = value == "none" and type(None) in get_args(hint) and text_form(hint) in (int, float)
    return None if is_unlimited else value


def check_numbers(value: object, key: str, file: str, origins: Mapping[str, str]) -> None:
    """Refuse numbers that are not finite or too large, also inside lists and tables."""
    match value:
        case float() | int() if not -MAX_NUMBER <= value <= MAX_NUMBER:
            shown = repr(value) if isinstance(value, float) else f"a number of {value.bit_length()} bits"
            expected = f"expected a finite number of at most {MAX_NUMBER}, got {shown}"
            raise ConfigError(placed(f"{key}: {expected}", key, file, origins), key=key)
        case list():
            for index, item in enumerate(value):
                check_numbers(item, f"{key}[{index}]", file, origins)
        case dict():
            for name, item in value.items():
                check_numbers(item, f"{key}.{name}", file, origins)


def text_form(hint: Any) -> type | None:
    """Return the scalar type that a text for this hint is parsed as, `tuple` for comma lists, None for tables."""
    if get_origin(hint) is UnionType:
        return text_form(next(part for part in get_args(hint) if part is not type(None)))
    if get_origin(hint) is tuple:
        return tuple if get_args(hint)[0] is str else None
    return hint if hint in (str, int, float, bool) else None


def parse_text(text: str, kind: type, name: str, origin: str) -> object:
    """Read the text of a flag or a variable as the value of a key. Raises `ConfigError` that names its origin."""
    hint = get_type_hints(kind)[name]
    form = text_form(hint)
    if text == "none" and type(None) in get_args(hint):
        return None
    if form is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if form is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{origin}: expected true or false, got {text[:80]!r}")
        return text.lower() == "true"
    try:
        return form(text) if form is not None else text
    except ValueError as error:
        raise ConfigError(f"{origin}: expected {form.__name__ if form else 'text'}, got {text[:80]!r}") from error


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the end of a sentence about an unknown name: what it is like, or what there is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"
