"""The results in a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clients.conformance.runner import ALL_CHECKS, Outcome, Result

STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.NOT_SEEN: "bold yellow",
    Outcome.NOT_APPLICABLE: "dim",
}

SCHEMA = "worldserve.conformance/1"


def show(results: Sequence[Result], console: Console, *, about: str) -> None:
    """Print what was checked, a row for each check with its reason below, and one line that sums up."""
    console.print(Text.assemble(("worldserve conformance", "bold"), f"   {about}", overflow="fold"))
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
    for column in ("", "check", "rule", "section"):
        table.add_column(column, style="dim" if column == "section" else "")
    is_timed = any(result.took_s for result in results)
    if is_timed:
        table.add_column("took", justify="right", style="dim", no_wrap=True)
    for result in results:
        rule = Text(result.rule)
        if result.reason:
            rule.append(f"\n{result.reason}", style=STYLES[result.outcome])
        outcome = Text(result.outcome, style=STYLES[result.outcome])
        took = (f"{result.took_s:.1f} s",) if is_timed else ()
        table.add_row(outcome, result.name, rule, result.section, *took)
    console.print(table)
    console.print()
    console.print(Text(verdict(results), style="bold green" if conforms(results) else "bold red"))


def failed(results: Sequence[Result]) -> int:
    """Return how many checks failed."""
    return sum(result.outcome is Outcome.FAIL for result in results)


def conforms(results: Sequence[Result]) -> bool:
    """Tell whether no rule was broken and all that must be seen was seen."""
    return all(result.outcome in (Outcome.PASS, Outcome.NOT_APPLICABLE) for result in results)


def verdict(results: Sequence[Result]) -> str:
    """Say in one line what came out."""
    passed = sum(result.outcome is Outcome.PASS for result in results)
    not_seen = [result.name for result in results if result.outcome is Outcome.NOT_SEEN]
    skipped = len(results) - passed - failed(results) - len(not_seen)
    not_applicable = f", {skipped} not applicable here" if skipped else ""
    if failed(results):
        return f"NOT CONFORMING: {failed(results)} of {len(results)} checks failed{not_applicable}"
    if not_seen:
        return f"incomplete: not seen {', '.join(not_seen)}; {passed} checks passed{not_applicable}"
    if results and not results[0].name.startswith("client.") and len(results) < len(ALL_CHECKS):
        return f"passed: {passed} of the {len(results)} checks asked for{not_applicable}"
    return f"conforming: {passed} checks passed{not_applicable}"


def to_json(results: Sequence[Result], *, url: str) -> bytes:
    """Write the results for programs."""
    document = {
        "schema": SCHEMA,
        "url": url,
        "verdict": verdict(results),
        "conforming": conforms(results),
        "checks": results,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
