"""Key scripts: what they mean, and errors that name the column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.key_script import KEYS, KeyScriptError, parse_key_script


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        ("", []),
        ("  ", []),
        ("w", ["w"]),
        ("w*2 l*3 wj*2 -*3", ["w", "w", "l", "l", "l", "wj", "wj", "", "", ""]),
        (" i\t-\n k*1 ", ["i", "", "k"]),
    ],
)
def test_steps_become_latent_frames(text: str, frames: list[str]) -> None:
    assert parse_key_script(text) == tuple(tuple(frame) for frame in frames)


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("w*6 x*3", 5, "unknown key 'x'"),
        ("wax*2", 3, "unknown key 'x'"),
        ("w*6 wlw", 7, "'w' is given twice"),
        ("w*0", 1, "at least 1"),
        ("w*", 1, "KEYS\\*COUNT"),
        ("*3", 1, "KEYS\\*COUNT"),
        ("w*-1", 1, "KEYS\\*COUNT"),
        ("w * 3", 3, "KEYS\\*COUNT"),
        ("w-", 2, "unknown key '-'"),
        ("W", 1, "unknown key 'W'"),
        ("w w*999999", 3, "at most 100000"),
        ("w*1234567", 1, "KEYS\\*COUNT"),
    ],
)
def test_errors_name_the_column(text: str, column: int, problem: str) -> None:
    with pytest.raises(KeyScriptError, match=problem) as caught:
        parse_key_script(text)
    assert caught.value.column == column


@given(st.lists(st.tuples(st.sets(st.sampled_from(KEYS)), st.integers(1, 9)), max_size=8))
def test_every_script_that_is_written_is_read(steps: list[tuple[set[str], int]]) -> None:
    written = [("".join(sorted(keys)), count) for keys, count in steps]
    text = " ".join(f"{keys or '-'}*{count}" for keys, count in written)
    assert parse_key_script(text) == tuple(tuple(keys) for keys, count in written for _ in range(count))


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        frames = parse_key_script(text)
    except KeyScriptError as error:
        column = error.column
    else:
        assert all(set(frame) <= set(KEYS) for frame in frames)
        return
    assert 1 <= column <= len(text)
