from __future__ import annotations

import pytest
import torch

from worldmodel.wan.flow_scheduler import add_noise, clean_from_flow, nominal_table, official_table


def test_flow_and_noise_undo_each_other() -> None:
    x0, noise = torch.randn(4, 5), torch.randn(4, 5)
    noisy = add_noise(x0, noise, 0.625)
    torch.testing.assert_close(clean_from_flow(noisy, noise - x0, 0.625), x0)


def test_pure_noise_forgets_the_latents() -> None:
    noise = torch.randn(3)
    assert torch.equal(add_noise(torch.randn(3), noise, 1.0), noise)


def test_clean_latents_keep_the_dtype_of_the_noisy_ones() -> None:
    assert clean_from_flow(torch.zeros(2), torch.zeros(2, dtype=torch.float64), 0.5).dtype == torch.float32


def test_official_timesteps_are_integers_below_the_nominal_ones() -> None:
    for official, nominal in zip(official_table(5.0), nominal_table(5.0), strict=True):
        assert official.timestep == int(official.timestep)
        assert 0 < nominal.timestep - official.timestep <= 1


@pytest.mark.parametrize("build", [nominal_table, official_table])
@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan")])
def test_a_shift_that_is_not_positive_is_refused(build: object, shift: float) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match="flow shift"):
        build(shift)
