"""`make-checkpoint` and `doctor` as commands, the second on what the first made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def worldserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_made_checkpoint_is_fine_with_the_doctor(tmp_path: Path) -> None:
    out = tmp_path / "made"
    made = worldserve("make-checkpoint", "--like", "lingbot-world-v2", "--layout", "original", str(out))
    assert made.returncode == 0, made.stderr
    size = ("--model.width", "160", "--model.height", "96", "--worker.device", "cpu")
    flags = ("--model.checkpoint", str(out), *size, "--server.port", "0", "--json")
    checked = worldserve("doctor", "configs/lingbot_world_v2.toml", *flags)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {entry["name"] for entry in json.loads(checked.stdout)} >= {"port", "encoder", "checkpoint", "memlock"}
