"""Attention in Triton: rows in place, in pages or found by number, with a float32 bias per key. Imported only where
Triton is.

For what the library kernels can't do: a logit bias that bfloat16 would round, and history in pages of any size without
a gathered copy. Softmax statistics and accumulators are float32. Rows past the end are never read.

Shapes: B streams, N query tokens, S key tokens, H heads, D head size, P pages of T tokens, F visible pages, E entries
of a storage with X rows each.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcache.attention import computing_dtype

LOG2_E = 1.4426950408889634


# A prompt of another length must not compile the kernel anew in the middle of a session.
@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bias_ptr,
    pages_ptr,
    entries_ptr,
    lengths_ptr,
    num_queries,
    num_keys,
    page_tokens,
    q_stride_n,
    q_stride_h,
    k_stride_s,
    k_stride_h,
    v_stride_s,
    v_stride_h,
    out_stride_n,
    out_stride_h,
    q_stride_b,
    k_stride_e,
    v_stride_e,
    out_stride_b,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_S: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_INDEXED: tl.constexpr,
):
    head = tl.program_id(1)
    if IS_INDEXED:
        stream = tl.program_id(2)
        entry = tl.load(entries_ptr + stream).to(tl.int64)
        num_keys = tl.load(lengths_ptr + stream)
        q_ptr += stream.to(tl.int64) * q_stride_b
        out_ptr += stream.to(tl.int64) * out_stride_b
        k_ptr += entry * k_stride_e
        v_ptr += entry * v_stride_e
    rows_n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    q_offsets = rows_n.to(tl.int64)[:, None] * q_stride_n + head * q_stride_h + dims[None, :]
    q_mask = (rows_n[:, None] < num_queries) & is_dim[None, :]
    # float8 is widened to the type of the result: exact, and tensor cores take both alike.
    computing = out_ptr.dtype.element_ty
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0).to(computing)
    largest = tl.full([TILE_N], float("-inf"), tl.float32)
    total = tl.zeros([TILE_N], tl.float32)
    mixed = tl.zeros([TILE_N, PADDED_DIM], tl.float32)
    for start in range(0, num_keys, TILE_S):
        keys = start + tl.arange(0, TILE_S)
        is_key = keys < num_keys
        if IS_PAGED:
            page = tl.load(pages_ptr + keys // page_tokens, mask=is_key, other=0)
            rows_s = page.to(tl.int64) * page_tokens + keys % page_tokens
        else:
            rows_s = keys.to(tl.int64)
        k_offsets = rows_s[None, :] * k_stride_s + head * k_stride_h + dims[:, None]
        k = tl.load(k_ptr + k_offsets, mask=is_key[None, :] & is_dim[:, None], other=0.0).to(computing)
        logits = tl.dot(q, k, input_precision="ieee") * scale_log2
        if HAS_BIAS:
            logits += tl.load(bias_ptr + keys, mask=is_key, other=0.0)[None, :] * 1.4426950408889634
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp2(logits - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 1)
        v_offsets = rows_s[:, None] * v_stride_s + head * v_stride_h + dims[None, :]
        v = tl.load(v_ptr + v_offsets, mask=is_key[:, None] & is_dim[None, :], other=0.0).to(computing)
        mixed = mixed * correction[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    out_offsets = rows_n.to(tl.int64)[:, None] * out_stride_n + head * out_stride_h + dims[None, :]
    tl.store(out_ptr + out_offsets, out, mask=q_mask)


class TritonAttention:
    """Attention of any head size and any strides but that of the last dimension."""

    name = "triton"

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        return _launch(q_NHD, k_SHD, v_SHD, num_keys=k_SHD.shape[0], logit_bias_S=logit_bias_S)


class TritonPagedAttention(TritonAttention):
    """The same, with history read in pages of one latent frame where they lie."""

    name = "triton_paged"

    def attend_pages(self, q_NHD: Tensor, k_PTHD: Tensor, v_PTHD: Tensor, pages_F: Tensor) -> Tensor:
        """Attend to the pages of `pages_F`; see `PagedAttention`."""
        num_pages, page_tokens = pages_F.shape[0], k_PTHD.shape[1]
        return _launch(
            q_NHD,
            k_PTHD.flatten(0, 1),
            v_PTHD.flatten(0, 1),
            num_keys=num_pages * page_tokens,
            pages_F=pages_F,
            page_tokens=page_tokens,
        )


class TritonIndexed:
    """The same over entries of a storage, which and how many rows of each being read from device memory."""

    def __call__(
        self,
        q_BNHD: Tensor,
        k_EXHD: Tensor,
        v_EXHD: Tensor,
        *,
        entries_B: Tensor,
        num_rows_B: Tensor,
        logit_bias_X: Tensor | None = None,
    ) -> Tensor:
        return _launch(
            q_BNHD,
            k_EXHD,
            v_EXHD,
            num_keys=k_EXHD.shape[1],
            logit_bias_S=logit_bias_X,
            index=(entries_B, num_rows_B),
        )


def _launch(
    q_bNHD: Tensor,
    k_eSHD: Tensor,
    v_eSHD: Tensor,
    *,
    num_keys: int,
    logit_bias_S: Tensor | None = None,
    pages_F: Tensor | None = None,
    page_tokens: int = 1,
    index: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Launch the kernel. Only with `index` (entries and lengths of each stream) do q, k and v have a first dimension.

    `num_keys` is then how many there may be at most.
    """
    *_, num_queries, num_heads, head_dim = q_bNHD.shape
    for name, tensor in (("q", q_bNHD), ("k", k_eSHD), ("v", v_eSHD)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}")
    if logit_bias_S is not None:
        logit_bias_S = logit_bias_S.to(torch.float32).contiguous()
    out_bNHD = torch.empty(q_bNHD.shape, dtype=computing_dtype(q_bNHD), device=q_bNHD.device)
    tile_n, tile_s, num_warps = _tiles(q_bNHD, k_eSHD, num_keys)
    num_streams = 1 if index is None else q_bNHD.shape[0]
    entries_B, num_rows_B = (None, None) if index is None else index
    _attention_kernel[(triton.cdiv(num_queries, tile_n), num_heads, num_streams)](
        q_bNHD,
        k_eSHD,
        v_eSHD,
        out_bNHD,
        logit_bias_S,
        pages_F,
        entries_B,
        num_rows_B,
        num_queries,
        num_keys,
        page_tokens,
        q_bNHD.stride(-3),
        q_bNHD.stride(-2),
        k_eSHD.stride(-3),
        k_eSHD.stride(-2),
        v_eSHD.stride(-3),
        v_eSHD.stride(-2),
        out_bNHD.stride(-3),
        out_bNHD.stride(-2),
        *(0 if index is None else tensor.stride(0) for tensor in (q_bNHD, k_eSHD, v_eSHD, out_bNHD)),
        LOG2_E / math.sqrt(head_dim),
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE_N=tile_n,
        TILE_S=tile_s,
        HAS_BIAS=logit_bias_S is not None,
        IS_PAGED=pages_F is not None,
        IS_INDEXED=index is not None,
        num_warps=num_warps,
        num_stages=2 if num_keys <= 2 * tile_s else 3,
    )
    return out_bNHD


def _tiles(q_NHD: Tensor, k_SHD: Tensor, num_keys: int) -> tuple[int, int, int]:
    """Return query rows and keys of a tile, and warps. float32 takes smaller tiles, to fit in shared memory."""
    if q_NHD.element_size() > 2:
        return 32, 32, 4
    # Measured on an H200 with 4680 queries and 40 heads of 128, 2026-11-30: 121, 391 and 512 keys in 0.10, 0.16 and
    # 0.16 ms; (128, 128, 8) takes 0.24 ms for 391, (128, 32, 4) takes longer for few and for very many.
    if 128 < num_keys <= 1024:
        # float8 keys are widened in registers, which pays in larger tiles.
        return (128, 64, 4) if k_SHD.element_size() == 1 else (128, 32, 4)
    return (128, 128, 8)
