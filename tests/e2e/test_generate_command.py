"""`worldserve generate` as a process: what it leaves when it ends before the clip is whole."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

CONFIG = """
[model]
name = "fake"
checkpoint = "package:worldmodel/data/demo_world"
width = 160
height = 96
fps = 12
precision = "fp32"
start_images = [{ name = "day", file = "examples/day.png", prompt = "a town" }]

[model.options]
chunk_ms = 50
"""

MANY_FRAMES = 9 + 12 * 2000


def hear_interrupts() -> None:
    """Undo what a shell does to its background jobs, among which the tests may be: they ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(folder: Path, *arguments: str, before: Callable[[], None] = hear_interrupts) -> subprocess.Popen[str]:
    config = folder / "fake.toml"
    config.write_text(CONFIG, encoding="utf-8")
    return subprocess.Popen(
        (sys.executable, "-m", "server", "generate", "--config", str(config), "--image", "day", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def await_partial(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until some of the clip is on disk."""
    while not any(path.stat().st_size > 2000 for path in folder.glob(".*.partial")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_leaves_no_half_clip_and_no_worker(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    process = command(tmp_path, "--frames", str(MANY_FRAMES), "--out", str(folder / "x.mp4"))
    await_partial(folder, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert list(folder.iterdir()) == []
    assert not any(worker.is_running() for worker in workers)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def few_bytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    process = command(tmp_path, "--frames", "249", "--out", str(folder / "x.mp4"), before=few_bytes)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("worldserve: ")
    assert "x.mp4" in errors.splitlines()[-1]
    assert "File too large" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert list(folder.iterdir()) == []
