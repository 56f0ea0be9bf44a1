"""What `worldserve conformance` prints."""

from __future__ import annotations

import io

from rich.console import Console

from clients.conformance.runner import ALL_CHECKS, Outcome, Result
from clients.conformance.table import show, verdict


def result(name: str, outcome: Outcome = Outcome.PASS, reason: str = "") -> Result:
    return Result(
        name=name, section="Resume", rule="the newest socket wins", outcome=outcome, reason=reason, took_s=0.3
    )


def shown(results: list[Result], *, width: int = 100) -> list[str]:
    out = io.StringIO()
    show(results, Console(file=out, width=width), about="ws://127.0.0.1/v1/world")
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_row_has_everything_and_a_reason_stands_below_its_rule():
    lines = shown([result("resume"), result("watch", Outcome.FAIL, "epoch 1, this socket's is 0")])
    assert lines[0] == "worldserve conformance   ws://127.0.0.1/v1/world"
    (row,) = [line for line in lines if "watch" in line]
    assert row.split() == ["FAIL", "watch", "the", "newest", "socket", "wins", "Resume", "0.3", "s"]
    assert lines[lines.index(row) + 1].strip() == "epoch 1, this socket's is 0"
    assert lines[-1] == "NOT CONFORMING: 1 of 2 checks failed"


def test_nothing_is_cut_off_in_a_narrow_terminal():
    lines = shown([result("limits.message", Outcome.FAIL, "a reason that is longer than the column")], width=60)
    assert max(map(len, lines)) <= 60
    assert {"limits.message", "longer"} <= set(" ".join(lines).split())


def test_only_all_checks_make_a_server_conforming():
    everything = [result(check.name) for check in ALL_CHECKS]
    assert verdict(everything) == f"conforming: {len(ALL_CHECKS)} checks passed"
    everything[0] = result("start", Outcome.NOT_APPLICABLE, "no token")
    assert verdict(everything) == f"conforming: {len(ALL_CHECKS) - 1} checks passed, 1 not applicable here"
    assert verdict(everything[1:3]) == "passed: 2 of the 2 checks asked for"
