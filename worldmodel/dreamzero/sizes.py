"""All sizes in a checkpoint's `config.json`: of the transformer, of the encoders, and how a call runs.

The encoders of both published models have fixed sizes that the file does not repeat; it may state others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from worldmodel.dreamzero.image_encoder import ImageEncoderConfig
from worldmodel.dreamzero.observation_vae import LATENTS_MEAN, LATENTS_STD
from worldmodel.dreamzero.transformer_config import TransformerConfig, checked_size, read_transformer_config
from worldmodel.dreamzero.wide_vae import WIDE_LATENTS_MEAN, WIDE_LATENTS_STD
from worldmodel.wan.vae_config import VAEConfig

TEXT_ENCODER: dict[str, int] = {
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 256384,
    "relative_attention_num_buckets": 32,
}

_TEXT_KEYS = {
    "d_model": "dim",
    "d_ff": "dim_ffn",
    "num_heads": "num_heads",
    "num_layers": "num_layers",
    "vocab_size": "vocab",
    "relative_attention_num_buckets": "num_buckets",
}
_IMAGE_KEYS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "width": "dim",
    "num_heads": "heads",
    "num_layers": "used_layers",
}
_VAE_KEYS = {"base_dim": "dim", "z_dim": "z_dim", "num_res_blocks": "num_res_blocks"}

FRAME_GROUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that decides shapes. `wide_vae`: the Wan 2.2 VAE with 48 channels instead of that of Wan 2.1.

    `condition_latent_frames` are those of the clip that a start picture begins. `frame_tokens` is what the file says a
    latent frame has, `picture_size` (height, width) what tiled pictures are resized to; None says nothing of it.
    `final_noise` is where the video's noise ends if it is decoupled from that of the actions.
    """

    transformer: TransformerConfig
    vae: VAEConfig
    wide_vae: bool
    image_encoder: ImageEncoderConfig
    text_encoder: Mapping[str, int | str]
    condition_latent_frames: int
    action_horizon: int
    frame_tokens: int | None
    picture_size: tuple[int, int] | None
    final_noise: float | None


def read_sizes(head: Mapping[str, object], problems: list[str]) -> Sizes | None:
    """Read `action_head_cfg.config`. Appends all that is missing or wrong to `problems`, and returns None then."""
    image = _image_encoder(_table(head, "image_encoder_cfg", problems), problems)
    network = _table(head, "diffusion_model_cfg", problems)
    wide = network.get("model_type") == "ti2v"
    transformer = read_transformer_config(head, image_dim=image.width, image_tokens=image.num_tokens, problems=problems)
    vae = _vae(_table(head, "vae_cfg", problems), wide, problems)
    text = _text_encoder(_table(head, "text_encoder_cfg", problems), problems)
    frames = _integer(head, "num_frames", 33, problems)
    horizon = _integer(head, "action_horizon", None, problems)
    frame_tokens = None if network.get("frame_seqlen") is None else _integer(network, "frame_seqlen", None, problems)
    picture_size = _picture_size(head, problems)
    final_noise = _final_noise(head, problems)
    if frames % FRAME_GROUP != 1:
        problems.append(f"num_frames: expected one more than a multiple of {FRAME_GROUP}, got {frames}")
    if transformer is None or problems:
        return None
    least = 1 + FRAME_GROUP * (transformer.latent_frames_per_chunk - 1)
    if transformer.image_condition and frames < least:
        problems.append(
            f"num_frames: expected at least {least} for chunks of {transformer.latent_frames_per_chunk} latent frames, "
            f"got {frames}"
        )
    for name, got, expected in (
        ("action_horizon", horizon, transformer.actions_per_chunk),
        ("z_dim of the VAE", vae.z_dim, transformer.out_channels),
        ("dim of the text encoder", text["d_model"], transformer.text_dim),
    ):
        if got != expected:
            problems.append(f"{name} is {got}, but the transformer has {expected}")
    return Sizes(
        transformer=transformer,
        vae=vae,
        wide_vae=wide,
        image_encoder=image,
        text_encoder=text,
        condition_latent_frames=1 + (frames - 1) // FRAME_GROUP,
        action_horizon=horizon,
        frame_tokens=frame_tokens,
        picture_size=picture_size,
        final_noise=final_noise,
    )


