"""The original layout of LingBot-World v2, opened as the same components that the diffusers layout has.

    transformers/                        config.json, safetensors with the names of the diffusers layout
    Wan2.1_VAE.pth                       names of its own, no config
    models_t5_umt5-xxl-enc-bf16.pth      names of its own, no config
    google/umt5-xxl/                     the tokenizer

Sizes that no file states are read from the shapes of the tensors; settings that no file states are the published ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from worldmodel.checkpoint.component import Component
from worldmodel.checkpoint.config_values import shown
from worldmodel.checkpoint.diffusers import ComponentReader
from worldmodel.checkpoint.errors import CheckpointError, naming
from worldmodel.checkpoint.json_file import read_json_object
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.checkpoint.stored_component import StoredComponent, sampled_digest
from worldmodel.checkpoint.torch_file import read_torch_index
from worldmodel.json_checks import describe
from worldmodel.lingbot.published import (
    FULL,
    SCHEDULER,
    TEXT_ENCODER_CLASS,
    TRANSFORMER_CLASS,
    VAE_CLASS,
    text_encoder_config,
    vae_config,
)
from worldmodel.wan.original_names import original_umt5_name, original_vae_name, umt5_name, vae_name

TRANSFORMER_FOLDER = "transformers"
VAE_FILE = "Wan2.1_VAE.pth"
TEXT_ENCODER_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
TOKENIZER_FOLDER = "google/umt5-xxl"

_PARTS = {
    "transformer": f"{TRANSFORMER_FOLDER}/config.json",
    "vae": VAE_FILE,
    "text_encoder": TEXT_ENCODER_FILE,
    "tokenizer": f"{TOKENIZER_FOLDER}/",
}
"""What shows that a component is there."""

_RENAMED_KEYS = {
    "num_heads": "num_attention_heads",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_layers": "num_layers",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "text_dim": "text_dim",
    "text_len": "text_len",
    "eps": "eps",
    "cross_attn_norm": "cross_attn_norm",
    "sink_size": "sink_size",
    "num_frames_per_block": "num_frames_per_block",
    "sliding_window_num_frames": "sliding_window_num_frames",
    "local_attn_size": "local_attn_size",
}
"""Key of the original transformer config: its key in the diffusers layout."""

_ORIGINAL_KEYS = ("dim", *(theirs for theirs, ours in _RENAMED_KEYS.items() if theirs != ours))
"""Keys that only original configs have."""

_WINDOW_KEYS = ("sink_size", "num_frames_per_block", "sliding_window_num_frames", "local_attn_size")

logger = logging.getLogger(__name__)


def is_original_layout(folder: Path) -> bool:
    """Tell the original layout from the diffusers layout by what only it has.

    Raises `CheckpointError` for a folder that holds both: nobody could say which of the two is served.
    """
    is_original = (folder / TRANSFORMER_FOLDER).is_dir()
    if is_original and (folder / "model_index.json").exists():
        raise CheckpointError(
            str(folder),
            f"holds both layouts, the original ({TRANSFORMER_FOLDER}/) and that of diffusers (model_index.json): "
            "keep one",
        )
    return is_original


@dataclass(frozen=True, kw_only=True)
class TransformerReader(ComponentReader):
    """The transformer's folder, which differs from that of the diffusers layout in the keys of its config."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config with the keys of the diffusers layout. Raises `CheckpointError`."""
        return transformer_config(read_json_object(self.folder / "config.json"), self.subject)


