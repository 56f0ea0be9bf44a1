"""The fused forward against the transformer as written, over chunks past the slid window, on the golden weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvcache.cache import KVCache
from tests.support.layer_ops_cases import distance
from tests.support.lingbot_golden import tensors
from tests.support.lingbot_network import SESSION, transformer, transformer_config
from worldmodel.kernels.layer_ops import PlainOps
from worldmodel.lingbot.fused_forward import FusedForward, balance_values
from worldmodel.lingbot.transformer import LingBotTransformer, kv_geometry

NUM_CHUNKS = 4


def golden_model(precision: str) -> LingBotTransformer:
    frames = tensors("case1_forward")["x_t"].shape[1]
    return transformer(
        transformer_config(sink_latent_frames=1, visible_latent_frames=2 * frames, latent_frames_per_chunk=frames),
        precision,
    )


def rollout(precision: str, *, is_fused: bool) -> list[torch.Tensor]:
    """Return the flow of each chunk; its history is that of the same noise, stored as clean latents."""
    golden = tensors("case1_forward")
    model = golden_model(precision)
    frames, height, width = golden["x_t"].shape[1:]
    forward = FusedForward(model, PlainOps(), quantize=model.plan.quantizes_linears) if is_fused else model
    spec = kv_geometry(model.config, model.plan, latent_height=height, latent_width=width)
    cache = KVCache(spec, capacity=1, device="cpu", dtype=model.plan.kv)
    cache.open(SESSION)
    generator = torch.Generator().manual_seed(3)
    flows = []
    with torch.inference_mode():
        noisy_time, clean_time = model.time_constants(500.0), model.time_constants(0.0)
        for index in range(NUM_CHUNKS):
            latents = torch.randn(golden["x_t"].shape, generator=generator)
            with cache.lease(SESSION) as lease:
                chunk = lease.begin_chunk()
                if index == 0:
                    model.publish_text(golden["context"], chunk)
                rays = model.project_rays(golden["camera"][0])
                inputs = model.chunk_inputs(golden["condition"], rays, index * frames)
                flows.append(forward.flow(latents, noisy_time, inputs, chunk))
                forward.store_clean(latents, clean_time, inputs, chunk)
                chunk.commit()
    return flows


@pytest.fixture(scope="module")
def exact() -> list[torch.Tensor]:
    return rollout("fp32", is_fused=False)


def largest_distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(distance(a, b) for a, b in zip(got, expected, strict=True))


def test_in_float32_it_is_the_transformer_up_to_rounding(exact: list[torch.Tensor]) -> None:
    assert largest_distance(rollout("fp32", is_fused=True), exact) < 1e-6


def test_in_bfloat16_it_is_no_further_from_float32_than_the_transformer_as_written(exact: list[torch.Tensor]) -> None:
    as_written = largest_distance(rollout("bf16", is_fused=False), exact)
    assert largest_distance(rollout("bf16", is_fused=True), exact) < 1.1 * as_written


@pytest.mark.parametrize(("precision", "largest"), [("fp8", 0.03), ("fp8_kv", 0.06)])
def test_float8_stays_near_float32(exact: list[torch.Tensor], precision: str, largest: float) -> None:
    distances = largest_distance(rollout(precision, is_fused=True), exact)
    assert 0.005 < distances < largest


def test_float8_gives_up_the_weights_it_replaces() -> None:
    model = golden_model("fp8")
    FusedForward(model, PlainOps(), quantize=True)
    layer = model.layers[0]
    replaced = (layer.self_attn.q, layer.self_attn.o, layer.cross_attn.q, layer.ffn[0], layer.ffn[2])
    assert [linear.weight.numel() for linear in replaced if isinstance(linear, nn.Linear)] == [0] * len(replaced)
    assert layer.cross_attn.k.weight.numel() > 0


def test_a_plan_that_rounds_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the precision plan 'official' rounds where fused operations don't"):
        FusedForward(golden_model("official"), PlainOps())


def test_balanced_values_have_a_size_near_one_and_the_output_undoes_it() -> None:
    torch.manual_seed(1)
    value, output = nn.Linear(32, 16), nn.Linear(16, 32)
    value.weight.data *= torch.logspace(-4, 4, 16)[:, None]
    value.bias.data.zero_()
    x = torch.randn(200, 32)
    before = output(value(x))
    balance_values(value, output, num_heads=4)
    assert torch.equal(output(value(x)), before)
    sizes = value(x).unflatten(-1, (4, -1)).square().mean((0, 2)).sqrt()
    assert ((sizes > 0.5) & (sizes < 2.0)).all()
