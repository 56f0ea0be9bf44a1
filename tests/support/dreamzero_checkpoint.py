"""Write tiny DreamZero checkpoints: the golden weights with all files around them, as a worker loads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from safetensors.torch import save_file

from tests.support.dreamzero_golden import manifest, tensors
from worldmodel.dreamzero.config import parse_options
from worldmodel.dreamzero.embodiments import NEGATIVE_PROMPT, embodiment
from worldmodel.dreamzero.prompts import frame_prompt
from worldmodel.messages import StartWorker
from worldmodel.wan.text_encoder import clean_text
from worldmodel.wan.text_names import TextCleaning

TAG: str = manifest()["metadata_json_example"]["embodiment_tag"]
END, UNKNOWN = 1, 2


def keys_of(kind: str) -> dict[str, int]:
    """Return the keys of `state` or `action` in order, with how many numbers each has."""
    modalities = manifest()["metadata_json_example"]["modalities"][kind]
    return {key: entry["shape"][0] for key, entry in modalities.items()}


def relative_keys() -> list[str]:
    """Return the actions that are added to the state: all but grippers, as far as there is a state of the name."""
    return [key for key in keys_of("action") if key in keys_of("state") and "gripper" not in key]


def tiny_config(**head: Any) -> dict[str, Any]:
    """Return the `config.json` of the golden weights; `head` replaces settings of the action head."""
    tiny = manifest()["tiny_config"]
    config = {
        "num_frames": tiny["head"]["num_frames"],
        "num_frame_per_block": tiny["head"]["num_frame_per_block"],
        "action_horizon": tiny["head"]["action_horizon"],
        "action_dim": tiny["dit"]["action_dim"],
        "max_action_dim": tiny["dit"]["action_dim"],
        "max_state_dim": tiny["dit"]["max_state_dim"],
        "tiled": False,
        "target_video_height": None,
        "target_video_width": None,
        "decouple_inference_noise": False,
        "diffusion_model_cfg": tiny["dit"],
        "text_encoder_cfg": tiny["text_encoder"],
        "image_encoder_cfg": tiny["clip"],
        "vae_cfg": tiny["vae"],
    }
    return {"model_type": "vla", "action_head_cfg": {"_target_": "WANPolicyHead", "config": config | head}}


def training_config() -> dict[str, Any]:
    """Return a `conf.yaml` that says what the published one is known to say."""
    tiny = manifest()["tiny_config"]
    view, horizon = tiny["view"], tiny["head"]["action_horizon"]
    names = {kind: [f"{kind}.{key}" for key in keys_of(kind)] for kind in ("state", "action")}
    videos = [f"video.{key}" for key in manifest()["metadata_json_example"]["modalities"]["video"]]
    return {
        "eval_bf16": True,
        "relative_action": True,
        "relative_action_keys": relative_keys(),
        "modality_configs": {
            TAG: {
                "video": {"modality_keys": videos},
                "state": {"delta_indices": [0], "modality_keys": names["state"]},
                "action": {"delta_indices": list(range(horizon)), "modality_keys": names["action"]},
            },
            "another_robot": {"state": {"modality_keys": ["state.head_position"]}},
        },
        "transforms": {
            TAG: {
                "transforms": [
                    {"_target_": "groot.VideoResize", "height": view["resize_h"], "width": view["resize_w"]},
                    {"normalization_modes": dict.fromkeys(names["state"] + names["action"], "q99")},
                ]
            }
        },
    }


def prompts() -> list[tuple[str, list[int]]]:
    """Return every text of the golden calls, framed and cleaned, with its token ids."""
    golden, found = tensors("rollout_default"), []
    for index, call in enumerate(manifest()["cases"]["rollout_default"]["calls"]):
        for name, text in (
            ("text", frame_prompt(call["prompt"], embodiment(TAG).template)),
            ("text_negative", NEGATIVE_PROMPT),
        ):
            length = int(golden[f"call{index}/{name}_len"])
            found.append(
                (clean_text(text, TextCleaning.OFFICIAL), golden[f"call{index}/{name}_ids"][0, :length].tolist())
            )
    return found


def word_ids() -> dict[str, int]:
    """Return the token of every word of the golden texts; each text must be its words and the end token."""
    ids: dict[str, int] = {}
    for text, tokens in prompts():
        words = text.split()
        assert len(words) + 1 == len(tokens), f"{len(words)} words, {len(tokens)} tokens: {text}"
        for word, token in zip(words, tokens, strict=False):
            assert ids.setdefault(word, token) == token, word
    return ids


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that gives the golden texts their ids, and any other word the unknown token."""
    folder.mkdir(parents=True, exist_ok=True)
    rules = [
        {"type": "Replace", "pattern": {"Regex": rf"(?<!\S){re.escape(word)}(?!\S)"}, "content": f"t{token}"}
        for word, token in word_ids().items()
    ]
    num_tokens = manifest()["tiny_config"]["text_encoder"]["vocab"]
    special = {"<pad>": 0, "</s>": END, "<unk>": UNKNOWN}
    taken = {token: word for word, token in special.items()}
    vocabulary = {taken.get(token, f"t{token}"): token for token in range(num_tokens)}
    for token in special.values():
        # A golden word may have the number of a special token; it must still be found.
        rules = [{**rule, "content": taken[token]} if rule["content"] == f"t{token}" else rule for rule in rules]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": rules},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [END], "tokens": ["</s>"]}},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}), encoding="utf-8"
    )


