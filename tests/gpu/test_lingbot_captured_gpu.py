"""Captured forwards of LingBot on a CUDA device: the bits of what was captured, sessions in turns, no capture later.

Run with `pytest -m gpu tests/gpu`. On a machine without a device these tests fail, they do not skip.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvcache.attention_indexed import indexed_attention
from kvcache.pool import ExtentPool
from tests.support.fake_model import close_session, image, keys, open_session, reset_session, tick
from tests.support.graph_tape import NotCaptured, no_capture
from worldmodel.checkpoint.writer import write_checkpoint
from worldmodel.kernels.names import GraphChoice
from worldmodel.lingbot.adapter import LingBotAdapter, create_adapter
from worldmodel.lingbot.captured_forward import CapturedForward
from worldmodel.lingbot.config import parse_options
from worldmodel.lingbot.controls import TRANSITION_SCHEMA, parse_control
from worldmodel.lingbot.layout import Layout, plan_checkpoint
from worldmodel.lingbot.published import TINY
from worldmodel.messages import Control, ControlEvent, MediaFormat, StartWorker
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime
from worldmodel.wan.captured import CapturedForwards

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HEADS_OF_128 = {"attention_head_dim": 128}
"""What FlashAttention-3 is built for; two of them."""

NUM_CHUNKS = 20
"""Of each session; the window has slid after six."""

FLOAT8_NAN = 0x7F
PROMPTS = ("a street", "a town by the sea in the evening", "night")
Chunks = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A precision and what attends. `first` and `any` bound the distance of graphs from plain forwards.

    Nothing but the order of sums differs; on a CPU it makes 2e-7 in float32 and 2e-3 in bfloat16, in any chunk.
    """

    precision: str
    attention: str
    first: float
    any: float

    def __str__(self) -> str:
        return f"{self.precision}-{self.attention}"


CASES = [
    Case(precision="fp32", attention="triton", first=1e-4, any=1e-3),
    Case(precision="bf16", attention="flash3", first=2e-2, any=5e-2),
    Case(precision="fp8", attention="flash3", first=5e-2, any=0.1),
    Case(precision="fp8_kv", attention="flash3", first=5e-2, any=0.1),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lingbot") / "model"
    model = replace(TINY, transformer=dict(TINY.transformer) | HEADS_OF_128)
    write_checkpoint(plan_checkpoint(model, layout=Layout.DIFFUSERS), folder, seed=0)
    return folder


def start_of(checkpoint: Path, case: Case, **options: object) -> StartWorker:
    return StartWorker(
        model="lingbot_world_v2",
        checkpoint=str(checkpoint),
        width=160,
        height=96,
        fps=16,
        device="cuda",
        precision=case.precision,
        requested_sessions=2,
        model_options=parse_options({"attention": case.attention, "layer_operations": "triton", **options}),
    )


class Worker:
    """A worker after its warm-up."""

    def __init__(self, start: StartWorker, *, not_captured: bool = False) -> None:
        self.adapter: LingBotAdapter = create_adapter(start, lambda *_: None)
        if not_captured:
            kv, attention = self.adapter.kv_spec(), indexed_attention(self.adapter.attention().name)
            graphs = CapturedForwards(GraphChoice.ON, kv, attention, NotCaptured())
            forward = self.adapter._acceleration.forward
            self.adapter.serve_with(
                CapturedForward(forward, graphs, self.adapter._transformer, merges_padding=self.adapter._merge_padding)
            )
        cache = allocate_cache(self.adapter.kv_spec(), start, self.adapter.attention())
        self.runtime = Runtime(self.adapter, cache, device=start.device)
        self.runtime.warm_up(lambda *_: None)

    def open(self, name: str, seed: int) -> None:
        outputs = (MediaFormat.LATENT, MediaFormat.YUV420)
        self.runtime.open(open_session(name, seed=seed, outputs=outputs), image(seed))

    def chunk(self, name: str, index: int, *events: ControlEvent, prompt: str | None = None) -> npt.NDArray[np.float32]:
        _, (latents, _) = self.runtime.tick(tick(name, index, *events, prompt=prompt)).to_host()
        return np.asarray(latents).view(np.float32).reshape(-1).copy()


def play(worker: Worker) -> dict[str, Chunks]:
    """Two sessions in turns with keys and prompts on their way; one is reset, the other closed and opened anew."""
    chunks: dict[str, Chunks] = {"a": [], "b": []}
    counts = dict.fromkeys(chunks, 0)
    for seed, name in enumerate(chunks):
        worker.open(name, seed)
    for turn in range(NUM_CHUNKS):
        for number, name in enumerate(chunks):
            if turn == 9 and name == "a":
                worker.runtime.reset(reset_session(name, seed=3), None)
                counts[name] = 0
            if turn == 12 and name == "b":
                worker.runtime.close(close_session(name))
                worker.open(name, 4)
                counts[name] = 0
            events = [keys(2 * turn, "wasd"[(turn + number) % 4], "ijkl"[turn % 4])]
            prompt = PROMPTS[(turn + number) % 3] if turn % 4 == 3 else None
            if turn == 7:
                data = parse_control("prompt", TRANSITION_SCHEMA, {"chunks": 3})
                control = Control(track="prompt", schema=TRANSITION_SCHEMA, data=data)
                events.append(ControlEvent(event_id=2 * turn + 1, controls=(control,)))
            chunks[name].append(worker.chunk(name, counts[name], *events, prompt=prompt))
            counts[name] += 1
    for name in chunks:
        worker.runtime.close(close_session(name))
    return chunks


@dataclass(frozen=True, kw_only=True)
class Served:
    """A worker with graphs, and what it showed while nothing could be captured."""

    case: Case
    checkpoint: Path
    worker: Worker
    chunks: Mapping[str, Chunks]

    def start(self, **options: object) -> StartWorker:
        return start_of(self.checkpoint, self.case, **options)


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(request: pytest.FixtureRequest, checkpoint: Path) -> Served:
    case: Case = request.param
    worker = Worker(start_of(checkpoint, case, graphs="on"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph", no_capture)
        chunks = play(worker)
    return Served(case=case, checkpoint=checkpoint, worker=worker, chunks=chunks)


def forward_of(worker: Worker) -> CapturedForward:
    assert isinstance(worker.adapter._graphs, CapturedForward)
    return worker.adapter._graphs


def test_graphs_repeat_what_they_captured_for_every_session(served: Served) -> None:
    want = play(Worker(served.start(graphs="off"), not_captured=True))
    for name, chunks in served.chunks.items():
        assert len(chunks) == NUM_CHUNKS
        for index, (ours, theirs) in enumerate(zip(chunks, want[name], strict=True)):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"chunk {index} of {name}")


def test_graphs_show_the_worlds_of_plain_forwards(served: Served) -> None:
    want = play(Worker(served.start(graphs="off")))
    distances = [
        float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))
        for name, chunks in served.chunks.items()
        for ours, theirs in zip(chunks, want[name], strict=True)
    ]
    first = max(distances[0], distances[NUM_CHUNKS])
    print(f"{served.case}: first chunks differ by {first:.1e}, any by {max(distances):.1e} at most")
    assert first <= served.case.first
    assert max(distances) <= served.case.any


