"""docs/contract_tests.md: every test that it names exists, and every rule stands there once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/contract_tests.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?P<rule>[^|]+) \| `(?P<path>[\w/]+\.py)(::(?P<name>\w+))?` \|$", re.MULTILINE)


def test_every_row_names_a_test_that_is_there() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not re.match(r"\| rule |\|---", line)]
    found = list(ROW.finditer(TEXT))
    assert [row[0] for row in found] == rows, "a row is written in another way"
    missing = [row[0] for row in found if not is_there(row["path"], row["name"])]
    assert not missing


def is_there(path: str, name: str | None) -> bool:
    file = ROOT / "tests" / path
    if not file.is_file():
        return False
    source = file.read_text(encoding="utf-8")
    if name is None:
        return "def test_" in source
    return re.search(rf"^(async def|def|class) {name}\b|^{name} = ", source, re.MULTILINE) is not None


def test_a_name_that_is_nowhere_is_noticed() -> None:
    assert is_there("contract/test_contract_tests.py", "test_every_row_names_a_test_that_is_there")
    assert not is_there("contract/test_contract_tests.py", "test_every_row")
    assert not is_there("contract/test_no_such_file.py", None)


def test_every_rule_stands_there_once() -> None:
    rules = [row["rule"] for row in ROW.finditer(TEXT)]
    assert len(rules) == len(set(rules)) > 100
