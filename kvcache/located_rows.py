"""Where K/V of a chunk in flight lies, for kernels that find it by numbers instead of taking a view.

Shapes: E entries of a storage with X rows each, P pages of T tokens, F visible pages, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedRows:
    """Where attention that finds K/V by number reads: `num_rows` rows from `first_row` on of entries of a storage.

    `k_EXHD` and `v_EXHD` are the whole storage of each layer. A layer with B streams reads entries `entry * B` up to
    `entry * B + B - 1`. `logit_bias_S` (float32) is added to the logits of the rows, None for none.
    """

    k_EXHD: tuple[Tensor, ...]
    v_EXHD: tuple[Tensor, ...]
    entry: int
    first_row: int
    num_rows: int
    logit_bias_S: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedChunk:
    """Where a chunk in flight reads, and by the number of streams of a layer the rows it writes.

    `rows_to_write` are the `first_rows_F` of `writable_all`: rows of the layer's storage, int64, on its device.
    """

    read: IndexedRows
    rows_to_write: dict[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedRows:
    """The pages that a chunk sees, for attention that reads them where they lie.

    `k_PTHD` and `v_PTHD` are the whole storage of a layer, one latent frame a page. `pages_F` (int64, on its device)
    are the visible ones in storage order.
    """

    k_PTHD: Tensor
    v_PTHD: Tensor
    pages_F: Tensor


@torch.no_grad()
def clear(tensors: Iterable[Tensor]) -> None:
    """Fill tensors of one dtype with zeros, in few launches. Each must be contiguous."""
    found = [tensor.view(torch.uint8) for tensor in tensors]
    if found:
        torch._foreach_zero_(found)


def to_index(pages: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers of rows or pages as int64 on a device."""
    index_F = torch.tensor(pages, dtype=torch.int64)
    if device.type == "cuda":
        # Pinned, so that the copy doesn't make the host wait for the device.
        return index_F.pin_memory().to(device, non_blocking=True)
    return index_F.to(device)
