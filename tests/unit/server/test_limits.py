"""Rates, prompt length, and JSON that is strict and shallow."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import limits
from server.config import LimitsSection
from server.errors import BadInput, ErrorCode, ServerError
from server.limits import (
    MAX_INTEGER_CHARS,
    MAX_PATH_CHARS,
    RateLimiter,
    check_prompt,
    parse_json_object,
)

MAX_PARTS = LimitsSection().max_json_parts


def test_a_bucket_allows_a_second_of_burst_and_then_the_rate() -> None:
    limiter = RateLimiter(3.0)
    assert [limiter.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert limiter.take(10.3) is False
    assert limiter.take(10.4) is True
    assert [limiter.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_a_bucket_may_owe() -> None:
    rate = RateLimiter(10.0)
    assert [rate.spend(0.0, 10), rate.spend(0.0, 1), rate.spend(0.0, 20)] == [0.0, 0.1, 2.1]
    assert rate.spend(2.0, 0) == pytest.approx(0.1)
    assert rate.spend(1000.0, 10) == 0.0
    assert rate.spend(1000.0, 1) == 0.1


@pytest.mark.parametrize("item", ["[]", "1", '"a"', '{"a":1}'])
def test_the_size_of_json_is_bounded_and_not_by_what_is_in_strings(item: str) -> None:
    few = MAX_PARTS // 8
    read = parse_json_object(f'{{"a":[{",".join([item] * few)}]}}', max_depth=4, max_parts=MAX_PARTS)
    assert isinstance(read["a"], list)
    assert len(read["a"]) == few
    parse_json_object('{"a":"' + "," * 2 * MAX_PARTS + '"}', max_depth=4, max_parts=MAX_PARTS)
    with pytest.raises(BadInput, match=rf"more than {MAX_PARTS} brackets, .*limits\.max_json_parts"):
        parse_json_object(f'{{"a":[{",".join([item] * 2 * MAX_PARTS)}]}}', max_depth=4, max_parts=MAX_PARTS)


def test_a_slow_rate_still_lets_one_through() -> None:
    limiter = RateLimiter(0.1)
    assert [limiter.take(0.0), limiter.take(9.0), limiter.take(10.0)] == [True, False, True]


def test_the_refusal_names_the_key() -> None:
    limiter = RateLimiter(1.0)
    limiter.take(0.0)
    with pytest.raises(ServerError, match=r"more than 1 events a second \(limits\.max_events_per_second\)") as caught:
        limiter.require(0.0, what="events a second", key="limits.max_events_per_second")
    assert caught.value.code is ErrorCode.RATE_LIMITED
    assert caught.value.kind.retryable


def test_prompts_are_bounded() -> None:
    check_prompt("x" * 5, max_chars=5)
    with pytest.raises(BadInput) as caught:
        check_prompt("x" * 6, max_chars=5)
    assert (caught.value.code, caught.value.field) == (ErrorCode.PROMPT_TOO_LONG, "prompt")


def test_an_object_comes_back() -> None:
    text = '{"a": [1, 2.5, "}]{[\\"", null, true], "b": {"c": "\\ud83d\\ude00"}}'
    assert parse_json_object(text, max_depth=2, max_parts=MAX_PARTS) == {
        "a": [1, 2.5, '}]{["', None, True],
        "b": {"c": "\U0001f600"},
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": }',
        "[]",
        "null",
        '"text"',
        "3",
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"a": 1' + "0" * 5000 + "}",
        '{"a": [[[1]]]}',
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda text: text[:16],
)
def test_everything_else_is_bad_json(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_json_object(text, max_depth=3, max_parts=MAX_PARTS)
    assert caught.value.code is ErrorCode.BAD_JSON
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"a": NaN}', "a"),
        ('{"a": {"b": [1, {"c": -Infinity}]}}', "a.b[1].c"),
        ('{"a": [[0], [1e999, NaN]]}', "a[1][0]"),
        ('{"a": [1, -' + "9" * 400 + "]}", "a[1]"),
        ('{"a": 1' + "0" * 5000 + "}", "a"),
        ('{"\\ud800": NaN}', None),
        ("NaN", None),
        ('{"' + "x" * 1000 + '": NaN}', "x" * MAX_PATH_CHARS),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_number_that_is_not_finite_or_too_long_is_named(text: str, field: str | None) -> None:
    with pytest.raises(BadInput) as caught:
        parse_json_object(text, max_depth=9, max_parts=MAX_PARTS)
    assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_JSON, field)
    assert (field or "")[:20] in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"a": NaN, "b": 1, "a": 1}', "a"),
        ('{"b": [0, {"a": {"c": 1, "c": 2}}], "d": NaN}', "b[1].a.c"),
        ('{"a": {"b": 1, "b": 2}, "a": 3}', "a"),
        ('[{"a": 1, "\\u0061": 2}]', "[0].a"),
        ('{"": 1, "": 2}', None),
        ('{"' + "x" * 1000 + '": 1, "' + "x" * 1000 + '": 1}', "x" * MAX_PATH_CHARS),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_key_that_is_there_twice_is_named(text: str, field: str | None) -> None:
    with pytest.raises(BadInput, match="this field is there twice") as caught:
        parse_json_object(text, max_depth=9, max_parts=MAX_PARTS)
    assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_JSON, field)
    assert len(caught.value.message) < 300


def test_any_integer_that_is_read_is_a_finite_float() -> None:
    longest = int("9" * MAX_INTEGER_CHARS)
    assert parse_json_object(json.dumps({"a": longest}), max_depth=1, max_parts=MAX_PARTS) == {"a": longest}
    assert math.isfinite(float(longest))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    return 1 + max((depth_of(inner) for inner in value), default=0) if isinstance(value, list) else 0


@given(value=st.dictionaries(st.text(), JSON, max_size=3), ascii_only=st.booleans())
@settings(max_examples=100, deadline=None)
def test_depth_is_counted_exactly(value: dict[str, object], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    depth = depth_of(value)
    assert parse_json_object(text, max_depth=depth, max_parts=MAX_PARTS) == value
    with pytest.raises(BadInput, match="deeper"):
        parse_json_object(text, max_depth=depth - 1, max_parts=MAX_PARTS)


@pytest.mark.parametrize("piece", ['\\"', "\\\\", 'a\\"', "[{"])
def test_an_unterminated_string_is_read_once(piece: str) -> None:
    """One token to the end of the text, instead of a new search from each quote in it: no quadratic time."""
    text = '"' + piece * 2000
    assert [match.span() for match in limits._TOKEN.finditer(text)] == [(0, len(text))]
    with pytest.raises(BadInput, match="not valid JSON"):
        parse_json_object(text, max_depth=3, max_parts=MAX_PARTS)
