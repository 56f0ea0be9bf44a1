"""Read a checkpoint folder in the diffusers layout: `model_index.json` and one folder per component.

Owns finding and checking files. `loading.py` fills modules. Nothing here knows a model, and no tensor data is read
until a component is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from worldmodel.checkpoint.errors import CheckpointError, naming
from worldmodel.checkpoint.json_file import is_plain_name, read_json_object
from worldmodel.checkpoint.loading import (
    DTypeChoice,
    NameChoice,
    Progress,
    find_misfits,
    load_tensors,
    read_tensor,
)
from worldmodel.checkpoint.problems import Problem, listed
from worldmodel.checkpoint.safetensors_header import SafetensorsFile, TensorInfo, read_safetensors_header
from worldmodel.checkpoint.stored_component import sampled_digest
from worldmodel.json_checks import describe

_INDEX = "model_index.json"
_CONFIG_FILES = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")
_WEIGHT_STEMS = ("diffusion_pytorch_model", "model")


@dataclass(frozen=True, kw_only=True)
class ComponentReader:
    """One component folder. `library` and `class_name` are what `model_index.json` says of it."""

    name: str
    folder: Path
    library: str
    class_name: str

    @property
    def subject(self) -> str:
        return str(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The component's JSON config. Raises `CheckpointError` if there is none."""
        with naming(self.folder, "read"):
            for file_name in _CONFIG_FILES:
                if (self.folder / file_name).is_file():
                    return read_json_object(self.folder / file_name)
        raise CheckpointError(str(self.folder), f"has no config, expected one of {', '.join(_CONFIG_FILES)}")

    @cached_property
    def weights(self) -> WeightFiles:
        """The weight files, those that cannot be read too. Raises `CheckpointError` if it is not known which."""
        return read_weight_files(self.folder)

    @property
    def files(self) -> tuple[SafetensorsFile, ...]:
        """The checked headers of the weight files, in order of file name."""
        return self.weights.whole()

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""
        return _by_name(self.files)

    @property
    def num_parameters(self) -> int:
        """Number of stored tensor elements."""
        return sum(info.num_elements for info in self.tensors.values())

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor, by default in its stored type. Raises `CheckpointError` for an unknown name."""
        if name not in self.tensors:
            raise CheckpointError(str(self.folder), f"has no tensor {name}")
        return read_tensor(self.tensors[name], dtype=dtype, device=device)

    def misfits(self, module: nn.Module) -> tuple[Problem, ...]:
        """Say what of the stored tensors does not fit a module, and which files cannot be read; reads headers only."""
        weights = self.weights
        unreadable = [finding for error in weights.errors for finding in error.findings]
        return (*unreadable, *find_misfits(_by_name(weights.files), module, unread=weights.unread))

    def load_into(
        self,
        module: nn.Module,
        *,
        dtype: DTypeChoice,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        only: NameChoice | None = None,
    ) -> None:
        """Fill a module as `Component.load_into` says."""
        load_tensors(self.tensors, module, str(self.folder), dtype=dtype, device=device, progress=progress, only=only)


class Checkpoint:
    """An opened checkpoint folder. Build it with `open_checkpoint`."""

    def __init__(self, path: Path, index: Mapping[str, Any], components: Mapping[str, ComponentReader]) -> None:
        self.path = path
        self.index = index
        self.components = components

    @property
    def name(self) -> str:
        return str(self.path)

    def component(self, name: str) -> ComponentReader:
        """Return a component's reader.

        Raises `CheckpointError` for one that the index does not name, with those that it does, or without a folder.
        """
        if name not in self.components:
            raise CheckpointError(str(self.path), f"has no component {name}, only {', '.join(sorted(self.components))}")
        with naming(self.components[name].folder, "read"):
            is_there = self.components[name].folder.is_dir()
        if not is_there:
            raise CheckpointError(str(self.path), f"{_INDEX} names the component {name}, but there is no folder {name}")
        return self.components[name]

    @cached_property
    def digest(self) -> str:
        """Content digest in hex; see `sampled_digest`. Files of no component don't count."""
        files = [self.path / _INDEX]
        with naming(self.path, "read"):
            for reader in self.components.values():
                files += [file for file in reader.folder.rglob("*") if file.is_file()]
        return sampled_digest(self.path, files)


