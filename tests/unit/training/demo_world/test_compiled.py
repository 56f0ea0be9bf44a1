"""A compiled library is looked for only where no other user can put one."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from training.demo_world import compiled


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return compiled.private_folder()


def _copying(tmp_path: Path) -> list[str]:
    """Return a stand-in for a compiler, which copies a real library and counts its calls."""
    import _ctypes

    script = tmp_path / "compiler"
    log = shlex.quote(str(tmp_path / "calls"))
    script.write_text(f'#!/bin/sh\necho call >> {log}\ncp {shlex.quote(_ctypes.__file__)} "$3"\n')
    script.chmod(0o700)
    return [str(script)]


def test_the_folder_is_ours_alone_and_found_again(folder: Path, tmp_path: Path) -> None:
    assert folder.parent == tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compiled.private_folder() == folder


def test_without_a_cache_it_lies_in_the_temp_folder_under_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = compiled.private_folder()
    assert folder == tmp_path / f"worldserve-demo-world-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="mode 700, got 770"):
        compiled.private_folder()


def test_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="got a link or a file"):
        compiled.private_folder()


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match=f"belong to user {other}"):
        compiled.check_private(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in copies a library of Linux")
def test_a_content_is_compiled_once_and_the_newest_four_are_kept(folder: Path, tmp_path: Path) -> None:
    source, compiler = tmp_path / "source.cpp", _copying(tmp_path)
    names: list[str] = []
    for content in "abcdef":
        source.write_text(content)
        for _ in range(2):
            compiled.library("scene", [source], compiler, compiler, folder)
        (new,) = {path.name for path in folder.iterdir()} - set(names)
        # Clocks of file systems are coarse.
        os.utime(folder / new, (len(names), len(names)))
        names.append(new)
    assert (tmp_path / "calls").read_text().count("call") == 2 * 6
    assert {path.name for path in folder.iterdir()} == set(names[-4:])


def test_without_a_compiler_the_error_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.cpp"
    source.touch()
    with pytest.raises(compiled.CompilerMissing, match=r"apt-get install g\+\+"):
        compiled.library("scene", [source], ["no-such-compiler"], ["no-such-compiler"], folder)
    assert list(folder.iterdir()) == []