def _table(head: Mapping[str, object], key: str, problems: list[str]) -> Mapping[str, object]:
    value = head.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{key}: expected an object")
        return {}
    return value


def _integer(table: Mapping[str, object], key: str, default: int | None, problems: list[str]) -> int:
    return checked_size(key, table.get(key, default), problems)


def _image_encoder(table: Mapping[str, object], problems: list[str]) -> ImageEncoderConfig:
    default = ImageEncoderConfig()
    defaults = {field.name: getattr(default, field.name) for field in fields(default)}
    return replace(
        default, **{ours: _integer(table, theirs, defaults[ours], problems) for ours, theirs in _IMAGE_KEYS.items()}
    )


def _text_encoder(table: Mapping[str, object], problems: list[str]) -> dict[str, int | str]:
    sizes: dict[str, int | str] = dict(TEXT_ENCODER)
    for ours, theirs in _TEXT_KEYS.items():
        sizes[ours] = _integer(table, theirs, TEXT_ENCODER[ours], problems)
    heads, inner = int(sizes["num_heads"]), _integer(table, "dim_attn", int(sizes["d_model"]), problems)
    if inner % heads:
        problems.append(f"text_encoder_cfg: dim_attn {inner} does not divide into {heads} heads")
    return sizes | {"d_kv": inner // heads, "model_type": "umt5"}


def _vae(table: Mapping[str, object], wide: bool, problems: list[str]) -> VAEConfig:
    published = (
        {"base_dim": 160, "z_dim": 48, "num_res_blocks": 2}
        if wide
        else {
            "base_dim": 96,
            "z_dim": 16,
            "num_res_blocks": 2,
        }
    )
    sizes = {ours: _integer(table, theirs, published[ours], problems) for ours, theirs in _VAE_KEYS.items()}
    mean, std = (WIDE_LATENTS_MEAN, WIDE_LATENTS_STD) if wide else (LATENTS_MEAN, LATENTS_STD)
    factors, halved = table.get("dim_mult", [1, 2, 4, 4]), table.get("temporal_downsample", [False, True, True])
    try:
        return VAEConfig(
            decoder_base_dim=sizes["base_dim"],
            dim_mult=_integers(factors),
            temperal_downsample=tuple(map(bool, _integers(halved))),
            latents_mean=mean,
            latents_std=std,
            **sizes,
        )
    except (TypeError, ValueError) as error:
        problems.append(f"vae_cfg: {error}")
        return VAEConfig(
            decoder_base_dim=1,
            dim_mult=(1,),
            temperal_downsample=(),
            latents_mean=(0.0,),
            latents_std=(1.0,),
            base_dim=1,
            z_dim=1,
            num_res_blocks=1,
        )


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise TypeError(f"expected a list of whole numbers, got {value!r}")
    return tuple(value)


def _picture_size(head: Mapping[str, object], problems: list[str]) -> tuple[int, int] | None:
    if head.get("target_video_height") is None and head.get("target_video_width") is None:
        return None
    height = _integer(head, "target_video_height", None, problems)
    return height, _integer(head, "target_video_width", None, problems)


def _final_noise(head: Mapping[str, object], problems: list[str]) -> float | None:
    decoupled = head.get("decouple_inference_noise", False)
    if not isinstance(decoupled, bool):
        problems.append(f"decouple_inference_noise: expected true or false, got {decoupled!r}")
    if decoupled is not True:
        return None
    value = head.get("video_inference_final_noise")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        problems.append(f"video_inference_final_noise: expected a number from 0 up to below 1, got {value!r}")
        return None
    return float(value)
