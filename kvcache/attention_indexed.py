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

from kvcache.attention import Attention
from kvcache.attention_backends import FLASH3_MODULE, HALF, AttentionBackend


class IndexedAttention(Protocol):
    """Full attention of the queries of stream b over the first `num_rows_B[b]` rows of entry `entries_B[b]`."""

    def __call__(
        self, q_BNHD: Tensor, k_EXHD: Tensor, v_EXHD: Tensor, *, entries_B: Tensor, num_rows_B: Tensor
    ) -> Tensor:
        """Return the attended values [B, N, H, D]. The two index tensors are int32 and on the device."""
        ...


class GatheredAttention:
    """The twin in plain torch: copies whole entries and hides the rows past the end. Nothing is read on the host."""

    def __call__(
        self, q_BNHD: Tensor, k_EXHD: Tensor, v_EXHD: Tensor, *, entries_B: Tensor, num_rows_B: Tensor
    ) -> Tensor:
        rows_X = torch.arange(k_EXHD.shape[1], device=k_EXHD.device)
        is_seen_BX = rows_X < num_rows_B[:, None]

        def gather(x_EXHD: Tensor) -> Tensor:
            # What lies past the end may be anything, and 0 times NaN is NaN.
            x_BXHD = x_EXHD.index_select(0, entries_B).masked_fill(~is_seen_BX[:, :, None, None], 0.0)
            return x_BXHD.transpose(1, 2)

        mask_B11X = is_seen_BX[:, None, None, :]
        out_BHND = F.scaled_dot_product_attention(
            q_BNHD.transpose(1, 2), gather(k_EXHD), gather(v_EXHD), attn_mask=mask_B11X
        )
        return out_BHND.transpose(1, 2)


class Flash3Indexed:
    """FlashAttention-3 over a storage where it lies, from the package `fa3-fwd`."""

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = importlib.import_module(FLASH3_MODULE).flash_attn_with_kvcache

    def __call__(
        self, q_BNHD: Tensor, k_EXHD: Tensor, v_EXHD: Tensor, *, entries_B: Tensor, num_rows_B: Tensor
    ) -> Tensor:
        # One split: how many there are would follow from the length of the storage and change the order of sums.
        out = self._forward(q_BNHD, k_EXHD, v_EXHD, cache_seqlens=num_rows_B, cache_batch_idx=entries_B, num_splits=1)
        out_BNHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_BNHD


def why_not_indexed(attention: Attention, dtype: torch.dtype) -> str | None:
    """Return why a chosen attention has no form that reads by index, or None."""
    if not attention.name.startswith(AttentionBackend.FLASH3.value):
        return f"they need the attention 'flash3', chosen is {attention.name!r}"
    if dtype not in HALF:
        return f"they need K/V in {' or '.join(str(each) for each in HALF)}, the model has {dtype}"
    return None
