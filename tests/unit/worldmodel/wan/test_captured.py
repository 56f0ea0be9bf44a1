"""When a forward is captured, kept and replayed; what graphs need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcache.attention_indexed import GatheredAttention
from kvcache.cache import KVCache
from kvcache.indexed import IndexableKV
from kvcache.spec import KVSpec
from tests.support.graph_tape import BYTES_OF_A_TAPE, TapeRecorder
from worldmodel.errors import LoadFailed
from worldmodel.kernels.names import AttentionChoice, GraphChoice
from worldmodel.wan.captured import (
    CapturedForwards,
    ForwardCall,
    OutT,
    Recording,
    check_graphs,
    create_graphs,
    may_be_captured,
    why_no_graphs,
)

KV = KVSpec(
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    tokens_per_latent_frame=2,
    latent_frames_per_chunk=1,
    sink_latent_frames=1,
    window_latent_frames=2,
    element_bytes=4,
)


class Asked:
    """Calls of one forward: the argument times the constant, computed and counted in Python."""

    def __init__(self, kv: IndexableKV) -> None:
        self._kv = kv
        self.num_runs = 0

    def call(self, number: float, factor: torch.Tensor, name: str = "product") -> ForwardCall[torch.Tensor]:
        def run(argument: torch.Tensor, constant: torch.Tensor, kv: object) -> torch.Tensor:
            self.num_runs += 1
            return argument * constant

        return ForwardCall(name=name, run=run, arguments=torch.tensor([number]), constants=factor, kv=self._kv)


@pytest.fixture
def asked() -> Asked:
    cache = KVCache(KV, capacity=1, device="cpu", dtype=torch.float32)
    cache.open("a")
    return Asked(cache.lease("a").begin_chunk())


def forwards(choice: GraphChoice, recorder: TapeRecorder) -> CapturedForwards:
    return CapturedForwards(choice, KV, GatheredAttention(), recorder)


def test_a_replay_takes_what_is_given_and_gives_what_stays(asked: Asked) -> None:
    graphs, factors = forwards(GraphChoice.AUTO, TapeRecorder()), (torch.tensor([2.0]), torch.tensor([5.0]))
    first = graphs(asked.call(3.0, factors[0]))
    runs = asked.num_runs
    others = [graphs(asked.call(number, factor)) for number in (7.0, 11.0) for factor in factors]
    assert [tensor.item() for tensor in (first, *others)] == [6.0, 14.0, 35.0, 22.0, 55.0]
    assert asked.num_runs == runs, "the forward ran in Python again"


@pytest.mark.parametrize(
    ("choice", "graph_ms", "is_kept"),
    [
        (GraphChoice.AUTO, 9.5, True),
        (GraphChoice.AUTO, 9.7, False),
        (GraphChoice.AUTO, 12.0, False),
        (GraphChoice.ON, 12.0, True),
    ],
)
def test_a_graph_is_kept_if_it_is_asked_for_or_gains_enough(
    asked: Asked, choice: GraphChoice, graph_ms: float, is_kept: bool
) -> None:
    graphs, factor = forwards(choice, TapeRecorder(10.0, graph_ms)), torch.tensor([2.0])
    graphs(asked.call(3.0, factor))
    graphs.seal()
    assert (graphs.num_bytes > 0) == is_kept == graphs.has_any
    shown = f"product (10.00 ms plain, {graph_ms:.2f} ms in a graph)"
    assert graphs.description == f"graphs {shown}" if is_kept else f"graphs not {shown}"
    runs = asked.num_runs
    assert graphs(asked.call(4.0, factor)).item() == 8.0
    assert (asked.num_runs == runs) == is_kept


def test_nothing_is_captured_once_sealed(asked: Asked) -> None:
    recorder = TapeRecorder()
    graphs, factor = forwards(GraphChoice.ON, recorder), torch.tensor([2.0])
    graphs(asked.call(3.0, factor, "early"))
    graphs.seal()
    assert graphs(asked.call(4.0, factor, "late")).item() == 8.0
    assert graphs(asked.call(5.0, factor, "early")).item() == 10.0
    assert (len(recorder.tapes), recorder.num_timed) == (1, 2)


def test_a_graph_that_gains_nothing_lives_as_long_as_one_that_does(asked: Asked) -> None:
    """What it would give back when it ends may be in use by the others."""
    recorder = TapeRecorder(10.0, 12.0, 10.0, 5.0)
    graphs, factor = forwards(GraphChoice.AUTO, recorder), torch.tensor([2.0])
    for name in ("slow", "fast"):
        graphs(asked.call(3.0, factor, name))
    graphs.seal()
    assert recorder.num_alive == 2
    assert graphs.num_bytes > 2 * BYTES_OF_A_TAPE
    none = TapeRecorder(10.0, 12.0)
    graphs = forwards(GraphChoice.AUTO, none)
    graphs(asked.call(3.0, factor))
    assert graphs.num_bytes == BYTES_OF_A_TAPE
    graphs.seal()
    assert (none.num_alive, graphs.num_bytes) == (0, 0)


@pytest.mark.parametrize(("graph_ms", "times_said"), [(5.0, 0), (12.0, 1)])
def test_planned_memory_that_no_graph_uses_is_said(
    asked: Asked, graph_ms: float, times_said: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    graphs = forwards(GraphChoice.AUTO, TapeRecorder(10.0, graph_ms))
    graphs(asked.call(3.0, torch.tensor([2.0])))
    graphs.seal()
    assert caplog.text.count("the memory planned for them stays unused; 'off' plans without it") == times_said


def test_a_kernel_that_does_not_compile_as_it_is_captured_names_the_way_out(asked: Asked) -> None:
    class Failing(TapeRecorder):
        def record(self, call: Callable[[], OutT]) -> Recording[OutT]:
            raise ValueError("no such instruction")

    with pytest.raises(LoadFailed, match=r"product can't be captured, 'off' runs it without \(no such instruction\)"):
        forwards(GraphChoice.ON, Failing())(asked.call(3.0, torch.tensor([2.0])))


def test_a_forward_that_can_not_be_captured_names_the_way_out(asked: Asked) -> None:
    graphs = forwards(GraphChoice.ON, TapeRecorder())
    call = replace(asked.call(3.0, torch.tensor([2.0])), run=lambda argument, constant, kv: argument.item())
    with pytest.raises(LoadFailed, match="graphs: product can't be captured, 'off' runs it without") as failed:
        graphs(call)
    assert failed.value.field == "graphs"


def test_memory_is_counted_wherever_graphs_may_come() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [may_be_captured(GraphChoice.AUTO, KV, each) for each in (None, cuda, cpu)] == [True, True, False]
    assert may_be_captured(GraphChoice.ON, KV, cuda)
    assert not may_be_captured(GraphChoice.OFF, KV, None)
    assert not may_be_captured(GraphChoice.AUTO, replace(KV, window_latent_frames=None), None)
    assert not may_be_captured(GraphChoice.AUTO, KV, cuda, refusal="of its own")


def test_what_can_never_be_had_is_refused_before_there_are_weights() -> None:
    cuda = torch.device("cuda")

    def check(attention: AttentionChoice, choice: GraphChoice = GraphChoice.ON, refusal: str | None = None) -> None:
        check_graphs(choice, KV, attention, torch.bfloat16, cuda, refusal=refusal)

    for attention in (AttentionChoice.AUTO, AttentionChoice.FLASH3, AttentionChoice.TRITON):
        check(attention)
    check(AttentionChoice.SDPA_CUDNN, GraphChoice.AUTO, "of its own")
    for attention in (AttentionChoice.SDPA_CUDNN, AttentionChoice.TRITON_PAGED):
        with pytest.raises(LoadFailed, match=f"they need the attention 'flash3' or 'triton', chosen is '{attention}'"):
            check(attention)
    with pytest.raises(LoadFailed, match="graphs 'on' can't be had: of its own"):
        check(AttentionChoice.AUTO, refusal="of its own")


def test_what_reads_on_the_host_is_no_graph() -> None:
    with pytest.raises(RuntimeError, match="reads on the host"):
        TapeRecorder().record(lambda: torch.ones(1).item())


def test_what_is_missing_is_said() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert create_graphs(GraphChoice.OFF, KV, "torch_sdpa", torch.bfloat16, cuda) == "off"
    reason = create_graphs(GraphChoice.AUTO, KV, "torch_sdpa", torch.bfloat16, cpu)
    assert reason == "they need a CUDA device, the model is on 'cpu'"
    with pytest.raises(LoadFailed, match="graphs 'on' can't be had: they need the attention 'flash3' or") as failed:
        create_graphs(GraphChoice.ON, KV, "torch_sdpa", torch.bfloat16, cuda)
    assert failed.value.field == "graphs"
    pages = replace(KV, window_latent_frames=None)
    assert why_no_graphs(pages, cuda) == "they need a bounded window, whose K/V lies in extents"
    reason = create_graphs(GraphChoice.AUTO, KV, "torch_sdpa", torch.bfloat16, cuda, refusal="of its own")
    assert reason == "of its own"
    with pytest.raises(ValueError, match="expected 'auto' or 'on'"):
        forwards(GraphChoice.OFF, TapeRecorder())
