"""Captured forwards on a CUDA device: the bits of what was captured, sessions in turns, nothing captured later.

Run with `pytest -m gpu tests/gpu`. On a machine without a device these tests fail, they do not skip.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache.attention_backends import AttentionShape
from kvcache.attention_indexed import Flash3Indexed, GatheredAttention, indexed_attention
from kvcache.indexed import TILE_ROWS
from tests.support.dreamzero_made import random_pictures, write_tiny
from tests.support.dreamzero_sessions import Answer, call, close_robot, open_robot, reset_robot, runtime_of
from tests.support.graph_tape import NotCaptured, no_capture
from worldmodel.dreamzero.adapter import DreamZeroAdapter, create_adapter
from worldmodel.dreamzero.captured_forward import CapturedForward
from worldmodel.dreamzero.config import parse_options
from worldmodel.kernels.names import GraphChoice
from worldmodel.messages import StartWorker
from worldmodel.runtime import Runtime
from worldmodel.wan.captured import CapturedForwards

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLASH3_SIZES = {"dim": 256, "num_heads": 2}
"""Heads of 128 numbers, which FlashAttention-3 is built for."""

NUM_CALLS = 20
PROMPTS = ("Close the drawer.", "Pick up the red block")


@pytest.fixture(scope="module", params=["14b", "5b"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StartWorker:
    folder: Path = tmp_path_factory.mktemp(request.param)
    made = write_tiny(folder, request.param, sizes=FLASH3_SIZES)
    return replace(made, device="cuda", precision="bf16", requested_sessions=2)


def with_options(start: StartWorker, graphs: str) -> StartWorker:
    options = {"computed_steps": 5, "attention": "flash3", "layer_operations": "triton", "graphs": graphs}
    return replace(start, model_options=parse_options(options))


def load(start: StartWorker, graphs: str, *, not_captured: bool = False) -> tuple[Runtime, DreamZeroAdapter]:
    """Return a worker after its warm-up."""
    start = with_options(start, graphs)
    adapter = create_adapter(start, lambda *_: None)
    if not_captured:
        kv = adapter.kv_spec()
        forwards = CapturedForwards(GraphChoice.ON, kv, Flash3Indexed(), NotCaptured())
        adapter._graphs = CapturedForward(adapter._acceleration.forward, forwards, kv)
        adapter._sampler._forward = adapter._graphs
    runtime = runtime_of(adapter, start)
    runtime.warm_up(lambda *_: None)
    return runtime, adapter


def play(worker: tuple[Runtime, DreamZeroAdapter]) -> list[Answer]:
    """Two robots in turns, each with another prompt on the way; one is reset, one leaves and comes again."""
    runtime, adapter = worker
    answers: list[Answer] = []
    counts = {"a": 0, "b": 0}
    for name in counts:
        open_robot(runtime, name)
    for turn in range(NUM_CALLS):
        for number, name in enumerate(counts):
            if turn == 7 and name == "a":
                reset_robot(runtime, name)
                counts[name] = 0
            if turn == 11 and name == "b":
                close_robot(runtime, name)
                open_robot(runtime, name)
                counts[name] = 0
            prompt = PROMPTS[(number + turn // 6) % 2]
            seen = random_pictures(adapter._model.robot, 0 if counts[name] == 0 else 1 + 2 * turn + number)
            answers.append(call(runtime, name, counts[name], seen, prompt))
            counts[name] += 1
    for name in counts:
        close_robot(runtime, name)
    return answers


@dataclass(frozen=True, kw_only=True)
class Served:
    """A worker with graphs, and what it answered while nothing could be captured."""

    start: StartWorker
    runtime: Runtime
    adapter: DreamZeroAdapter
    answers: list[Answer]


@pytest.fixture(scope="module")
def served(start: StartWorker) -> Served:
    runtime, adapter = load(start, "on")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph", no_capture)
        answers = play((runtime, adapter))
    return Served(start=start, runtime=runtime, adapter=adapter, answers=answers)


def test_graphs_repeat_what_they_captured_for_every_session(served: Served) -> None:
    want = play(load(served.start, "off", not_captured=True))
    assert len(served.answers) == 2 * NUM_CALLS
    for ours, theirs in zip(served.answers, want, strict=True):
        np.testing.assert_array_equal(ours.actions, theirs.actions)
        assert torch.equal(ours.latents, theirs.latents)


def test_graphs_act_as_plain_forwards(served: Served) -> None:
    """FlashAttention-3 has another schedule where it reads lengths from the device; sums may be in another order."""
    got, want = served.answers, play(load(served.start, "off"))
    scale = max(float(np.abs(answer.actions).max()) for answer in want)
    farthest = max(float(np.abs(ours.actions - theirs.actions).max()) for ours, theirs in zip(got, want, strict=True))
    same = sum(np.array_equal(ours.actions, theirs.actions) for ours, theirs in zip(got, want, strict=True))
    print(f"actions up to {scale:.3f} differ by {farthest:.2e} at most, {same} of {len(got)} calls have the same bits")
    assert farthest <= 2e-2 * scale


def test_graphs_hold_what_was_planned_and_grow_no_more(served: Served) -> None:
    runtime, adapter = served.runtime, served.adapter
    plain = create_adapter(with_options(served.start, "off"), lambda *_: None)
    assert isinstance(adapter._graphs, CapturedForward)
    planned_bytes = adapter.kv_spec().worker_owned_bytes - plain.kv_spec().worker_owned_bytes
    held_bytes = adapter._graphs.num_bytes
    print(f"graphs hold {held_bytes} of {planned_bytes} bytes planned: {adapter.spec.attention_backend}")
    assert 0 < held_bytes <= planned_bytes
    gc.collect()
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    play((runtime, adapter))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before_bytes
    assert adapter._graphs.num_bytes == held_bytes


def test_what_is_chosen_by_itself_is_said(start: StartWorker) -> None:
    _, adapter = load(start, "auto")
    shown = adapter.spec.attention_backend
    assert "ms in a graph" in shown
    options = parse_options({"attention": "torch_sdpa", "graphs": "auto"})
    other = create_adapter(replace(start, model_options=options), lambda *_: None)
    assert other.spec.attention_backend.endswith("chosen is 'torch_sdpa'")


def shape_of(dtype: torch.dtype) -> AttentionShape:
    device = torch.device("cuda")
    return AttentionShape(num_queries=64, num_keys=128, num_heads=2, head_dim=128, dtype=dtype, device=device)


@pytest.mark.parametrize("num_queries", [5, 25, 200])
@pytest.mark.parametrize("name", ["flash3", "triton"])
def test_attention_by_number_equals_its_twin(name: str, num_queries: int) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    k_EXHD, v_EXHD = (torch.randn(6, 300, 2, 128, device="cuda", generator=rng).bfloat16() for _ in range(2))
    q_BNHD = torch.randn(2, num_queries, 2, 128, device="cuda", generator=rng).bfloat16()
    for entries, lengths in (((4, 1), (275, 275)), ((0, 5), (7, 129)), ((3, 3), (64, 1))):
        places = {
            "entries_B": torch.tensor(entries, dtype=torch.int32, device="cuda"),
            "num_rows_B": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        }
        for first in (0, 25):
            rows = k_EXHD[:, first:], v_EXHD[:, first:]
            got = indexed_attention(name)(q_BNHD, *rows, **places)
            torch.testing.assert_close(got, GatheredAttention()(q_BNHD, *rows, **places), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("name", "far"), [("flash3", 0.06), ("triton", 0.01)])
def test_float8_by_number_is_near_its_twin(name: str, far: float) -> None:
    """FlashAttention-3 rounds weights to float8 as well; Triton widens everything. Rows further on are no numbers."""
    rng = torch.Generator("cuda").manual_seed(2)
    q_BNHD = torch.randn(1, 200, 2, 128, device="cuda", generator=rng).to(torch.float8_e4m3fn)
    for num_rows in (1, 200, 421):
        k_EXHD, v_EXHD = (torch.randn(4, 700, 2, 128, device="cuda", generator=rng) for _ in range(2))
        for rows_EXHD in (k_EXHD, v_EXHD):
            # As after a chunk is shown: cleared as far as a tile reaches.
            rows_EXHD[:, num_rows : num_rows + TILE_ROWS] = 0.0
            rows_EXHD[:, num_rows + TILE_ROWS :] = torch.nan
        given = (q_BNHD, k_EXHD.to(torch.float8_e4m3fn), v_EXHD.to(torch.float8_e4m3fn))
        places = {
            "entries_B": torch.tensor((3,), dtype=torch.int32, device="cuda"),
            "num_rows_B": torch.tensor((num_rows,), dtype=torch.int32, device="cuda"),
        }
        want = GatheredAttention()(*given, **places).float()
        got = indexed_attention(name)(*given, **places).float()
        distance = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
        print(f"float8 by number, {name}, {num_rows} rows: {distance:.1e}")
        assert distance < far


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_text_by_number_has_its_bias_and_never_reads_past_its_end(dtype: torch.dtype) -> None:
    """Whatever lies past the end is no number."""
    rng = torch.Generator("cuda").manual_seed(1)
    bias_X = torch.randn(512, device="cuda", generator=rng)
    q_BNHD = torch.randn(1, 200, 2, 128, device="cuda", generator=rng).to(dtype)
    attention = indexed_attention("triton")
    for num_rows in (1, 40, 121, 391, 512):
        k_EXHD, v_EXHD = (torch.randn(3, 512, 2, 128, device="cuda", generator=rng) for _ in range(2))
        for rows_EXHD in (k_EXHD, v_EXHD):
            rows_EXHD[:, num_rows:] = torch.nan
        given = (q_BNHD, k_EXHD.to(dtype), v_EXHD.to(dtype))
        places = {
            "entries_B": torch.tensor((2,), dtype=torch.int32, device="cuda"),
            "num_rows_B": torch.tensor((num_rows,), dtype=torch.int32, device="cuda"),
            "logit_bias_X": bias_X,
        }
        got = attention(*given, **places)
        torch.testing.assert_close(got, GatheredAttention()(*given, **places), atol=1e-2, rtol=1e-2)
