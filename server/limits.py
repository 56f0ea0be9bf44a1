"""Bounds on what a client sends: rates, prompt length, JSON depth. Images have theirs in `uploads.py`."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable

from server.errors import BadInput, ErrorCode, Unavailable

# A JSON string, a bracket or a comma. Strings are matched whole, so that what is inside them doesn't count. An
# unterminated string matches to the end, and nothing is given back once matched: the scan is linear for any text.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)

MAX_PATH_CHARS = 160
"""How much of the path of a field an error repeats; its names are the client's."""

NUM_FRAGMENTS = "worldserve.num_fragments"
"""Key under which a message from a WebSocket says in how many fragments it came."""

MAX_INTEGER_CHARS = 308
"""Longest integer that is read. Any of this length is also a finite float, so no later check can overflow."""


_REPEATED = float("nan")
"""Stands for the value of a key that is there twice; known by identity, and a number for whoever looks at the rest."""


class BadPart(BadInput):
    """Refuse JSON for one number or key in it. `document` is the rest, to see what it was; the part is NaN there."""

    def __init__(self, message: str, *, field: str | None, document: object) -> None:
        super().__init__(ErrorCode.BAD_JSON, message, field=field)
        self.document = document


class RateLimiter:
    """A token bucket: `per_second` on average, bursts of up to one second's worth (at least one)."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._burst = max(1.0, per_second)
        self._tokens = self._burst
        self._filled_at: float | None = None

    def take(self, now: float) -> bool:
        """Take one token if there is one."""
        self._fill(now)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def spend(self, now: float, tokens: float) -> float:
        """Take tokens that may not be there yet, and return in how many seconds they are."""
        self._fill(now)
        self._tokens -= tokens
        return max(0.0, -self._tokens / self._per_second)

    def _fill(self, now: float) -> None:
        if self._filled_at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now

    def require(self, now: float, *, what: str, key: str) -> None:
        """Take one token or raise `Unavailable` that names the configuration key."""
        if not self.take(now):
            raise Unavailable(ErrorCode.RATE_LIMITED, f"more than {self._per_second:g} {what} ({key})")


def check_prompt(prompt: str, *, max_chars: int, field: str = "prompt") -> None:
    if len(prompt) > max_chars:
        raise BadInput(
            ErrorCode.PROMPT_TOO_LONG,
            f"{field} has {len(prompt)} characters: expected at most {max_chars} (limits.max_prompt_chars)",
            field=field,
        )


def parse_json_object(text: str, *, max_depth: int, max_parts: int) -> dict[str, object]:
    """Parse a JSON object strictly: bounded depth and size, finite numbers, no lone surrogates, no key twice.

    Raises `BadInput` with code `bad_json`: for a number that is not finite or too long, and for a key that is there
    twice, `BadPart`, which names the field.
    """
    _check_parts(text, max_depth, max_parts)
    refused: list[str] = []
    repeated: list[str] = []

    def read_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            # Which of its values a key has would be anybody's guess.
            twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
            fields.update(dict.fromkeys(twice, _REPEATED))
            repeated.extend(twice)
        return fields

    def read_constant(name: str) -> float:
        refused.append(f"{name} is not a JSON number")
        return math.nan

    def read_float(literal: str) -> float:
        value = float(literal)
        if math.isinf(value):
            refused.append(f"{literal[:40]} is too large a number")
        return value

    def read_integer(literal: str) -> int | float:
        if len(literal) <= MAX_INTEGER_CHARS:
            return int(literal)
        refused.append(f"{literal[:40]}... is too large a number")
        return math.nan

    try:
        value = json.loads(
            text,
            object_pairs_hook=read_object,
            parse_constant=read_constant,
            parse_float=read_float,
            parse_int=read_integer,
        )
    except ValueError as error:
        raise BadInput(ErrorCode.BAD_JSON, f"the message is not valid JSON: {error}") from error
    if "\\ud" in text or "\\uD" in text:
        # First, for the path of a refused number is made of the client's names.
        _check_surrogates(value)
    if repeated:
        field = _path_of(value, lambda item: item is _REPEATED)[:MAX_PATH_CHARS]
        raise BadPart(f"{field or repr(repeated[0])}: this field is there twice", field=field or None, document=value)
    if refused:
        field = _path_of(value, _is_nonfinite)[:MAX_PATH_CHARS]
        where = f"{field}: " if field else "the message is not valid JSON: "
        raise BadPart(where + refused[0], field=field or None, document=value)
    if not isinstance(value, dict):
        raise BadInput(ErrorCode.BAD_JSON, f"expected a JSON object, got {_json_type(value)}")
    return value


def _check_parts(text: str, max_depth: int, max_parts: int) -> None:
    depth = 0
    for number, match in enumerate(_TOKEN.finditer(text)):
        if number >= max_parts:
            raise BadInput(
                ErrorCode.BAD_JSON,
                f"the JSON has more than {max_parts} brackets, commas and strings (limits.max_json_parts)",
            )
        # Of a string, which may be an image, the first character will do.
        token = text[match.start()]
        if token in "[{":
            depth += 1
            if depth > max_depth:
                raise BadInput(
                    ErrorCode.BAD_JSON, f"the JSON is nested deeper than {max_depth} levels (limits.max_json_depth)"
                )
        elif token in "]}":
            depth -= 1


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadInput(ErrorCode.BAD_JSON, "the JSON holds half of a surrogate pair, which is no character") from error


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _path_of(value: object, is_wanted: Callable[[object], bool]) -> str:
    """Return the path of the first part that is wanted; empty for none, and for the whole value."""
    items: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        items = ((f".{name}", item) for name, item in value.items())
    elif isinstance(value, list):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    for step, item in items:
        if is_wanted(item):
            return step.lstrip(".")
        if rest := _path_of(item, is_wanted):
            separator = "" if rest.startswith("[") else "."
            return f"{step.lstrip('.')}{separator}{rest}"
    return ""


_JSON_TYPES: tuple[tuple[Callable[[object], bool], str], ...] = (
    (lambda value: value is None, "null"),
    (lambda value: isinstance(value, bool), "a boolean"),
    (lambda value: isinstance(value, int | float), "a number"),
    (lambda value: isinstance(value, str), "a string"),
)


def _json_type(value: object) -> str:
    return next((name for test, name in _JSON_TYPES if test(value)), "an array")
