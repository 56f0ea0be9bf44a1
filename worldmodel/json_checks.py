"""Strict reading of parsed JSON, shared by the option parser and the control parser. Torch-free.

A reader knows nothing of cameras. Each method takes the value and its path below the root, and raises
`RequestRefused` that names the path, what was expected and what came.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

from worldmodel.errors import RequestRefused

MAX_SHOWN_CHARS = 40


def describe(value: object) -> str:
    """Name a JSON value for an error text, without repeating large input."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return repr(value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "...")
        case int():
            return str(value) if abs(value) < 10**MAX_SHOWN_CHARS else "a huge integer"
        case float():
            return repr(value)
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def nearest(name: str, known: Collection[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest known name, or nothing."""
    matches = difflib.get_close_matches(name[:100].lower(), sorted(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonReader:
    """Reads values or raises `RequestRefused` with `code`; `root` is what error texts call the whole value."""

    code: str
    root: str

    def refusal(self, path: str, text: str) -> RequestRefused:
        return RequestRefused(f"{path or self.root}: {text}", code=self.code, field=path or None)

    def expected(self, path: str, what: str, value: object) -> RequestRefused:
        return self.refusal(path, f"expected {what}, got {describe(value)}")

    def read_object(
        self, value: object, path: str, *, known: Sequence[str], required: Sequence[str] = ()
    ) -> dict[str, object]:
        """Read an object with no key outside `known` and every key in `required`."""
        if not isinstance(value, dict):
            raise self.expected(path, "an object", value)
        for key in value:
            if not isinstance(key, str) or key not in known:
                shown = describe(key)
                hint = nearest(str(key), known) or f"; known: {', '.join(known)}"
                raise self.refusal(join(path, str(key)[:MAX_SHOWN_CHARS]), f"unknown key {shown}{hint}")
        for key in required:
            if key not in value:
                raise self.refusal(join(path, key), "missing")
        return cast("dict[str, object]", value)

    def read_list(self, value: object, path: str, *, minimum: int, maximum: int, of: str) -> list[object]:
        """Read a list whose length is within bounds; `of` names its items in the error."""
        if not isinstance(value, list):
            raise self.expected(path, f"a list of {of}", value)
        if not minimum <= len(value) <= maximum:
            count = str(minimum) if minimum == maximum else f"{minimum} to {maximum}"
            raise self.refusal(path, f"expected {count} {of}, got {len(value)}")
        return value

    def read_number(self, value: object, path: str, *, minimum: float, maximum: float) -> float:
        """Read a finite number within closed bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self.expected(path, f"a finite number from {minimum:g} to {maximum:g}", value)
        return float(value)

    def read_integer(self, value: object, path: str, *, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            bounds = str(minimum) if minimum == maximum else f"an integer from {minimum} to {maximum}"
            raise self.expected(path, bounds, value)
        return value

    def read_bool(self, value: object, path: str) -> bool:
        if not isinstance(value, bool):
            raise self.expected(path, "true or false", value)
        return value

    def read_choice(self, value: object, path: str, choices: Collection[str]) -> str:
        """Read one of a fixed set of words; the error names them and the nearest one."""
        if not isinstance(value, str) or value not in choices:
            hint = nearest(value, choices) if isinstance(value, str) else ""
            raise self.refusal(path, f"expected one of {', '.join(choices)}, got {describe(value)}{hint}")
        return value


def join(path: str, key: str) -> str:
    """Append an object key to a path."""
    return f"{path}.{key}" if path else key
