from __future__ import annotations

import pytest
import torch

from worldmodel.wan.rope import RopeTable, rotate, split_head


@pytest.mark.parametrize(
    ("head_dim", "pairs"), [(128, (22, 21, 21)), (64, (12, 10, 10)), (32, (6, 5, 5)), (6, (1, 1, 1))]
)
def test_a_head_gives_what_does_not_divide_to_time(head_dim: int, pairs: tuple[int, int, int]) -> None:
    split = split_head(head_dim)
    assert (split.time_pairs, split.row_pairs, split.column_pairs) == pairs


@pytest.mark.parametrize("head_dim", [4, 7])
def test_a_head_that_cannot_be_split_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim.*{head_dim}"):
        split_head(head_dim)


def test_frames_past_the_official_table_are_computed() -> None:
    table = RopeTable(head_dim=32, grid_height=2, grid_width=3)
    late = table.rotations(100_000, 2)
    assert late.shape == (12, 1, 16)
    torch.testing.assert_close(late[6:], table.rotations(100_001, 1), rtol=0, atol=0)
    torch.testing.assert_close(late.abs(), torch.ones(12, 1, 16, dtype=torch.float64))


def test_a_negative_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="first_latent_frame"):
        RopeTable(head_dim=32, grid_height=1, grid_width=1).rotations(-1, 3)


def test_the_first_token_of_the_session_is_not_rotated_and_its_input_is_left_alone() -> None:
    x_NHD = torch.randn(1, 2, 32)
    before = x_NHD.clone()
    table = RopeTable(head_dim=32, grid_height=1, grid_width=1)
    assert torch.equal(rotate(x_NHD, table.rotations(0, 1)), before)
    assert not torch.equal(rotate(x_NHD, table.rotations(1, 1)), before)
    assert torch.equal(x_NHD, before)


def test_rotation_keeps_the_input_dtype() -> None:
    rotations = RopeTable(head_dim=32, grid_height=1, grid_width=1).rotations(5, 1)
    x_NHD = torch.randn(1, 2, 32, dtype=torch.bfloat16)
    assert rotate(x_NHD, rotations).dtype == torch.bfloat16
    assert rotate(x_NHD, rotations.to(torch.complex64)).dtype == torch.bfloat16
