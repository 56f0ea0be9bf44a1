"""DreamZero on a CUDA device: against the golden calls and the CPU, fused against plain, robots in turns.

Run with `pytest -m gpu tests/gpu`. On a machine without a device these tests fail, they do not skip.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.dreamzero_checkpoint import call_arrays, start_worker, write_checkpoint
from tests.support.dreamzero_golden import manifest, tensors
from tests.support.dreamzero_made import random_pictures, write_tiny
from tests.support.dreamzero_sessions import call, close_robot, open_robot, runtime_of
from worldmodel.dreamzero.adapter import create_adapter
from worldmodel.dreamzero.config import parse_options
from worldmodel.messages import StartWorker
from worldmodel.runtime import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPT = "Pick up the red block and put it in the bowl"
NUM_CALLS = 5
"""A whole window and the restart after it."""

Actions = list[npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def cuda_start(folder: Path, *, precision: str = "fp32", **options: object) -> StartWorker:
    """Return a start with torch's attention and layers as written, unless `options` say otherwise."""
    chosen = {"layer_operations": "unfused", "attention": "torch_sdpa"} | options
    return replace(start_worker(folder, **chosen), device="cuda", precision=precision)


def load(start: StartWorker) -> Runtime:
    return runtime_of(create_adapter(start, lambda stage, fraction, detail: None), start)


def play(runtime: Runtime, name: str = "a") -> Actions:
    open_robot(runtime, name)
    return [call(runtime, name, index, call_arrays(index), PROMPT).actions for index in range(NUM_CALLS)]


def assert_close(got: Actions, want: Actions, tolerance: float) -> None:
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance)


def test_golden_calls_on_the_device(folder: Path) -> None:
    golden = tensors("rollout_default")
    calls = manifest()["cases"]["rollout_default"]["calls"][:NUM_CALLS]
    runtime = load(cuda_start(folder))
    open_robot(runtime, "a")
    got = [call(runtime, "a", index, call_arrays(index), entry["prompt"]).actions for index, entry in enumerate(calls)]
    assert_close(got, [golden[f"call{index}/actions"].numpy() for index in range(NUM_CALLS)], 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_layers_equal_the_plain_ones(folder: Path, precision: str) -> None:
    plain = play(load(cuda_start(folder, precision=precision)))
    fused = play(load(cuda_start(folder, precision=precision, layer_operations="triton")))
    # On a CPU bf16 moves these actions, of up to 3.1, by 0.010 from those in float32.
    assert_close(fused, plain, 2e-3 if precision == "fp32" else 5e-2)


def test_float8_layers_are_near_the_plain_ones(folder: Path) -> None:
    plain = play(load(cuda_start(folder, precision="bf16")))
    float8 = play(load(cuda_start(folder, precision="fp8", layer_operations="triton")))
    # On a CPU float8 moves them by 0.045; a wrong order of work moves them by as much as they are.
    assert_close(float8, plain, 0.2)
    assert not np.array_equal(float8[0], plain[0])


@pytest.mark.parametrize(
    ("attention", "precision"), [("triton", "fp32"), ("triton", "bf16"), ("sdpa_flash", "bf16"), ("sdpa_cudnn", "bf16")]
)
def test_every_attention_gives_the_same_actions(folder: Path, attention: str, precision: str) -> None:
    torchs = play(load(cuda_start(folder, precision=precision)))
    chosen = play(load(cuda_start(folder, precision=precision, attention=attention)))
    assert_close(chosen, torchs, 2e-3 if precision == "fp32" else 5e-2)


def test_what_is_chosen_by_itself_runs_and_is_said(folder: Path) -> None:
    start = cuda_start(folder, precision="bf16", attention="auto", layer_operations="auto")
    adapter = create_adapter(start, lambda stage, fraction, detail: None)
    # Its heads are no ones for FlashAttention-3; Triton may be the fastest of the others, and has graphs.
    shown = adapter.spec.attention_backend
    assert re.search(r"; layers triton; (graphs |no graphs: they need the attention 'flash3')", shown), shown
    assert_close(play(runtime_of(adapter, start)), play(load(cuda_start(folder, precision="bf16"))), 5e-2)


@pytest.mark.parametrize("structure", ["14b", "5b"])
def test_both_structures_act_as_on_a_cpu(tmp_path: Path, structure: str) -> None:
    start = write_tiny(tmp_path, structure)

    def act(start: StartWorker) -> Actions:
        adapter = create_adapter(start, lambda stage, fraction, detail: None)
        runtime, robot = runtime_of(adapter, start), adapter._model.robot
        open_robot(runtime, "a")
        return [call(runtime, "a", index, random_pictures(robot, index), PROMPT).actions for index in range(NUM_CALLS)]

    want = act(start)
    scale = max(float(np.abs(actions).max()) for actions in want)
    for layer_operations in ("unfused", "triton"):
        options = {"computed_steps": 5, "attention": "torch_sdpa", "layer_operations": layer_operations}
        got = act(replace(start, device="cuda", model_options=parse_options(options)))
        assert_close([actions / scale for actions in got], [actions / scale for actions in want], 5e-3)


@pytest.mark.parametrize("layer_operations", ["unfused", "triton"])
def test_robots_in_turns_get_what_each_gets_alone(folder: Path, layer_operations: str) -> None:
    start = cuda_start(folder, precision="bf16", layer_operations=layer_operations)
    alone = play(load(start))
    runtime = load(start)
    for name in ("a", "b"):
        open_robot(runtime, name)
    for index in range(NUM_CALLS):
        for name, shift in (("b", 1), ("a", 0)):
            place = (index + shift) % NUM_CALLS
            got = call(runtime, name, index, call_arrays(place), PROMPT).actions
            if name == "a":
                np.testing.assert_array_equal(got, alone[index])


def test_robots_that_come_and_go_leave_no_memory(folder: Path) -> None:
    runtime = load(cuda_start(folder, precision="bf16", layer_operations="triton"))
    play(runtime)
    close_robot(runtime, "a")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), runtime.memory().free_pages
    for number in range(20):
        name = f"robot-{number}"
        open_robot(runtime, name)
        for index in range(2):
            call(runtime, name, index, call_arrays(index), PROMPT)
        close_robot(runtime, name)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), runtime.memory().free_pages) == before
