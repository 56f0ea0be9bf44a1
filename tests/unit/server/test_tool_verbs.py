"""Verbs that are programs of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("moment", ["while it starts", "while it runs"])
def test_a_request_to_end_reaches_the_program(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    class Rushed(subprocess.Popen[bytes]):
        """The request comes before anybody has seen that there is a program."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            end_when_started()

    def not_handed_on(number: int, frame: object) -> None:
        raise AssertionError("the signal stayed with the command")

    before = signal.signal(signal.SIGTERM, not_handed_on)
    try:
        if moment == "while it starts":
            monkeypatch.setattr(tool_verbs.subprocess, "Popen", Rushed)
        else:
            thread = threading.Thread(target=end_when_started)
            thread.start()
        assert tool_verbs.run_tool("endless", []) == 128 + signal.SIGTERM
        if moment == "while it runs":
            thread.join()
        assert signal.getsignal(signal.SIGTERM) is not_handed_on
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_program_clears_away_what_it_began_when_the_terminal_interrupts_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "started")
    (tmp_path / "endless.py").write_text(
        "import pathlib, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        f"open({str(tmp_path / 'started')!r}, 'w').close()\n"
        "signal.sigwait({signal.SIGINT})\n"
        f"pathlib.Path({str(tmp_path / 'cleared')!r}).touch()\n"
    )
    monkeypatch.setitem(tool_verbs.TOOLS, "endless", ("endless", "waits"))
    monkeypatch.setattr(tool_verbs, "packages_root", lambda: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Slow(subprocess.Popen[bytes]):
        """The command is interrupted, and the program only once the command waits for that."""

        waits = 0

        def wait(self, timeout: float | None = None) -> int:
            self.waits += 1
            if self.waits == 1:
                (tmp_path / "started").read_text()
                raise KeyboardInterrupt
            if self.waits == 2:
                self.send_signal(signal.SIGINT)
            return super().wait(timeout)

    monkeypatch.setattr(tool_verbs.subprocess, "Popen", Slow)
    with pytest.raises(KeyboardInterrupt):
        tool_verbs.run_tool("endless", [])
    assert (tmp_path / "cleared").exists()
