"""VAE configs: what is read and what is refused, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from worldmodel.wan.vae_config import parse_vae_config

GOOD: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 96,
    "z_dim": 2,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "latents_mean": [0.0, 1.0],
    "latents_std": [1.0, 2.0],
    "is_residual": False,
    "patch_size": None,
}


def test_reads_the_published_geometry() -> None:
    config = parse_vae_config(GOOD)
    assert (config.spatial_factor, config.temporal_factor) == (8, 4)
    assert config.decoder_base_dim == 96
    assert config.latents_std == (1.0, 2.0)


def test_the_decoder_may_have_its_own_width() -> None:
    assert parse_vae_config(GOOD | {"decoder_base_dim": 128}).decoder_base_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_residual": True}, "is_residual must be false, got true"),
        ({"attn_scales": [0.5]}, r"attn_scales must be \[\], got \[0\.5\]"),
        ({"patch_size": 2}, "patch_size must be null, got 2"),
        ({"in_channels": 12}, "in_channels must be 3, got 12"),
        ({"new_switch": 1, "another": 2}, "unknown settings another, new_switch"),
        ({"base_dim": "96"}, "base_dim must be an integer from 1 to 4096, got '96'"),
        ({"base_dim": True}, "base_dim must be an integer from 1 to 4096, got true"),
        ({"decoder_base_dim": 2**62}, "decoder_base_dim must be an integer from 1 to 4096"),
        ({"num_res_blocks": 0}, "num_res_blocks must be an integer from 1 to 64, got 0"),
        ({"num_res_blocks": 10**8}, "num_res_blocks must be an integer from 1 to 64, got 100000000"),
        ({"dim_mult": [1, 2, 4, 4.5]}, r"dim_mult must be an integer from 1 to 64, got 4\.5"),
        ({"dim_mult": [1] * 9}, "dim_mult must be a non-empty list of at most 8, got a list of 9"),
        ({"temperal_downsample": [0, 1, 1]}, "temperal_downsample must hold true and false, got 0"),
        ({"z_dim": 10**400}, "z_dim must be an integer from 1 to 1024, got a huge integer"),
        ({"latents_mean": [0.0, math.inf]}, "latents_mean must be a finite number from -1e[+]06 to 1e[+]06, got inf"),
        ({"latents_std": [1.0, math.nan]}, "latents_std must be a finite number from 1e-06 to 1e[+]06, got nan"),
        ({"latents_std": [1.0, 10**400]}, "latents_std must be a finite number .*, got a huge integer"),
        ({"dim_mult": []}, "dim_mult must be a non-empty list"),
        ({"dim_mult": ["1"]}, "dim_mult must be an integer from 1 to 64, got '1'"),
        ({"temperal_downsample": [True]}, r"temperal_downsample has 1 entries, expected 3 \(one less than dim_mult\)"),
        ({"latents_mean": [0.0]}, "latents_mean has 1 entries, expected z_dim = 2"),
        ({"latents_std": [1.0, 0.0]}, "latents_std must be a finite number"),
    ],
)
def test_refusals_name_the_setting(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_vae_config(GOOD | changes)


def test_missing_settings_are_named_together() -> None:
    config = {key: value for key, value in GOOD.items() if key not in ("z_dim", "latents_mean")}
    with pytest.raises(ValueError, match="missing z_dim, latents_mean"):
        parse_vae_config(config)
