"""A DreamZero checkpoint folder as components under the names of our modules.

    config.json                                    sizes of everything
    model.safetensors, or shards and their index   all tensors, below `action_head.`
    experiment_cfg/{conf.yaml,metadata.json}       what observations and actions are
    tokenizer/                                     not part of the published folder; may lie elsewhere

Names: `model.` is the transformer (with `base_model.model.` and `.base_layer.` in it if adapters were trained),
`text_encoder.`, `image_encoder.model.visual.` and `vae.model.` the encoders in their original layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from worldmodel.checkpoint.diffusers import require_folder, weight_files
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.json_file import read_json_object
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.checkpoint.stored_component import StoredComponent, sampled_digest
from worldmodel.dreamzero.lora import LoraPair, split_lora
from worldmodel.dreamzero.sizes import Sizes, read_sizes
from worldmodel.dreamzero.training_config import TrainingConfig, read_training_config
from worldmodel.dreamzero.wide_vae import wide_vae_name
from worldmodel.wan.original_names import umt5_name, vae_name

ROOT = "action_head."
CONFIG_FILE = "config.json"
METADATA_FILE = "experiment_cfg/metadata.json"
TRAINING_FILE = "experiment_cfg/conf.yaml"
TOKENIZER_FOLDER = "tokenizer"

T = TypeVar("T")

TRANSFORMER, VAE, TEXT_ENCODER, IMAGE_ENCODER, TOKENIZER = (
    "transformer",
    "vae",
    "text_encoder",
    "image_encoder",
    "tokenizer",
)

_PREFIXES = {
    TRANSFORMER: "model.",
    TEXT_ENCODER: "text_encoder.",
    IMAGE_ENCODER: "image_encoder.model.",
    VAE: "vae.model.",
}
_UNUSED = (
    re.compile(r"vae\.model\.(decoder\.|conv2\.)"),
    re.compile(r"image_encoder\.model\.(textual\.|log_scale$|visual\.(post_norm\.|head))"),
)
"""Tensors that serving has no use for: predicted pixels and the text side of the image tower."""


@dataclass(frozen=True, kw_only=True)
class DreamZeroCheckpoint:
    """An opened folder; implements `worldmodel.checkpoint.component.Checkpoint`. Build it with `open_checkpoint`."""

    folder: Path
    head: Mapping[str, object]
    metadata: Mapping[str, object]
    sizes: Sizes
    training: TrainingConfig
    tokenizer_folder: Path
    tensors: Mapping[str, Mapping[str, TensorInfo]]
    lora: tuple[LoraPair, ...]

    @property
    def name(self) -> str:
        return str(self.folder)

    @cached_property
    def digest(self) -> str:
        """Content digest in hex; see `sampled_digest`."""
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return sampled_digest(self.folder, files)

    def component(self, name: str) -> StoredComponent:
        """Return a component. Raises `CheckpointError` naming the ones that exist."""
        if name == TOKENIZER:
            if not self.tokenizer_folder.is_dir():
                raise CheckpointError(
                    str(self.tokenizer_folder),
                    "tokenizer folder does not exist; it is that of google/umt5-xxl, named by the option tokenizer",
                )
            return StoredComponent(
                subject=str(self.tokenizer_folder), class_name="", config={}, tensors={}, folder=self.tokenizer_folder
            )
        if name not in self.tensors:
            raise CheckpointError(self.name, f"has no component {name}, only {', '.join(sorted(self.tensors))}")
        return StoredComponent(
            subject=f"{self.name}, {name}",
            class_name="UMT5EncoderModel" if name == TEXT_ENCODER else "",
            config=self.sizes.text_encoder if name == TEXT_ENCODER else {},
            tensors=self.tensors[name],
            folder=self.folder,
        )


def open_checkpoint(path: Path | str, *, tag: str, tokenizer: str | None, problems: list[str]) -> DreamZeroCheckpoint:
    """Open a folder for one embodiment, reading headers only.

    Appends to `problems` what is wrong with its settings. Raises `CheckpointError` if there is no such folder, or its
    files or sizes can't be read; it names every file that can't, with the problems so far.
    """
    folder = require_folder(path)
    unread: list[Problem] = []
    config = _try_to(lambda: read_json_object(folder / CONFIG_FILE), unread)
    metadata = _try_to(lambda: read_json_object(folder / METADATA_FILE), unread)
    files = _try_to(lambda: weight_files(folder), unread)
    training = read_training_config(folder / TRAINING_FILE, tag, problems)
    if config is None or metadata is None or files is None:
        raise CheckpointError(str(folder), *unread, *problems)
    head = _head(config, problems)
    # A list of its own: what other files lack is no reason to look no further into this one.
    size_problems: list[str] = []
    sizes = read_sizes(head, size_problems)
    problems += size_problems
    if sizes is None:
        raise CheckpointError(str(folder), *problems)
    stored = {info.name: info for file in files for info in file.tensors}
    tensors, lora = _split(stored, sizes, head, problems)
    return DreamZeroCheckpoint(
        folder=folder,
        head=head,
        metadata=metadata,
        sizes=sizes,
        training=training,
        tokenizer_folder=Path(tokenizer) if tokenizer is not None else folder / TOKENIZER_FOLDER,
        tensors=tensors,
        lora=lora,
    )


def _try_to(read: Callable[[], T], unread: list[Problem]) -> T | None:
    """Read something of a folder; None if that can't be done, which `unread` then says."""
    try:
        return read()
    except CheckpointError as error:
        unread += error.findings
        return None


