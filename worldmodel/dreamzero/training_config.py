"""What a checkpoint's `experiment_cfg/conf.yaml` says about observations and actions.

The file is the configuration of a training run and nests these settings differently from run to run, so they are looked
for by key wherever they stand, but not below the keys of other robots: those that are named as one of ours beside them
is, with something else in the place of our robot. Where a setting stands with several values, those below a key that
names our robot count; if they still differ, that is a problem and not a choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from worldmodel.dreamzero.normalize import NormalizationMode

MAX_CONFIG_BYTES = 4 * 1024 * 1024

KINDS = ("video", "state", "action")

PROMPT_SWITCHES = ("formalize_language", "always_use_default_instruction")
"""Settings that make the prompt another text, in ways that are not offered: punctuation away, or always the same."""

T = TypeVar("T")

KeyPath = tuple[str, ...]
"""Keys that lead to a table."""

Table = tuple[KeyPath, Mapping[str, object]]

Frame = tuple[KeyPath, str, str]
"""A key that names our robot: the keys above it, and what its own name has before and after the robot's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings that were found; None or empty where the file says nothing. `was_read` is false if it could not say.

    `keys` has, for each of `KINDS`, the names in order, without their kind in front. `modes` maps ``state.name`` and
    ``action.name`` to how it is normalised, `rotations` those that are turned into another representation to that one.
    `statistics_by_row`: those of relative actions are for each row of a chunk. `view_size` is (height, width) of a
    camera's view.
    """

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modes: Mapping[str, NormalizationMode] = field(default_factory=dict)
    rotations: Mapping[str, str] = field(default_factory=dict)
    relative_action: bool | None = None
    relative_action_keys: tuple[str, ...] | None = None
    statistics_by_row: bool = False
    view_size: tuple[int, int] | None = None
    was_read: bool = True


def read_training_config(file: Path, tag: str, problems: list[str]) -> TrainingConfig:
    """Read the settings of one embodiment. Appends to `problems` if there is no such file, or it contradicts itself."""
    if not file.is_file():
        problems.append(f"{file.parent.name}/{file.name} is missing: it says how actions and states are normalised")
        return TrainingConfig(was_read=False)
    # Imported here, so that a model made without a checkpoint needs no YAML library.
    import yaml

    content = file.read_bytes()
    if len(content) > MAX_CONFIG_BYTES:
        problems.append(f"{file.name}: longer than {MAX_CONFIG_BYTES} bytes")
        return TrainingConfig(was_read=False)
    try:
        # A tree that holds itself ends in a RecursionError too.
        tables = list(_tables(yaml.safe_load(content), ()))
    except (yaml.YAMLError, RecursionError) as error:
        problems.append(f"{file.name}: is not valid YAML ({str(error).splitlines()[0]})")
        return TrainingConfig(was_read=False)
    return _Finder(tables, tag, file.name, problems).read()


class _Finder:
    def __init__(self, tables: list[Table], tag: str, name: str, problems: list[str]) -> None:
        self._word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9])")
        frames = {frame for path, _ in tables if (frame := self._frame(path)) is not None}
        self._tables = [(path, table) for path, table in tables if not self._is_of_another(path, frames)]
        self._name = name
        self._problems = problems

    def read(self) -> TrainingConfig:
        relative = self._one("relative_action", self._values("relative_action", bool))
        by_row = self._one("relative_action_per_horizon", self._values("relative_action_per_horizon", bool))
        relative_keys = self._one("relative_action_keys", self._values("relative_action_keys", list))
        keys = {kind: self._one(f"{kind}.modality_keys", self._keys(kind)) for kind in KINDS}
        self._refuse_prompt_switches()
        return TrainingConfig(
            keys={kind: found for kind, found in keys.items() if found is not None},
            modes=self._modes(),
            rotations=self._rotations(),
            # Either switch makes actions relative; the second gives every row statistics of its own besides.
            relative_action=True if by_row else relative,
            relative_action_keys=None if relative_keys is None else tuple(map(str, relative_keys)),
            statistics_by_row=bool(by_row),
            view_size=self._one("VideoResize", self._view_sizes()),
        )

    def _one(self, key: str, found: list[tuple[KeyPath, T]]) -> T | None:
        """Return the one value of a setting, None if there is none; note a problem if there are several."""
        values = _different(found)
        if len(values) > 1:
            values = _different([(path, value) for path, value in found if self._is_ours(path)]) or values
        if len(values) > 1:
            self._problems.append(f"{self._name}: {key} stands there with different values: {values}")
        return values[0] if values else None

    def _is_ours(self, path: KeyPath) -> bool:
        return any(self._word.search(part) for part in path)

    def _frame(self, path: KeyPath) -> Frame | None:
        """Return where the first key of a path that names our robot stands, and what its name has around that."""
        for depth, part in enumerate(path):
            if (word := self._word.search(part)) is not None:
                return path[:depth], part[: word.start()], part[word.end() :]
        return None

    def _is_of_another(self, path: KeyPath, frames: Iterable[Frame]) -> bool:
        """Return whether a path goes through a key that is named as one of our robot's beside it, for another robot."""
        return not self._is_ours(path) and any(
            len(path) > len(above)
            and path[: len(above)] == above
            and path[len(above)].startswith(before)
            and path[len(above)].endswith(after)
            for above, before, after in frames
        )

    def _concerns_us(self, found: Iterable[tuple[KeyPath, object]]) -> bool:
        return any(self._is_ours(path) for path, _ in found)

    def _values(self, key: str, kind: type[T]) -> list[tuple[KeyPath, T]]:
        return [(path, value) for path, table in self._tables if isinstance(value := table.get(key), kind)]

    def _keys(self, kind: str) -> list[tuple[KeyPath, tuple[str, ...]]]:
        found: list[tuple[KeyPath, tuple[str, ...]]] = []
        for path, table in self._tables:
            entry = table.get(kind)
            keys = entry.get("modality_keys") if isinstance(entry, Mapping) else None
            if isinstance(keys, list):
                found.append((path, tuple(str(key).removeprefix(f"{kind}.") for key in keys)))
        return found

    def _modes(self) -> dict[str, NormalizationMode]:
        by_key: dict[str, list[tuple[KeyPath, str]]] = {}
        tables = self._values("normalization_modes", dict)
        names_ours = self._concerns_us(tables)
        for path, table in tables:
            for key, word in table.items():
                by_key.setdefault(str(key), []).append((path, str(word)))
        modes: dict[str, NormalizationMode] = {}
        for key, found in by_key.items():
            words = _different(found)
            is_clear = len(words) == 1 and words[0] in tuple(NormalizationMode)
            if names_ours and not is_clear and not self._concerns_us(found):
                # Only other robots have this key, and what they say of it is no concern of ours.
                continue
            word = self._one(f"normalization of {key}", found)
            try:
                modes[key] = NormalizationMode(str(word))
            except ValueError:
                known = ", ".join(NormalizationMode)
                self._problems.append(f"{self._name}: normalization of {key}: expected one of {known}, got {word!r}")
        return modes

    def _rotations(self) -> dict[str, str]:
        return {
            str(key): str(word)
            for _, table in self._values("target_rotations", dict)
            for key, word in table.items()
            if word is not None
        }

    def _refuse_prompt_switches(self) -> None:
        for key in PROMPT_SWITCHES:
            values = [value for _, value in self._values(key, object)]
            wrong = next((value for value in values if value not in (None, False)), None)
            if wrong is not None:
                self._problems.append(
                    f"{self._name}: {key}: expected false, the only form that is served, got {wrong!r}"
                )

    def _view_sizes(self) -> list[tuple[KeyPath, tuple[int, int]]]:
        found: list[tuple[KeyPath, tuple[int, int]]] = []
        for path, table in self._tables:
            match table:
                case {"_target_": str(target), "height": int(height), "width": int(width)}:
                    if target.endswith("VideoResize"):
                        found.append((path, (height, width)))
        return found


def _different(found: list[tuple[KeyPath, T]]) -> list[T]:
    values: list[T] = []
    for _, value in found:
        if value not in values:
            values.append(value)
    return values


def _tables(tree: object, path: KeyPath) -> Iterator[Table]:
    """Yield every table of a tree with the keys that lead to it."""
    if isinstance(tree, Mapping):
        yield path, tree
        for key, value in tree.items():
            yield from _tables(value, (*path, str(key)))
    elif isinstance(tree, list):
        for value in tree:
            yield from _tables(value, path)
