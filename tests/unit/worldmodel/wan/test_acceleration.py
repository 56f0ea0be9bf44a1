"""What both models share of choosing kernels: refusals by option, and what operators are told."""

from __future__ import annotations

import pytest
import torch

from kvcache.attention import TorchAttention
from kvcache.attention_backends import AttentionShape, ChosenAttention
from worldmodel.errors import LoadFailed
from worldmodel.kernels.layer_ops import PlainOps
from worldmodel.kernels.names import AttentionChoice, LayerOperations
from worldmodel.wan.acceleration import attention_backend, join, layer_operations
from worldmodel.wan.precision import precision_plan

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_queries=4, num_keys=8, num_heads=2, head_dim=32, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("choice", [each for each in AttentionChoice if each.value not in ("auto", "torch_sdpa")])
def test_attention_that_needs_a_gpu_is_refused_by_its_option(choice: AttentionChoice) -> None:
    with pytest.raises(LoadFailed, match=f"attention '{choice.value}' can't be used") as caught:
        attention_backend(choice, SHAPE)
    assert caught.value.field == "attention"


@pytest.mark.parametrize(
    ("choice", "precision", "message"),
    [(LayerOperations.TRITON, "fp32", "need a CUDA device"), (LayerOperations.UNFUSED, "fp8", "has no unfused form")],
)
def test_operations_that_can_not_be_had_are_refused_by_their_option(
    choice: LayerOperations, precision: str, message: str
) -> None:
    with pytest.raises(LoadFailed, match=message) as caught:
        layer_operations(choice, precision_plan(precision), CPU)
    assert caught.value.field == "layer_operations"


def test_float8_without_triton_has_the_plain_order() -> None:
    assert isinstance(layer_operations(LayerOperations.AUTO, precision_plan("fp8"), CPU), PlainOps)
    assert layer_operations(LayerOperations.AUTO, precision_plan("bf16"), CPU) is None


@pytest.mark.parametrize(
    ("precision", "text"),
    [("bf16", "torch_sdpa; layers unfused"), ("fp8", "torch_sdpa; layers plain with float8 linears")],
)
def test_what_was_chosen_is_said(precision: str, text: str) -> None:
    plan = precision_plan(precision)
    chosen = attention_backend(AttentionChoice.AUTO, SHAPE)
    found = join(chosen, "the forward", layer_operations(LayerOperations.AUTO, plan, CPU), plan)
    assert isinstance(found.attention, TorchAttention)
    assert (found.forward, found.description) == ("the forward", text)
    assert (found.graph_attention, found.in_graphs) == ("torch_sdpa", "")


def test_graphs_take_the_fastest_kernel_that_they_can_where_another_one_was_chosen() -> None:
    plan = precision_plan("bf16")
    timings_ms = (("torch_sdpa", 1.0), ("flash3", 3.0), ("triton", 2.0), ("sdpa_cudnn", 1.5))
    found = join(ChosenAttention(attention=TorchAttention(), timings_ms=timings_ms), "the forward", None, plan)
    assert isinstance(found.attention, TorchAttention)
    assert found.graph_attention == "triton"
    assert ", triton 2.00 ms, sdpa_cudnn 1.50 ms); layers unfused" in found.description
    assert found.in_graphs == ", which attend with triton"
