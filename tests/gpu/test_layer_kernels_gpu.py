"""Fused kernels, attention backends and float8 linears against their plain twins, on random input.

Run with `pytest -m gpu`; without a device these tests fail. With Triton's interpreter (TRITON_INTERPRET=1) the float32
cases run on a CPU, and fail where they round to float8: the interpreter of Triton 3.6 makes 1.0 of 1.97.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from kvcache.attention import TorchAttention
from kvcache.attention_backends import AttentionBackend, AttentionShape, available_backends, choose_attention
from tests.support.layer_ops_cases import (
    Draw,
    OpsCase,
    check_heads,
    check_quantize,
    check_residual_norm,
    check_residual_norm_fp8,
    check_rms_norm,
    dequantized,
    distance,
)
from tests.support.lingbot_golden import tensors
from tests.support.lingbot_network import SESSION, transformer, transformer_config
from worldmodel.kernels.choice import create_ops
from worldmodel.kernels.layer_ops import FP8, LayerOps, quantize_rows, to_fp8
from worldmodel.kernels.linears import Fp8Linear, HighLinear
from worldmodel.kernels.names import LayerOperations
from worldmodel.lingbot.fused_forward import FusedForward

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
BF16_ROUNDING = 3e-3
FLOAT32_ROUNDING = 1e-6

TINY = OpsCase(num_frames=2, tokens_per_frame=3, num_heads=3, head_dim=12, dtype=torch.float32)
CASES = [
    TINY,
    OpsCase(num_frames=3, tokens_per_frame=5, num_heads=5, head_dim=128, dtype=torch.bfloat16),
    OpsCase(num_frames=3, tokens_per_frame=1560, num_heads=40, head_dim=128, dtype=torch.bfloat16),
]
NAMES = ["tiny float32", "small bfloat16", "full size"]


def triton_ops() -> LayerOps:
    if IS_INTERPRETED:
        from worldmodel.kernels.layer_ops_triton import TritonOps

        return TritonOps()
    ops = create_ops(LayerOperations.TRITON, torch.device(DEVICE))
    assert ops is not None
    return ops


def tolerance(case: OpsCase) -> float:
    return FLOAT32_ROUNDING if case.dtype == torch.float32 else BF16_ROUNDING


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_fused_operations_equal_the_plain_ones(case: OpsCase) -> None:
    ops = triton_ops()
    check_residual_norm(ops, Draw(case, DEVICE, 1), tolerance(case))
    check_heads(ops, Draw(case, DEVICE, 2), tolerance(case))
    check_rms_norm(ops, Draw(case, DEVICE, 3), tolerance(case))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_quantised_results_equal_the_plain_ones(case: OpsCase) -> None:
    ops = triton_ops()
    check_residual_norm_fp8(ops, Draw(case, DEVICE, 4))
    check_quantize(ops, Draw(case, DEVICE, 5))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(50, 7), (300, 121), (4680, 512), (1000, 3001)])
def test_attention_backends_equal_the_reference(num_queries: int, num_keys: int) -> None:
    shape = AttentionShape(
        num_queries=num_queries,
        num_keys=num_keys,
        num_heads=3,
        head_dim=128,
        dtype=torch.bfloat16,
        device=torch.device(DEVICE),
    )
    draw = Draw(TINY, DEVICE, num_keys)
    q, k, v = (draw.tensor(n, 3, 128, dtype=torch.bfloat16) for n in (num_queries, num_keys, num_keys))
    bias = draw.tensor(num_keys, spread=2.0)
    expected = {True: TorchAttention()(q.float(), k.float(), v.float(), logit_bias_S=bias)}
    expected[False] = TorchAttention()(q.float(), k.float(), v.float())
    backends = available_backends(shape)
    assert AttentionBackend.TRITON in backends
    for backend in backends:
        attention = choose_attention(backend, shape).attention
        assert distance(attention(q, k, v), expected[False]) < 1e-2, backend
        if backend in (AttentionBackend.TORCH_SDPA, AttentionBackend.TRITON):
            assert distance(attention(q, k, v, logit_bias_S=bias), expected[True]) < 1e-2, backend
        else:
            with pytest.raises(ValueError, match="takes none"):
                attention(q, k, v, logit_bias_S=bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 121, 400])
def test_padding_rows_of_a_text_one_by_one_equal_a_weighted_one(num_rows: int, dtype: torch.dtype) -> None:
    """As FlashAttention-3 reads them, against the reference on the same numbers with one row for all padding."""
    shape = AttentionShape(
        num_queries=4680, num_keys=512, num_heads=3, head_dim=128, dtype=dtype, device=torch.device(DEVICE)
    )
    draw = Draw(TINY, DEVICE, num_rows)
    q, k, v = (to_fp8(draw.tensor(n, 3, 128)).to(dtype) for n in (4680, num_rows + 1, num_rows + 1))
    bias = torch.zeros(num_rows + 1, device=DEVICE)
    bias[-1] = math.log(512 - num_rows)
    expected = TorchAttention()(q.float(), k.float(), v.float(), logit_bias_S=bias)
    k_rows, v_rows = (torch.cat([x.float(), x[-1:].float().expand(511 - num_rows, -1, -1)]).to(dtype) for x in (k, v))
    got = choose_attention(AttentionBackend.FLASH3, shape).attention(q, k_rows, v_rows)
    assert distance(got, expected) < (1e-2 if dtype == torch.bfloat16 else 4e-2)


def test_paged_attention_reads_pages_where_they_lie() -> None:
    from kvcache.attention_triton import TritonPagedAttention

    draw = Draw(TINY, DEVICE, 6)
    k, v = draw.tensor(9, 13, 2, 24), draw.tensor(9, 13, 2, 24)
    q, pages = draw.tensor(30, 2, 24), torch.tensor([7, 0, 3], device=DEVICE)
    expected = TorchAttention()(q, k[pages].flatten(0, 1), v[pages].flatten(0, 1))
    assert distance(TritonPagedAttention().attend_pages(q, k, v, pages), expected) < 1e-5


@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(4680, 5120, 13824), (33, 256, 64)])
def test_float8_linears_equal_their_plain_form(num_tokens: int, inputs: int, outputs: int) -> None:
    draw = Draw(TINY, DEVICE, 7)
    weight = draw.tensor(outputs, inputs, spread=inputs**-0.5, dtype=torch.bfloat16)
    bias = draw.tensor(outputs, dtype=torch.bfloat16)
    linear = Fp8Linear(weight, bias, torch.bfloat16)
    x = draw.tensor(num_tokens, inputs)
    quantized = quantize_rows(x)
    assert distance(linear(quantized), linear.plain(quantized)) < 5e-3
    exact = torch.nn.functional.linear(dequantized(quantized), weight.float(), bias.float())
    assert 0.005 < distance(linear(quantized), exact) < 0.04


def test_the_gelu_of_a_product_is_the_tanh_form() -> None:
    draw = Draw(TINY, DEVICE, 8)
    linear = HighLinear(draw.tensor(512, 256, spread=0.1, dtype=torch.bfloat16), draw.tensor(512, dtype=torch.bfloat16))
    x = draw.tensor(300, 256, dtype=torch.bfloat16)
    expected = torch.nn.functional.gelu(linear(x).float(), approximate="tanh")
    assert distance(linear.gelu(x), expected) < BF16_ROUNDING


@pytest.mark.parametrize(("precision", "largest"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_fused_layers_follow_the_transformer_as_written(precision: str, largest: float) -> None:
    """Four chunks, past the slid window, on the golden weights."""
    from kvcache.cache import KVCache
    from worldmodel.lingbot.transformer import kv_geometry

    golden = {name: tensor.to(DEVICE) for name, tensor in tensors("case1_forward").items()}
    frames, height, width = golden["x_t"].shape[1:]
    noise = Draw(TINY, DEVICE, 9)
    clean = [noise.tensor(*golden["x_t"].shape) for _ in range(4)]
    flows: dict[bool, list[torch.Tensor]] = {}
    for is_fused in (False, True):
        config = transformer_config(
            sink_latent_frames=1, visible_latent_frames=2 * frames, latent_frames_per_chunk=frames
        )
        model = transformer(config, precision).to(DEVICE)
        forward = FusedForward(model, triton_ops()) if is_fused else model
        spec = kv_geometry(model.config, model.plan, latent_height=height, latent_width=width)
        cache = KVCache(spec, capacity=1, device=DEVICE, dtype=model.plan.linear)
        cache.open(SESSION)
        flows[is_fused] = []
        with torch.inference_mode():
            noisy_time, clean_time = model.time_constants(500.0), model.time_constants(0.0)
            for index, latents in enumerate(clean):
                with cache.lease(SESSION) as lease:
                    chunk = lease.begin_chunk()
                    if index == 0:
                        model.publish_text(golden["context"], chunk)
                    rays = model.project_rays(golden["camera"][0])
                    inputs = model.chunk_inputs(golden["condition"], rays, index * frames)
                    flows[is_fused].append(forward.flow(latents, noisy_time, inputs, chunk))
                    forward.store_clean(latents, clean_time, inputs, chunk)
                    chunk.commit()
    for got, expected in zip(flows[True], flows[False], strict=True):
        assert distance(got, expected) < largest
