"""Attention over K/V that is laid out already: no mask, no rotation, no cache. A Protocol and its torch reference.

Shapes: N query tokens, S key tokens, H heads, D head size.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


class Attention(Protocol):
    """Full attention of N queries over S keys, scaled by 1 / sqrt(D)."""

    @property
    def name(self) -> str:
        """Name shown to operators as the attention backend."""
        ...

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        """Return the attended values [N, H, D] in the dtype of `q_NHD`, or in bfloat16 for float8 queries.

        `logit_bias_S` (float32) is added to the scaled logits of each key: log(c) makes one row count as c equal rows.
        Raises ValueError for a bias where the kernel takes none.
        """
        ...


@runtime_checkable
class PagedAttention(Attention, Protocol):
    """Attention that also reads pages where they lie: nothing is gathered for it."""

    def attend_pages(self, q_NHD: Tensor, k_PTHD: Tensor, v_PTHD: Tensor, pages_F: Tensor) -> Tensor:
        """Attend to P pages of T tokens, those of `pages_F` (integers on the device); every page is read whole."""
        ...


class TorchAttention:
    """`scaled_dot_product_attention` of torch, which picks the kernel."""

    name = "torch_sdpa"

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        q_NHD = q_NHD.to(computing_dtype(q_NHD))
        if k_SHD.dtype == torch.float8_e4m3fn:
            k_SHD, v_SHD = k_SHD.to(q_NHD.dtype), v_SHD.to(q_NHD.dtype)
        # The views below move no data: kernels take any stride but that of the last dimension.
        q_BHND, k_BHSD, v_BHSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHD, k_SHD, v_SHD))
        bias_BHNS = None
        if logit_bias_S is not None:
            bias_BHNS = logit_bias_S.to(torch.float32).view(1, 1, 1, -1)
            if q_NHD.dtype != torch.float32:
                # A bias of log(500) rounded to bfloat16 would change a row's weight by about 1 %.
                out_BHND = F.scaled_dot_product_attention(
                    q_BHND.float(), k_BHSD.float(), v_BHSD.float(), attn_mask=bias_BHNS
                )
                return out_BHND.to(q_NHD.dtype).squeeze(0).transpose(0, 1)
        out_BHND = F.scaled_dot_product_attention(q_BHND, k_BHSD, v_BHSD, attn_mask=bias_BHNS)
        return out_BHND.squeeze(0).transpose(0, 1)


def computing_dtype(q_NHD: Tensor) -> torch.dtype:
    """Return the dtype of the result of attention for these queries."""
    return torch.bfloat16 if q_NHD.dtype == torch.float8_e4m3fn else q_NHD.dtype
