"""The torch reference against float64 softmax attention."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.attention import PagedAttention, TorchAttention
from kvcache.cache import KVCache
from kvcache.spec import Storage
from tests.support.kv_concat_cache import naive_attention
from tests.support.kv_geometry import GOLDEN_GEOMETRIES, generator, tiny_spec, write_all

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


class GatheredPages(TorchAttention):
    """The twin of a kernel that reads pages where they lie: it gathers them. Rows in sequence are refused."""

    name = "gathered_pages"

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("history was gathered for a kernel that reads pages")

    def attend_pages(
        self, q_NHD: torch.Tensor, k_PTHD: torch.Tensor, v_PTHD: torch.Tensor, pages_F: torch.Tensor
    ) -> torch.Tensor:
        self.num_calls += 1
        k_SHD, v_SHD = (x_PTHD[pages_F].flatten(0, 1) for x_PTHD in (k_PTHD, v_PTHD))
        return ATTENTION(q_NHD, k_SHD, v_SHD)


BOUNDED = ("nominal", "w8_s2", "w9_s0")


@pytest.mark.parametrize(
    ("geometry", "storage"), [("global_", Storage.PAGES), *((name, each) for name in BOUNDED for each in Storage)]
)
@pytest.mark.parametrize("num_branches", [1, 2])
def test_pages_are_read_where_they_lie_in_either_storage(geometry: str, storage: Storage, num_branches: int) -> None:
    """Two sessions in turns over empty, partial, full and slid windows, against the view or copy that others read."""
    sink, window, _ = GOLDEN_GEOMETRIES[geometry]
    spec = tiny_spec(sink=sink, window=window, storage=storage, num_branches=num_branches, tokens=3)
    paged = GatheredPages()
    assert isinstance(paged, PagedAttention)
    cache = KVCache(spec, capacity=2, device="cpu", dtype=torch.float32, attention=paged)
    rng = generator(7)
    for name in ("a", "b"):
        cache.open(name)
    for name in "aababbabab":
        with cache.lease(name) as lease:
            chunk = lease.begin_chunk()
            write_all(chunk, spec, rng)
            for layer in range(spec.num_layers):
                for branch in range(num_branches):
                    q_NHD = torch.randn(5, spec.num_kv_heads, spec.head_dim, generator=rng)
                    want = ATTENTION(q_NHD, *chunk.visible(layer, branch=branch))
                    torch.testing.assert_close(chunk.attend(layer, q_NHD, branch=branch), want, atol=1e-6, rtol=0)
            chunk.commit()
    assert paged.num_calls == 10 * spec.num_layers * num_branches


def test_registers_of_extents_lie_in_no_page() -> None:
    spec = tiny_spec(registers=2)
    cache = KVCache(spec, capacity=1, device="cpu", dtype=torch.float32, attention=GatheredPages())
    cache.open("a")
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk()
        write_all(chunk, spec, generator(8))
        with pytest.raises(ValueError, match="2 register rows begin every extent, expected none"):
            chunk.attend(0, torch.zeros(1, spec.num_kv_heads, spec.head_dim))
        chunk.rollback()
