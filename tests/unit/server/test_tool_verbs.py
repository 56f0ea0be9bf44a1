"""Verbs that are programs of their own."""

from __future__ import annotations

import os
import signal
import threading
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


def test_a_request_to_end_reaches_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "started")
    (tmp_path / "endless.py").write_text(
        f"import os, signal\nopen({str(tmp_path / 'started')!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n"
    )
    monkeypatch.setitem(tool_verbs.TOOLS, "endless", ("endless", "waits"))
    monkeypatch.setattr(tool_verbs, "packages_root", lambda: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pids: list[int] = []

    def end_when_started() -> None:
        pids.append(int((tmp_path / "started").read_text()))
        os.kill(os.getpid(), signal.SIGTERM)

    def not_handed_on(number: int, frame: object) -> None:
        raise AssertionError("the signal stayed with the command")

    before = signal.signal(signal.SIGTERM, not_handed_on)
    try:
        thread = threading.Thread(target=end_when_started)
        thread.start()
        assert tool_verbs.run_tool("endless", []) == 128 + signal.SIGTERM
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is not_handed_on
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
