"""Attention that finds K/V by numbers in device memory: which entries of a storage, and how many rows of each.

What a captured graph needs: it replays with other sessions and other lengths, since neither is part of the launch.

Shapes: B streams, N query tokens, E entries of a storage with X rows each, H heads, D head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.attention import computing_dtype
from kvcache.attention_backends import FLASH3_MODULE, FP8, HALF, AttentionBackend, ChosenAttention

INDEXED = (AttentionBackend.FLASH3.value, AttentionBackend.TRITON.value)
"""The backends that have a form which reads by index."""


class IndexedAttention(Protocol):
    """Full attention of the queries of stream b over the first `num_rows_B[b]` rows of entry `entries_B[b]`."""

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
        """Return the attended values [B, N, H, D]. The two index tensors are int32 and on the device.

        `logit_bias_X` (float32) is added to the scaled logits of each row of every entry.
        """
        ...


class GatheredAttention:
    """The twin in plain torch: copies whole entries and hides the rows past the end. Nothing is read on the host."""

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
        dtype = computing_dtype(q_BNHD)
        # A bias is added in float32: log(500) rounded to bfloat16 would change a row's weight by about 1 %.
        inner = dtype if logit_bias_X is None else torch.float32
        rows_X = torch.arange(k_EXHD.shape[1], device=k_EXHD.device)
        is_seen_BX = rows_X < num_rows_B[:, None]

        def gather(x_EXHD: Tensor) -> Tensor:
            # As bytes: torch has few operations on float8.
            x_BXHD = x_EXHD.view(torch.uint8).index_select(0, entries_B).view(x_EXHD.dtype).to(inner)
            # What lies past the end may be anything, and 0 times NaN is NaN.
            return x_BXHD.masked_fill(~is_seen_BX[:, :, None, None], 0.0).transpose(1, 2)

        bias_X = torch.zeros_like(rows_X, dtype=inner) if logit_bias_X is None else logit_bias_X
        mask_BX = torch.where(is_seen_BX, bias_X, -torch.inf)
        out_BHND = F.scaled_dot_product_attention(
            q_BNHD.to(inner).transpose(1, 2), gather(k_EXHD), gather(v_EXHD), attn_mask=mask_BX[:, None, None, :]
        )
        return out_BHND.to(dtype).transpose(1, 2)


class Flash3Indexed:
    """FlashAttention-3 over a storage where it lies, from the package `fa3-fwd`.

    Rows past the end are multiplied by 0 as far as the last tile reaches, so they must be finite.
    """

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = importlib.import_module(FLASH3_MODULE).flash_attn_with_kvcache

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
        if logit_bias_X is not None:
            raise ValueError("logit_bias_X: FlashAttention-3 takes none")
        # One split: how many there are would follow from the length of the storage and change the order of sums.
        out = self._forward(q_BNHD, k_EXHD, v_EXHD, cache_seqlens=num_rows_B, cache_batch_idx=entries_B, num_splits=1)
        out_BNHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_BNHD


def indexed_name(chosen: ChosenAttention) -> str:
    """Return the name of the attention that reads by index where another one was chosen.

    The chosen one itself, if it has such a form or nothing was timed beside it; else the fastest timed one that has.
    """
    name = chosen.attention.name
    timed = [(ms, backend) for backend, ms in chosen.timings_ms if backend in INDEXED]
    return name if why_not_indexed(name, torch.bfloat16) is None or not timed else min(timed)[1]


def indexed_attention(name: str) -> IndexedAttention:
    """Return the form of a named attention that reads by index; `why_not_indexed` says which have one."""
    if name == AttentionBackend.FLASH3.value:
        return Flash3Indexed()
    attention: IndexedAttention = importlib.import_module("kvcache.attention_triton").TritonIndexed()
    return attention


def why_not_indexed(name: str, dtype: torch.dtype) -> str | None:
    """Return why a named attention has no form that reads K/V of a dtype by index, or None."""
    if name == AttentionBackend.TRITON.value:
        return None
    if name != AttentionBackend.FLASH3.value:
        return f"they need the attention 'flash3' or 'triton', chosen is {name!r}"
    if dtype not in (*HALF, FP8):
        return f"they need K/V in {' or '.join(str(each) for each in (*HALF, FP8))}, the model has {dtype}"
    return None