def require_folder(path: Path | str) -> Path:
    """Return the folder of a checkpoint. Raises `CheckpointError` if there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(str(folder), "is no folder" if folder.exists() else "checkpoint folder does not exist")
    return folder


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint folder. What is wrong with a component is said when that is asked for.

    Raises:
        CheckpointError: for a missing folder, or a missing or malformed `model_index.json`.
    """
    folder = require_folder(path)
    if not (folder / _INDEX).is_file():
        raise CheckpointError(str(folder), f"is no diffusers checkpoint: it has no {_INDEX}")
    index = read_json_object(folder / _INDEX)
    components = {}
    for name, entry in index.items():
        match entry:
            case [str(library), str(class_name)]:
                components[name] = ComponentReader(
                    name=name, folder=folder / name, library=library, class_name=class_name
                )
    foreign = [name for name in components if not is_plain_name(name)]
    if foreign:
        names = ", ".join(describe(name) for name in foreign)
        raise CheckpointError(str(folder), f"{_INDEX} names components whose names are no plain ones: {names}")
    return Checkpoint(folder, index, components)


def _by_name(files: Iterable[SafetensorsFile]) -> dict[str, TensorInfo]:
    return {info.name: info for file in files for info in file.tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weights of a folder as far as they can be read.

    `errors` has one for each file that is broken, not there, or at odds with the index; `unread` has the names that the
    index gives to files that cannot be read, or do not have them.
    """

    folder: Path
    files: tuple[SafetensorsFile, ...]
    errors: tuple[CheckpointError, ...] = ()
    unread: frozenset[str] = frozenset()

    def whole(self) -> tuple[SafetensorsFile, ...]:
        """Return the files. Raises `CheckpointError` if anything is wrong with them, with all of it."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise CheckpointError(str(self.folder), *(each for error in self.errors for each in error.findings))
        return self.files


def weight_files(folder: Path) -> tuple[SafetensorsFile, ...]:
    """Read the headers of a component folder's weights, one file or shards with an index.

    Raises `CheckpointError` with all that is wrong.
    """
    return read_weight_files(folder).whole()


def read_weight_files(folder: Path) -> WeightFiles:
    """Read the headers that can be read of a component folder's weights.

    Raises `CheckpointError` if there are no weights, several sets of them, or an index that is none.
    """
    singles = [folder / f"{stem}.safetensors" for stem in _WEIGHT_STEMS]
    indexes = [folder / f"{stem}.safetensors.index.json" for stem in _WEIGHT_STEMS]
    with naming(folder, "read"):
        found = [file for file in singles + indexes if file.is_file()]
    if not found:
        names = ", ".join(file.name for file in singles + indexes)
        raise CheckpointError(str(folder), f"has no weights, expected one of {names}")
    if len(found) > 1:
        raise CheckpointError(
            str(folder), f"has several sets of weights, keep one of {', '.join(file.name for file in found)}"
        )
    if found[0] in singles:
        return WeightFiles(folder=folder, files=(read_safetensors_header(found[0]),))
    return _sharded_files(found[0])


def _sharded_files(index_file: Path) -> WeightFiles:
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and is_plain_name(shard) for shard in weight_map.values()
    ):
        raise CheckpointError(str(index_file), "weight_map must map tensor names to file names in the same folder")
    shards = sorted(set(weight_map.values()))
    with naming(index_file.parent, "read"):
        missing = [shard for shard in shards if not (index_file.parent / shard).is_file()]
    errors, files, broken = [], [], set(missing)
    if missing:
        errors.append(CheckpointError(str(index_file), f"names shards that do not exist: {', '.join(missing)}"))
    for shard in shards:
        if shard not in missing:
            try:
                files.append(read_safetensors_header(index_file.parent / shard))
            except CheckpointError as error:
                errors.append(error)
                broken.add(shard)
    unread = frozenset(name for name, shard in weight_map.items() if shard in broken)
    if found := _index_problems(weight_map, files, unread):
        errors.append(CheckpointError(str(index_file), *found))
    held = {info.name for file in files for info in file.tensors}
    return WeightFiles(
        folder=index_file.parent, files=tuple(files), errors=tuple(errors), unread=frozenset(weight_map) - held
    )


def _index_problems(
    weight_map: Mapping[str, str], files: Iterable[SafetensorsFile], unread: frozenset[str]
) -> tuple[Problem, ...]:
    """Compare the index with what the shards hold."""
    shards_of: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for info in file.tensors:
            shards_of[info.name].append(file.file.name)
    unknown = {name: shards[0] for name, shards in shards_of.items() if name not in weight_map}
    elsewhere = {
        name: shards[0]
        for name, shards in shards_of.items()
        if len(shards) == 1 and weight_map.get(name, shards[0]) != shards[0]
    }
    problems = {
        "tensors that no shard holds": [name for name in weight_map if name not in shards_of and name not in unread],
        "tensors that the index lacks": [f"{name} in {shard}" for name, shard in unknown.items()],
        "tensors in another shard than the index says": [
            f"{name} in {shard} instead of {weight_map[name]}" for name, shard in elsewhere.items()
        ],
        "tensors in several shards": [
            f"{name} in {' and '.join(shards)}" for name, shards in shards_of.items() if len(shards) > 1
        ],
    }
    return listed((title, sorted(names)) for title, names in problems.items())