def test_graphs_hold_what_was_planned(served: Served) -> None:
    adapter, forward = served.worker.adapter, forward_of(served.worker)
    plain = create_adapter(served.start(graphs="off"), lambda *_: None)
    planned_bytes = adapter.kv_spec().worker_owned_bytes - plain.kv_spec().worker_owned_bytes
    held_bytes = forward.num_bytes
    print(f"graphs hold {held_bytes} of {planned_bytes} bytes planned: {adapter.spec.attention_backend}")
    assert 0 < held_bytes <= planned_bytes


def test_nothing_grows_and_what_lies_in_the_storage_from_before_reaches_nobody(served: Served) -> None:
    """Sessions that failed may leave numbers that are none anywhere in their extents and slots."""
    forward, cache = forward_of(served.worker), served.worker.runtime._cache
    pool = cache._pool
    assert isinstance(pool, ExtentPool)
    tensors = [*pool.k_EXHD, *pool.v_EXHD]
    tensors += [tensor for cross in cache._cross_pools.values() for tensor in (*cross.k_ZLHD, *cross.v_ZLHD)]
    with torch.inference_mode():
        for tensor in tensors:
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).fill_(FLOAT8_NAN)
            else:
                tensor.fill_(torch.nan)
    held_bytes, allocated_bytes = forward.num_bytes, allocated()
    again = play(served.worker)
    assert (forward.num_bytes, allocated()) == (held_bytes, allocated_bytes)
    for name, chunks in served.chunks.items():
        for index, (ours, theirs) in enumerate(zip(again[name], chunks, strict=True)):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"chunk {index} of {name}")


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_what_is_chosen_by_itself_is_said(checkpoint: Path) -> None:
    case = CASES[1]
    shown = Worker(start_of(checkpoint, case, graphs="auto")).adapter.spec.attention_backend
    assert shown.count("ms in a graph") == 2, shown
    other = create_adapter(start_of(checkpoint, replace(case, attention="torch_sdpa"), graphs="auto"), lambda *_: None)
    assert other.spec.attention_backend.endswith("chosen is 'torch_sdpa'")
