"""NaN and infinity are found wherever they are, and the outputs that hold them are named."""

from __future__ import annotations

import pytest
import torch

from worldmodel.wan.finite import FiniteCheck

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_anywhere_is_found(dtype: torch.dtype, value: float) -> None:
    rng = torch.Generator().manual_seed(3)
    for _ in range(20):
        latents, pictures = (torch.randn(4, 3, 5, 7, generator=rng).to(dtype) for _ in range(2))
        assert FiniteCheck({"latents": latents, "pictures": pictures}, vae=BF16).not_finite() == ()
        pictures.view(-1)[int(torch.randint(pictures.numel(), (1,), generator=rng))] = value
        assert FiniteCheck({"latents": latents, "pictures": pictures}, vae=BF16).not_finite() == ("pictures",)
        both = FiniteCheck({"latents": pictures, "pictures": pictures}, vae=BF16)
        assert both.not_finite() == ("latents", "pictures")


def test_the_largest_numbers_are_finite_and_an_output_that_was_not_made_is_left_out() -> None:
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    assert FiniteCheck({"latents": largest, "pictures": None}, vae=BF16).not_finite() == ()
    assert FiniteCheck({"latents": largest * 2, "pictures": None}, vae=BF16).not_finite() == ("latents",)


def test_an_overflow_of_a_float16_vae_says_its_format_and_the_setting_that_helps() -> None:
    """Only where the VAE's output is the first that is not finite: what follows from others is not its fault."""
    good, bad = torch.zeros(3), torch.full((3,), torch.inf)
    hint = " (of a VAE in float16, which ends at 65504: set the option vae_precision to bfloat16)"

    def found(dtype: torch.dtype, **outputs: torch.Tensor) -> tuple[str, ...]:
        return FiniteCheck(dict(outputs), vae=dtype).not_finite()

    assert found(torch.float16, condition=bad, latents=bad) == (f"condition{hint}", "latents")
    assert found(torch.float16, condition=good, latents=good, pictures=bad) == (f"pictures{hint}",)
    assert found(torch.float16, condition=good, latents=bad, pictures=bad) == ("latents", "pictures")
    assert found(BF16, condition=good, latents=good, pictures=bad) == ("pictures",)
