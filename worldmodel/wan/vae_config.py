"""The geometry of a Wan VAE, read from a diffusers `AutoencoderKLWan` config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from worldmodel.checkpoint.config_values import fixed, integer, number
from worldmodel.json_checks import describe

_REQUIRED = (
    "base_dim",
    "z_dim",
    "dim_mult",
    "num_res_blocks",
    "temperal_downsample",
    "latents_mean",
    "latents_std",
)

# Settings of the Wan 2.2 VAE and others that this module doesn't implement, with the only value it accepts.
_FIXED: dict[str, object] = {
    "attn_scales": [],
    "is_residual": False,
    "patch_size": None,
    "in_channels": 3,
    "out_channels": 3,
    "clip_output": True,
}

# Known settings without effect on a forward pass.
_IGNORED = ("dropout", "scale_factor_spatial", "scale_factor_temporal")

_MAX_WIDTH = 4096
_MAX_LATENT_CHANNELS = 1024
_MAX_FACTOR = 64
_MAX_STAGES = 8
_MAX_UNITS = 64
_MAX_STATISTIC = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class VAEConfig:
    """Sizes of the two networks and the statistics that normalise latents. Field names are the checkpoint's."""

    base_dim: int
    decoder_base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"VAE config: temperal_downsample has {len(self.temperal_downsample)} entries, "
                f"expected {len(self.dim_mult) - 1} (one less than dim_mult)"
            )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(
                    f"VAE config: {name} has {len(getattr(self, name))} entries, expected z_dim = {self.z_dim}"
                )
        if min(self.latents_std) <= 0:
            raise ValueError(f"VAE config: latents_std must be positive, got {min(self.latents_std)}")
        if min(self.base_dim, self.decoder_base_dim, self.z_dim, self.num_res_blocks, *self.dim_mult) < 1:
            raise ValueError("VAE config: base_dim, z_dim, num_res_blocks and dim_mult must be at least 1")

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along height and width."""
        return int(2 ** (len(self.dim_mult) - 1))

    @property
    def temporal_factor(self) -> int:
        """Media frames per latent frame after the first."""
        return int(2 ** sum(self.temperal_downsample))


def parse_vae_config(config: Mapping[str, object]) -> VAEConfig:
    """Read a diffusers config.

    Keys that start with an underscore are metadata. Raises `ValueError` for missing keys, for keys this module doesn't
    know and for values it doesn't implement.
    """
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise ValueError(f"VAE config: missing {', '.join(missing)}")
    known = {*_REQUIRED, *_FIXED, *_IGNORED, "decoder_base_dim"}
    unknown = sorted(key for key in config if not key.startswith("_") and key not in known)
    if unknown:
        raise ValueError(f"VAE config: unknown settings {', '.join(unknown)}")
    for key, accepted in _FIXED.items():
        fixed(config.get(key, accepted), f"VAE config: {key}", accepted)
    decoder_base_dim = config.get("decoder_base_dim")
    base_dim = _width(config["base_dim"], "base_dim")
    return VAEConfig(
        base_dim=base_dim,
        decoder_base_dim=base_dim if decoder_base_dim is None else _width(decoder_base_dim, "decoder_base_dim"),
        z_dim=integer(config["z_dim"], "VAE config: z_dim", maximum=_MAX_LATENT_CHANNELS),
        dim_mult=tuple(
            integer(value, "VAE config: dim_mult", maximum=_MAX_FACTOR)
            for value in _sequence(config, "dim_mult", _MAX_STAGES)
        ),
        num_res_blocks=integer(config["num_res_blocks"], "VAE config: num_res_blocks", maximum=_MAX_UNITS),
        temperal_downsample=tuple(_flags(config, "temperal_downsample")),
        latents_mean=_statistics(config, "latents_mean", minimum=-_MAX_STATISTIC),
        latents_std=_statistics(config, "latents_std", minimum=1 / _MAX_STATISTIC),
    )


def _width(value: object, key: str) -> int:
    return integer(value, f"VAE config: {key}", maximum=_MAX_WIDTH)


def _flags(config: Mapping[str, object], key: str) -> Iterator[bool]:
    for value in _sequence(config, key, _MAX_STAGES):
        if not isinstance(value, bool):
            raise ValueError(f"VAE config: {key} must hold true and false, got {describe(value)}")
        yield value


def _statistics(config: Mapping[str, object], key: str, *, minimum: float) -> tuple[float, ...]:
    values = _sequence(config, key, _MAX_LATENT_CHANNELS)
    return tuple(number(value, f"VAE config: {key}", minimum=minimum, maximum=_MAX_STATISTIC) for value in values)


def _sequence(config: Mapping[str, object], key: str, maximum: int) -> list[object]:
    value = config[key]
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= maximum:
        raise ValueError(f"VAE config: {key} must be a non-empty list of at most {maximum}, got {describe(value)}")
    return list(value)
