"""Verbs that are programs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from server import tool_verbs


def test_a_program_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tool_verbs, "packages_root", lambda: tmp_path)
    assert tool_verbs.run_tool("evaluate", ["demo"]) == 2
    assert "evaluate: works from the source tree only" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["evaluate", "inspect"])
def test_programs_of_this_tree_are_found(verb: str) -> None:
    assert tool_verbs.run_tool(verb, ["--help"]) == 0
