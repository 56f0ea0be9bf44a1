"""Shares of a buffer: together they are the whole, and each is no more than it must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.host_weights import copy_plainly
from offload.layout import TensorSpec, flat_layout
from offload.sharded import Sharing, own_share


@settings(max_examples=40, deadline=None)
@given(num_ranks=st.integers(1, 9), num_rows=st.integers(1, 400))
def test_the_shares_of_all_ranks_are_the_part(num_ranks: int, num_rows: int) -> None:
    layout = flat_layout([TensorSpec(name="weight", dtype=torch.float32, shape=(num_rows, 3))])
    tensors = {"weight": torch.randn(num_rows, 3)}
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    shares = [own_share(layout, tensors, Sharing(rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]

    for share in shares:
        copy_plainly(share, flat)

    assert torch.equal(layout.views(flat)["weight"], tensors["weight"])
    assert sum(share.num_bytes for share in shares) == layout.num_bytes
    assert max(share.num_bytes for share in shares) < layout.num_bytes / num_ranks + 256


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank: expected 0 to 1, got {rank}"):
        Sharing(rank=rank, num_ranks=2)
