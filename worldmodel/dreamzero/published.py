"""The two published DreamZero models as settings, as their checkpoints' files state them, and a tiny one.

Torch-free. Values: DreamZero official code, its training scripts and class defaults; the released files themselves were
not looked at. Statistics of a made-up robot stand for those of the data set, which are not ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TAG = "oxe_droid"
CAMERA_WIDTH, CAMERA_HEIGHT = 320, 180
DIMS = {"joint_position": 7, "gripper_position": 1}
"""Numbers of each key of state and action."""


class Scale(StrEnum):
    """FULL_14B on Wan 2.1, FULL_5B on Wan 2.2, TINY for tests: seconds on a CPU."""

    FULL_14B = "14b"
    FULL_5B = "5b"
    TINY = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The action head's settings, and the size of a tiled picture."""

    head: dict[str, object]
    width: int
    height: int


_NETWORK: dict[str, object] = {
    "text_len": 512,
    "freq_dim": 256,
    "eps": 1e-6,
    "max_chunk_size": 4,
    "num_frame_per_block": 2,
    "num_action_per_block": 24,
    "num_state_per_block": 1,
    "action_dim": 32,
    "max_state_dim": 64,
}

_HEAD: dict[str, object] = {
    "num_frames": 33,
    "num_frame_per_block": 2,
    "action_horizon": 24,
    "action_dim": 32,
    "max_action_dim": 32,
    "max_state_dim": 64,
    "tiled": False,
    "target_video_height": None,
    "target_video_width": None,
    "decouple_inference_noise": False,
    "video_inference_final_noise": 0.8,
    "train_architecture": "full",
    "text_encoder_cfg": {},
    "image_encoder_cfg": {},
    "vae_cfg": {},
}


def published(scale: Scale) -> Published:
    """Return the settings of a model."""
    match scale:
        case Scale.FULL_14B:
            sizes = {"dim": 5120, "num_heads": 40, "num_layers": 40, "ffn_dim": 13824, "in_dim": 36, "out_dim": 16}
            network = _NETWORK | sizes | {"model_type": "i2v", "frame_seqlen": 880, "text_dim": 4096}
            return Published(head=_HEAD | {"diffusion_model_cfg": network}, width=640, height=352)
        case Scale.FULL_5B:
            sizes = {"dim": 3072, "num_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_dim": 48, "out_dim": 48}
            network = _NETWORK | sizes | {"model_type": "ti2v", "frame_seqlen": 50, "text_dim": 4096}
            network |= {"concat_first_frame_latent": False}
            size = {"target_video_height": 160, "target_video_width": 320}
            return Published(head=_HEAD | size | {"diffusion_model_cfg": network}, width=640, height=320)
        case Scale.TINY:
            return Published(head=_tiny_head(), width=64, height=32)


def _tiny_head() -> dict[str, object]:
    sizes = {"dim": 48, "num_heads": 4, "num_layers": 2, "ffn_dim": 96, "in_dim": 36, "out_dim": 16, "hidden_size": 32}
    return _HEAD | {
        "diffusion_model_cfg": _NETWORK | sizes | {"model_type": "i2v", "frame_seqlen": 8, "text_dim": 32},
        "text_encoder_cfg": {"vocab": 512, "dim": 32, "dim_attn": 32, "dim_ffn": 64, "num_heads": 2, "num_layers": 2},
        "image_encoder_cfg": {"image_size": 28, "patch_size": 14, "dim": 32, "heads": 2, "used_layers": 1},
        "vae_cfg": {"dim": 4, "z_dim": 16},
    }


def config_file(model: Published) -> dict[str, object]:
    """Return the content of `config.json`."""
    return {"model_type": "vla", "action_head_cfg": {"config": model.head}}


def metadata_file() -> dict[str, object]:
    """Return the content of `experiment_cfg/metadata.json` of a made-up DROID robot."""
    modality = {"absolute": True, "rotation_type": None, "continuous": True}
    numbers = {key: {"shape": [count], **modality} for key, count in DIMS.items()}
    videos = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
    resolution = [CAMERA_WIDTH, CAMERA_HEIGHT]
    statistics = {
        key: {
            "min": [-1.0] * count,
            "max": [1.0] * count,
            "mean": [0.0] * count,
            "std": [0.5] * count,
            "q01": [-0.9] * count,
            "q99": [0.9] * count,
        }
        for key, count in DIMS.items()
    }
    entry = {
        "statistics": {"state": statistics, "action": statistics},
        "modalities": {
            "video": {name: {"resolution": resolution, "channels": 3, "fps": 15.0} for name in videos},
            "state": numbers,
            "action": numbers,
        },
        "embodiment_tag": TAG,
    }
    return {TAG: entry}


def training_file(model: Published) -> dict[str, object]:
    """Return the content of `experiment_cfg/conf.yaml`, of which JSON is a part. Views are half a picture each way."""
    resize = {"_target_": "VideoResize", "height": model.height // 2, "width": model.width // 2}
    names = (f"{kind}.{key}" for kind in ("state", "action") for key in DIMS)
    return {
        "eval_bf16": True,
        "relative_action": True,
        "relative_action_keys": ["joint_position"],
        "transforms": {TAG: {"transforms": [resize, {"normalization_modes": dict.fromkeys(names, "q99")}]}},
    }
