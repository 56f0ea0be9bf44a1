"""What a worker on a CPU computes with, what it says about it, and wishes that can't be met."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from kvcache.attention import TorchAttention
from kvcache.spec import KVSpec
from tests.support.lingbot_network import transformer, transformer_config
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.acceleration import accelerate, merges_padding, warm_up_text
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.transformer import LingBotTransformer, kv_geometry
from worldmodel.wan.acceleration import Acceleration


def build(precision: str = "fp32", **options: str) -> tuple[Acceleration[Forward], LingBotTransformer]:
    model = transformer(transformer_config(visible_latent_frames=6), precision)
    spec: KVSpec = kv_geometry(model.config, model.plan, latent_height=4, latent_width=6)
    parsed = LingBotOptions.from_json(json.dumps(options).encode())
    return accelerate(model, parsed, spec), model


def test_a_cpu_takes_torch_and_the_layers_as_written() -> None:
    found, model = build()
    assert found.forward is model
    assert isinstance(found.attention, TorchAttention)
    assert found.description == "torch_sdpa; layers unfused"


def test_the_plain_fused_order_can_be_chosen() -> None:
    found, _ = build(layer_operations="plain")
    assert isinstance(found.forward, FusedForward)
    assert found.description == "torch_sdpa; layers plain"


@pytest.mark.parametrize("precision", ["fp8", "fp8_kv"])
def test_float8_is_said_and_runs_fused_only(precision: str) -> None:
    found, _ = build(precision)
    assert isinstance(found.forward, FusedForward)
    assert found.description == "torch_sdpa; layers plain with float8 linears"
    with pytest.raises(LoadFailed, match=rf"the precision '{precision}' has no unfused form") as failed:
        build(precision, layer_operations="unfused")
    assert failed.value.field == "layer_operations"


@pytest.mark.parametrize("backend", ["flash3", "sdpa_flash", "sdpa_cudnn", "triton", "triton_paged"])
def test_a_backend_that_needs_a_gpu_stops_the_start(backend: str) -> None:
    with pytest.raises(LoadFailed, match=rf"attention '{backend}' can't be used: it needs a CUDA device") as failed:
        build(attention=backend)
    assert failed.value.field == "attention"


def test_triton_operations_stop_the_start_on_a_cpu() -> None:
    with pytest.raises(LoadFailed, match=r"layer operations 'triton' can't be used") as failed:
        build(layer_operations="triton")
    assert failed.value.field == "layer_operations"


def test_the_official_plan_runs_as_written_and_refuses_anything_else() -> None:
    found, model = build("official")
    assert found.forward is model
    with pytest.raises(LoadFailed, match=r"don't round as the precision 'official' says"):
        build("official", layer_operations="plain")


@pytest.mark.parametrize(
    ("attention", "device", "is_merged"),
    [
        ("flash3", "cuda", False),
        ("torch_sdpa", "cuda", False),
        ("triton", "cuda", True),
        ("triton_paged", "cuda", True),
        ("torch_sdpa", "cpu", True),
    ],
)
def test_padding_rows_of_a_text_are_merged_where_a_bias_costs_little(
    attention: str, device: str, is_merged: bool
) -> None:
    assert merges_padding(LingBotOptions(), attention, torch.device(device)) == is_merged
    assert not merges_padding(LingBotOptions(pad_text_exact=True), attention, torch.device(device))


@pytest.mark.parametrize("precision", ["bf16", "fp8_kv"])
def test_the_warm_up_meets_every_form_of_a_text(precision: str) -> None:
    """Kernels are compiled by dtype, by size class, and with or without a bias."""
    met: list[tuple[int, bool]] = []

    class Counting(TorchAttention):
        def __call__(
            self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None
        ) -> Tensor:
            met.append((k_SHD.shape[0], logit_bias_S is not None))
            assert q_NHD.dtype == k_SHD.dtype == model.plan.kv
            return super().__call__(q_NHD, k_SHD, v_SHD, logit_bias_S=logit_bias_S)

    model = transformer(transformer_config(visible_latent_frames=6), precision)
    rows = model.config.text_rows
    warm_up_text(model, Counting(), merges_padding=True)
    assert met == [(2, False), (2, True), (rows, False), (rows, True)]
    met.clear()
    warm_up_text(model, Counting(), merges_padding=False)
    assert met == [(rows, False)]
