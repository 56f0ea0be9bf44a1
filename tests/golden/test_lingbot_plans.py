"""Every golden case in every precision plan on a CPU, where bfloat16 is emulated; tests/gpu has the same for CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.support.lingbot_golden_runs import EMULATED, Distance, GoldenRuns, check_distances


@pytest.mark.parametrize("precision", ["fp32", "bf16", "official"])
def test_lingbot_every_case_in_a_precision_plan(precision: str) -> None:
    found = GoldenRuns(device=torch.device("cpu"), precision=precision).all_distances()
    check_distances(found, precision)
    assert (found[EMULATED].relative_rms < 2e-3) == (precision == "official")


def test_a_distance_that_is_too_large_is_named() -> None:
    near, far = Distance(largest=9e-6, relative_rms=9e-3), Distance(largest=1.0, relative_rms=1.0)
    for precision in ("fp32", "bf16", "official"):
        check_distances({"case 1 flow": near, "case 7 decode": near}, precision)
        with pytest.raises(AssertionError, match="case 7 decode"):
            check_distances({"case 1 flow": near, "case 7 decode": far}, precision)
