"""NaN and infinity are found wherever they are, and the outputs that hold them are named."""

from __future__ import annotations

import pytest
import torch

from worldmodel.wan.finite import FiniteCheck


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_anywhere_is_found(dtype: torch.dtype, value: float) -> None:
    rng = torch.Generator().manual_seed(3)
    for _ in range(20):
        latents, pictures = (torch.randn(4, 3, 5, 7, generator=rng).to(dtype) for _ in range(2))
        assert FiniteCheck(latents=latents, pictures=pictures).not_finite() == ()
        pictures.view(-1)[int(torch.randint(pictures.numel(), (1,), generator=rng))] = value
        assert FiniteCheck(latents=latents, pictures=pictures).not_finite() == ("pictures",)
        assert FiniteCheck(latents=pictures, pictures=pictures).not_finite() == ("latents", "pictures")


def test_the_largest_numbers_are_finite_and_an_output_that_was_not_made_is_left_out() -> None:
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    assert FiniteCheck(latents=largest, pictures=None).not_finite() == ()
    assert FiniteCheck(latents=largest * 2, pictures=None).not_finite() == ("latents",)
