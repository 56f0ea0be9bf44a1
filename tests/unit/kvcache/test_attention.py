"""The torch reference against float64 softmax attention."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.attention import TorchAttention
from tests.support.kv_concat_cache import naive_attention
from tests.support.kv_geometry import generator

ATTENTION = TorchAttention()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_equals_softmax_attention(dtype: torch.dtype, tolerance: float) -> None:
    rng = generator(1)
    q, k, v = (torch.randn(n, 3, 8, generator=rng).to(dtype) for n in (5, 11, 11))
    out = ATTENTION(q, k, v)
    assert out.shape == (5, 3, 8)
    assert out.dtype == dtype
    torch.testing.assert_close(out, naive_attention(q, k, v), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_is_not_rounded_to_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    # One row that counts 510 times against six that count 85 times each: half of the weight, whatever the queries. In
    # bfloat16 log(510) would be off by 0.016 and the result by 0.003.
    q, k, v = (torch.zeros(n, 2, 8, dtype=dtype) for n in (4, 7, 7))
    v[-1] = 1
    out = ATTENTION(q, k, v, logit_bias_S=torch.tensor([85.0] * 6 + [510.0]).log())
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.full_like(out, 0.5), atol=1e-3, rtol=0)


def test_a_row_with_a_log_bias_counts_as_that_many_rows() -> None:
    rng = generator(2)
    q, k, v = (torch.randn(n, 2, 8, generator=rng) for n in (4, 7, 7))
    repeats = 505
    k_long, v_long = (torch.cat((x, x[-1:].expand(repeats - 1, -1, -1))) for x in (k, v))
    bias = torch.zeros(7)
    bias[-1] = math.log(repeats)
    out = ATTENTION(q, k, v, logit_bias_S=bias)
    torch.testing.assert_close(out, naive_attention(q, k_long, v_long), atol=1e-6, rtol=0)


def test_accepts_views_of_larger_storage() -> None:
    rng = generator(3)
    storage = torch.randn(2, 20, 3, 8, generator=rng)
    q = torch.randn(5, 3, 8, generator=rng)
    out = ATTENTION(q, storage[1, 4:17], storage[0, 4:17])
    torch.testing.assert_close(out, naive_attention(q, storage[1, 4:17], storage[0, 4:17]), atol=1e-6, rtol=0)