def write_checkpoint(
    folder: Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    **head: Any,
) -> Path:
    """Write a whole folder and return it; None takes the golden files' own."""
    experiment = folder / "experiment_cfg"
    experiment.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(**head)), encoding="utf-8")
    save_file(dict(weights or tensors("weights")), folder / "model.safetensors")
    content = metadata or {TAG: manifest()["metadata_json_example"]}
    (experiment / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
    (experiment / "conf.yaml").write_text(yaml.safe_dump(dict(training or training_config())), encoding="utf-8")
    write_tokenizer(folder / "tokenizer")
    return folder


def start_worker(folder: Path, *, requested_sessions: int = 2, **options: Any) -> StartWorker:
    """Return the message that loads such a folder, with the sampler of the golden calls unless `options` differ."""
    tiny = manifest()["tiny_config"]
    view, head = tiny["view"], tiny["head"]
    golden = {
        "embodiment": TAG,
        "noise_seed": head["seed"],
        "guidance": head["cfg_scale"],
        "shift": head["sigma_shift"],
        "computed_steps": sum(head["dit_step_mask"]),
    }
    return StartWorker(
        model="dreamzero",
        checkpoint=str(folder),
        width=2 * view["resize_w"],
        height=2 * view["resize_h"],
        fps=5,
        requested_sessions=requested_sessions,
        model_options=parse_options(golden | options),
    )


def camera_frames(frames: list[int]) -> dict[str, npt.NDArray[np.uint8]]:
    """Draw what the golden calls saw, by request key: the manifest's `view_formula` at the tiny camera size."""
    view = manifest()["tiny_config"]["view"]
    y, x, c = np.meshgrid(np.arange(view["h"]), np.arange(view["w"]), np.arange(3), indexing="ij")
    cameras = embodiment(TAG).cameras
    videos = manifest()["metadata_json_example"]["modalities"]["video"]
    keys = list(videos) if cameras is None else [request for _, request in cameras]
    return {
        f"observation/{key}": np.stack(
            [
                ((7 * y + 5 * x + 61 * c + 43 * number + 17 * frame + (x * y * (number + 1)) // 3) % 256).astype(
                    np.uint8
                )
                for frame in frames
            ]
        )
        for number, key in enumerate(keys)
    }


def call_arrays(call: int) -> dict[str, npt.NDArray[Any]]:
    """Return the observation of one golden call, as a request holds it."""
    golden, described = tensors("rollout_default"), manifest()["cases"]["rollout_default"]["calls"][call]
    states = {f"observation/{name}": golden[f"call{call}/obs/{name}"].numpy() for name in keys_of("state")}
    return {**camera_frames(described["frames"]), **states}
