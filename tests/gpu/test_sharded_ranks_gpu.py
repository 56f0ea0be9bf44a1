"""Two ranks on two CUDA devices share full-size layers out: each copies its half, NCCL gathers them on the devices.

Skipped where there is only one device. The twin on a CPU over gloo is `tests/e2e/test_sharded_weights.py`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.support.sharded_transformer import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

NUM_RANKS = 2


def test_two_devices_share_full_size_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < NUM_RANKS:
        pytest.skip(f"{NUM_RANKS} CUDA devices are needed, {torch.cuda.device_count()} are here")

    options = ("--device", "cuda", "--model", "lingbot-world-v2", "--height", "60", "--width", "104")
    codes = run_ranks(tmp_path, NUM_RANKS, *options, timeout_s=130)

    files = [tmp_path / f"{rank}.json" for rank in range(NUM_RANKS)]
    log = (tmp_path / "log").read_text(errors="replace")
    assert all(file.exists() for file in files), log
    ranks = [json.loads(file.read_text()) for file in files]
    for found in ranks:
        assert found["equal"] == [True, True]
        assert found["recovered"] is True
        assert found["after a failure"] == "RanksDisagree"
        # Half of every layer, all of it page-locked, and unlocked in the end.
        assert found["whole_bytes"] / NUM_RANKS <= found["host_bytes"] < 1.001 * found["whole_bytes"] / NUM_RANKS
        assert found["locked_bytes"] >= found["host_bytes"]
        assert found["locked_bytes after"] == 0
    # The rank that did not hang raised on the host. What its device waits for may end the process too, if NCCL's own
    # watch is quicker than its end.
    noticed = json.loads((tmp_path / "0.hang.json").read_text())
    assert noticed["error"] == "CopyFailed"
    assert codes[0] in (0, -signal.SIGABRT), log
    assert codes[1] == 0, log
    with capsys.disabled():
        print(
            "\nlayers reach a device at "
            f"{', '.join(format(found['shared_gb_per_s'], '.1f') for found in ranks)} GB/s shared out, "
            f"{', '.join(format(found['alone_gb_per_s'], '.1f') for found in ranks)} GB/s alone; a rank that hung was "
            f"noticed after {noticed['after_s']:.1f} s, exit code {codes[0]}"
        )
