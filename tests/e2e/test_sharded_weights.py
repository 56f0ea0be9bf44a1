"""Ranks in processes of their own that share the weights of layers out: every layer is whole on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sharded_ranks import LAYOUT, NUM_LAYERS
from tests.support.sharded_transformer import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_keep_a_share_and_see_whole_layers(tmp_path: Path, num_ranks: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.sharded_ranks", str(tmp_path), str(num_ranks)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    ranks = json.loads(ended.stdout.strip().splitlines()[-1])

    assert sum(rank["host_bytes"] for rank in ranks) == NUM_LAYERS * LAYOUT.num_bytes
    for rank in ranks:
        assert rank["host_bytes"] <= NUM_LAYERS * (LAYOUT.num_bytes / num_ranks + 256)
        assert rank["passes"] == [True, True, True]
        # One rank lost what its buffers held: the next tick fails on all, the one after it is right on all.
        assert rank["after failure"] == "RanksDisagree"
        assert rank["recovered"] is True
        # So it is where ranks are at different parts of the model.
        assert rank["elsewhere"] == "RanksDisagree"
        assert rank["together again"] is True
        assert rank["model"] is True
        assert rank["mapped model"] is True


def test_a_transformer_shared_out_computes_what_a_resident_one_does(tmp_path: Path) -> None:
    """A rank that failed alone is found on all, and one that hangs is noticed by the others in bounded time."""
    codes = run_ranks(tmp_path, 2, timeout_s=90)

    assert codes == [0, 0], (tmp_path / "log").read_text()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert found["equal"] == [True, True]
        assert found["recovered"] is True
        assert found["after a failure"] == "RanksDisagree"
        assert found["host_bytes"] < 0.51 * found["whole_bytes"]
    assert sum(found["host_bytes"] for found in ranks) == ranks[0]["whole_bytes"]
    assert json.loads((tmp_path / "0.hang.json").read_text())["error"] == "CopyFailed"
