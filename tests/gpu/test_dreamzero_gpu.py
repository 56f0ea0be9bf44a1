"""DreamZero on a CUDA device: fused kernels against the plain layers, the golden calls, robots in turns.

Run with `pytest -m gpu tests/gpu`. On a machine without a device these tests fail, they do not skip.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.dreamzero_checkpoint import call_arrays, start_worker, write_checkpoint
from tests.support.dreamzero_golden import manifest, tensors
from tests.support.dreamzero_sessions import call, open_robot, runtime_of
from worldmodel.dreamzero.adapter import create_adapter
from worldmodel.messages import StartWorker
from worldmodel.runtime import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPT = "Pick up the red block and put it in the bowl"
NUM_CALLS = 5
"""A whole window and the restart after it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def cuda_start(folder: Path, *, precision: str = "fp32", sessions: int = 2, **options: object) -> StartWorker:
    start = start_worker(folder, requested_sessions=sessions, **options)
    return replace(start, device="cuda", precision=precision, requested_sessions=sessions)


def load(start: StartWorker) -> Runtime:
    adapter = create_adapter(start, lambda stage, fraction, detail: None)
    return runtime_of(adapter, start)


def play(runtime: Runtime, name: str, num_calls: int = NUM_CALLS) -> list[np.ndarray]:
    open_robot(runtime, name)
    return [call(runtime, name, index, call_arrays(index), PROMPT).actions for index in range(num_calls)]


def test_golden_calls_on_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Convolutions would take their inputs as TF32 otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    golden = tensors("rollout_default")
    calls = manifest()["cases"]["rollout_default"]["calls"][:NUM_CALLS]
    runtime = load(cuda_start(folder, layer_operations="unfused", attention="torch_sdpa"))
    open_robot(runtime, "a")
    for index, entry in enumerate(calls):
        answer = call(runtime, "a", index, call_arrays(index), entry["prompt"])
        np.testing.assert_allclose(answer.actions, golden[f"call{index}/actions"].numpy(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_layers_equal_the_plain_ones(folder: Path, precision: str) -> None:
    plain = play(load(cuda_start(folder, precision=precision, layer_operations="unfused")), "a")
    fused = play(load(cuda_start(folder, precision=precision, layer_operations="triton")), "a")
    tolerance = 2e-3 if precision == "fp32" else 5e-2
    for got, want in zip(fused, plain, strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layer_operations", ["unfused", "triton"])
def test_robots_in_turns_get_what_each_gets_alone(folder: Path, layer_operations: str) -> None:
    start = cuda_start(folder, precision="bf16", layer_operations=layer_operations, attention="torch_sdpa")
    alone = play(load(start), "a")
    runtime = load(start)
    for name in ("a", "b"):
        open_robot(runtime, name)
    for index in range(NUM_CALLS):
        for name, shift in (("b", 1), ("a", 0)):
            place = (index + shift) % NUM_CALLS
            got = call(runtime, name, index, call_arrays(place), PROMPT).actions
            if name == "a":
                np.testing.assert_array_equal(got, alone[index])
