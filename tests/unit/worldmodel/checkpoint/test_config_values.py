"""Numbers of config files: what is taken, and refusals of one short sentence whatever came."""

from __future__ import annotations

import math

import pytest

from worldmodel.checkpoint.config_values import fixed, integer, number, shown


def test_numbers_within_their_bounds_are_taken() -> None:
    assert [integer(value, "n", maximum=7) for value in (1, 7)] == [1, 7]
    assert integer(-1, "n", minimum=-1, maximum=7) == -1
    assert [number(value, "x", minimum=0.5, maximum=2) for value in (0.5, 1, 2.0)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("value", [0, 8, True, 1.0, "1", None, [1], 10**4000])
def test_what_is_no_integer_within_bounds_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^n must be an integer from 1 to 7, got .{1,40}$"):
        integer(value, "n", maximum=7)


@pytest.mark.parametrize("value", [0, 2.1, True, "1", None, math.nan, math.inf, -math.inf, 10**4000])
def test_what_is_no_finite_number_within_bounds_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^x must be a finite number from 0\.5 to 2, got .{1,40}$"):
        number(value, "x", minimum=0.5, maximum=2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2, 4], "[1, 2, 4]"),
        ((None, "x"), "[null, 'x']"),
        ([], "[]"),
        ([[1] * 9, {}], "[a list of 9, an object]"),
        ([0] * 5, "a list of 5"),
        (True, "true"),
    ],
)
def test_a_short_list_is_shown_by_its_items(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_setting_of_one_value_is_that_value() -> None:
    fixed((1, 2, 2), "patch", [1, 2, 2])
    fixed(None, "image", None)
    with pytest.raises(ValueError, match=r"^patch must be \[1, 2, 2\], got \[1, 2, 4\]$"):
        fixed([1, 2, 4], "patch", [1, 2, 2])
    with pytest.raises(ValueError, match=r"^image must be null, got 1280$"):
        fixed(1280, "image", None)