class OriginalCheckpoint:
    """Implements `Checkpoint` for a folder. What a component has is read when it is asked for, tensor data never."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readers: Mapping[str, Callable[[], Component]] = {
            "transformer": self._transformer,
            "vae": self._vae,
            "text_encoder": self._text_encoder,
            "tokenizer": self._tokenizer,
            "scheduler": self._scheduler,
        }
        self._opened: dict[str, Component] = {}

    @property
    def name(self) -> str:
        return str(self.path)

    @cached_property
    def digest(self) -> str:
        files = [self.path / VAE_FILE, self.path / TEXT_ENCODER_FILE]
        with naming(self.path, "read"):
            for folder in (TRANSFORMER_FOLDER, TOKENIZER_FOLDER):
                files += [file for file in (self.path / folder).rglob("*") if file.is_file()]
        return sampled_digest(self.path, files)

    def component(self, name: str) -> Component:
        """Return a component. Raises `CheckpointError`, also for one that is not there."""
        if name not in self._readers:
            raise CheckpointError(self.name, f"has no component {name}, only {', '.join(self._readers)}")
        if name not in self._opened:
            self._require(name)
            self._opened[name] = self._readers[name]()
        return self._opened[name]

    def _require(self, name: str) -> None:
        part = _PARTS.get(name)
        with naming(self.path, "read"):
            is_there = part is None or (self.path / part).exists()
        if not is_there:
            raise CheckpointError(self.name, f"has the original layout, but lacks {part}")

    def _transformer(self) -> TransformerReader:
        return TransformerReader(
            name="transformer", folder=self.path / TRANSFORMER_FOLDER, library="", class_name=TRANSFORMER_CLASS
        )

    def _vae(self) -> StoredComponent:
        file = self.path / VAE_FILE
        tensors = _renamed(file, vae_name)
        sizes = _Sizes(tensors=tensors, key_of=original_vae_name, file=file)
        return StoredComponent(
            subject=str(file),
            class_name=VAE_CLASS,
            config=vae_config(base_dim=sizes.length("encoder.conv_in.weight", 0)),
            tensors=tensors,
            key_of=original_vae_name,
        )

    def _text_encoder(self) -> StoredComponent:
        file = self.path / TEXT_ENCODER_FILE
        tensors = _renamed(file, umt5_name)
        return StoredComponent(
            subject=str(file),
            class_name=TEXT_ENCODER_CLASS,
            config=_text_config(_Sizes(tensors=tensors, key_of=original_umt5_name, file=file)),
            tensors=tensors,
            key_of=original_umt5_name,
        )

    def _tokenizer(self) -> StoredComponent:
        folder = self.path / TOKENIZER_FOLDER
        return StoredComponent(
            subject=str(folder), class_name=FULL.tokenizer_class, config={}, tensors={}, folder=folder
        )

    def _scheduler(self) -> StoredComponent:
        return StoredComponent(
            subject=self.name, class_name="UniPCMultistepScheduler", config=SCHEDULER, tensors={}, folder=None
        )


def transformer_config(content: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Give an original transformer config the keys of the diffusers layout; one of these keys alone stays as it is.

    `local_attn_size` counts the sink too, so where it is given (-1 is not) it is the window unless the config says one.
    The window and the chunk length may be absent: then the published values hold, and the log says so. Raises
    `CheckpointError` if the width is no multiple of the heads, or two keys contradict each other.
    """
    if "num_attention_heads" in content and not any(key in content for key in _ORIGINAL_KEYS):
        # `_class_name` of this layout is what the authors' code calls its class; nobody published the name.
        return {key: value for key, value in content.items() if key != "_class_name"}
    config = {ours: content[theirs] for theirs, ours in _RENAMED_KEYS.items() if theirs in content}
    dim, heads = content.get("dim"), content.get("num_heads")
    if not isinstance(dim, int) or not isinstance(heads, int) or heads < 1 or dim % heads:
        raise CheckpointError(
            subject, f"config: dim must be a multiple of num_heads, got {describe(dim)} and {describe(heads)}"
        )
    config["attention_head_dim"] = dim // heads
    _check_no_contradiction(content, config, subject)
    config["qk_norm"] = "rms_norm_across_heads" if content.get("qk_norm", True) else None
    config["patch_size"] = content.get("patch_size", [1, 2, 2])
    if config.get("local_attn_size", -1) != -1:
        config.setdefault("sliding_window_num_frames", config["local_attn_size"])
    absent = [key for key in _WINDOW_KEYS if key not in config]
    if absent:
        defaults = {key: FULL.transformer[key] for key in absent}
        logger.info("%s: config has no %s, the published values hold: %s", subject, ", ".join(absent), defaults)
        config |= defaults
    return config


def _check_no_contradiction(content: Mapping[str, Any], config: Mapping[str, Any], subject: str) -> None:
    """Compare the keys of the diffusers layout that an original config has as well with what its own say."""
    for key in (*_RENAMED_KEYS.values(), "attention_head_dim"):
        if key in content and key in config and content[key] != config[key]:
            raise CheckpointError(
                subject,
                f"config: {key} is {shown(content[key])}, the keys of the original layout make it {shown(config[key])}",
            )


def _renamed(file: Path, rename: Callable[[str], str]) -> dict[str, TensorInfo]:
    """Return the tensors of a file under our names. Raises `CheckpointError` for two keys that mean one tensor."""
    tensors: dict[str, TensorInfo] = {}
    for info in read_torch_index(file):
        if (before := tensors.setdefault(rename(info.name), info)) is not info:
            raise CheckpointError(str(file), f"holds one tensor under two keys, {before.name} and {info.name}")
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The tensors of a file by our names, as what tells the size of a component that no config describes."""

    tensors: Mapping[str, TensorInfo]
    key_of: Callable[[str], str]
    file: Path

    def length(self, name: str, axis: int) -> int:
        """Return one side of a tensor. Raises `CheckpointError` that names it by its key if it is not there."""
        info = self.tensors.get(name)
        if info is None or len(info.shape) <= axis:
            raise CheckpointError(
                str(self.file),
                f"tensor {self.key_of(name)}, which tells the size of the model, is missing or misshaped",
            )
        return info.shape[axis]


def _text_config(sizes: _Sizes) -> Mapping[str, Any]:
    first = "encoder.block.0.layer.0.SelfAttention"
    num_heads = sizes.length(f"{first}.relative_attention_bias.weight", 1)
    widths = {
        "d_model": sizes.length("shared.weight", 1),
        "d_ff": sizes.length("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 0),
        "d_kv": sizes.length(f"{first}.q.weight", 0) // max(1, num_heads),
        "num_heads": num_heads,
        "vocab_size": sizes.length("shared.weight", 0),
    }
    num_layers = len({name.split(".")[2] for name in sizes.tensors if name.startswith("encoder.block.")})
    published = FULL.text_encoder
    # Layers that are missing at the end would not show otherwise.
    if all(published[key] == width for key, width in widths.items()):
        num_layers = max(num_layers, cast("int", published["num_layers"]))
    return text_encoder_config(**widths, num_layers=num_layers)
