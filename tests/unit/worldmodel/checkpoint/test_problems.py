"""Findings as text: cut for people, whole for programs, and said about the part where they were found."""

from __future__ import annotations

import logging

import pytest

from worldmodel.checkpoint.errors import CheckpointError, findings_of, log_whole
from worldmodel.checkpoint.problems import MAX_NAMES, Problem, listed
from worldmodel.errors import LoadFailed

NAMES = tuple(f"n{number}" for number in range(MAX_NAMES + 2))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("a",), "1 missing tensor (a)"),
        (("a", "b"), "2 missing tensors (a, b)"),
        (NAMES[:MAX_NAMES], f"{MAX_NAMES} missing tensors ({', '.join(NAMES[:MAX_NAMES])})"),
        (NAMES, f"{MAX_NAMES + 2} missing tensors ({', '.join(NAMES[:MAX_NAMES])} and 2 more)"),
    ],
)
def test_names_are_counted_and_cut_in_the_text_only(names: tuple[str, ...], text: str) -> None:
    problem = Problem(text="missing tensors", names=names)
    assert str(problem) == text
    assert problem.whole.startswith(f"{len(names)} missing ")
    assert problem.whole.endswith(f" ({', '.join(names)})")
    assert problem.is_cut == (problem.whole != text)


def test_parts_come_in_front_the_outermost_first() -> None:
    assert str(Problem(text="is truncated").of("file").of("vae")) == "vae: file: is truncated"
    assert str(Problem(text="wrong types", names=("a",)).of("vae")) == "vae: 1 wrong type (a)"


def test_only_plurals_with_names_are_problems() -> None:
    assert listed([("missing tensors", ["a"]), ("extra tensors", [])]) == (
        Problem(text="missing tensors", names=("a",)),
    )


def test_an_error_keeps_its_findings() -> None:
    error = CheckpointError("here", "is old", Problem(text="extra tensors", names=NAMES))
    assert error.message == f"here: is old; {error.problems[1]}"
    assert [finding.whole for finding in findings_of(error)] == ["here: is old", f"here: {error.problems[1].whole}"]
    assert findings_of(LoadFailed("no")) == (Problem(text="no"),)


def test_the_log_has_what_a_text_leaves_out_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    cut = Problem(text="extra tensors", names=NAMES)
    with caplog.at_level(logging.ERROR):
        log_whole([cut, Problem(text="missing tensors", names=("a",))])
    assert [record.getMessage() for record in caplog.records] == [cut.whole]