def _head(config: Mapping[str, Any], problems: list[str]) -> Mapping[str, object]:
    match config:
        case {"action_head_cfg": {"config": dict(head)}}:
            return head
    problems.append(f"{CONFIG_FILE}: action_head_cfg.config is missing")
    return {}


def _split(
    stored: Mapping[str, TensorInfo], sizes: Sizes, head: Mapping[str, object], problems: list[str]
) -> tuple[dict[str, dict[str, TensorInfo]], tuple[LoraPair, ...]]:
    """Sort tensors by component, under our names. Those of no component are a problem."""
    rename: dict[str, Callable[[str], str]] = {
        TRANSFORMER: lambda name: name.removeprefix("base_model.model.").replace(".base_layer.", "."),
        TEXT_ENCODER: umt5_name,
        IMAGE_ENCODER: lambda name: name.removeprefix("visual."),
        VAE: vae_name,
    }
    if sizes.wide_vae:
        rename[VAE] = lambda name: wide_vae_name(name, sizes.vae.num_res_blocks)
    tensors: dict[str, dict[str, TensorInfo]] = {component: {} for component in _PREFIXES}
    strangers, repeated = [], []
    for full_name, info in stored.items():
        name = full_name.removeprefix(ROOT)
        component = next((each for each, prefix in _PREFIXES.items() if name.startswith(prefix)), None)
        if component is None or name == full_name:
            strangers.append(full_name)
        elif not _is_unused(name, sizes):
            ours = rename[component](name.removeprefix(_PREFIXES[component]))
            if ours in tensors[component]:
                repeated.append(full_name)
            tensors[component][ours] = info
    if strangers:
        word = "tensor" if len(strangers) == 1 else "tensors"
        problems.append(f"{len(strangers)} {word} of no known part, such as {', '.join(sorted(strangers)[:5])}")
    if repeated:
        shown = ", ".join(sorted(repeated)[:5])
        problems.append(f"{len(repeated)} of the tensors are there under another name too, such as {shown}")
    tensors[TRANSFORMER], lora = split_lora(tensors[TRANSFORMER], head, problems)
    return tensors, lora


def _is_unused(name: str, sizes: Sizes) -> bool:
    if any(pattern.match(name) for pattern in _UNUSED):
        return True
    layer = re.match(r"image_encoder\.model\.visual\.transformer\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= sizes.image_encoder.num_layers
