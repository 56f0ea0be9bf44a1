"""What a checkpoint's `experiment_cfg/conf.yaml` says about observations and actions.

The file is the configuration of a training run and nests these settings differently from run to run, so they are looked
for by key wherever they stand. Where a setting stands with several values, those below a key that names our robot
count; if they still differ, that is a problem and not a choice. Keys that stand beside one that names our robot, and
are named like it but for the robot's place, are read by what stands in that place:

    another robot of the training code   all below it is of that robot, and left out
    anything else                        whose it is, is unclear: a setting that is only there, or that differs there
                                         from what stands elsewhere, is a problem unless our robot has one of its own
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from worldmodel.dreamzero.normalize import NormalizationMode

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_CONFIG_VALUES = 1_000_000
"""Values of the file, repeated parts counted as often as they are repeated: a few lines can stand for billions."""

KINDS = ("video", "state", "action")

PROMPT_SWITCHES = ("formalize_language", "always_use_default_instruction")
"""Settings that make the prompt another text, in ways that are not offered: punctuation away, or always the same."""

T = TypeVar("T")

KeyPath = tuple[str, ...]
"""Keys that lead to a table."""

Table = tuple[KeyPath, Mapping[str, object]]

Frame = tuple[KeyPath, str, str]
"""A key that names our robot: the keys above it, and what its own name has before and after the robot's."""

ROBOTS = ("oxe_droid", "agibot", "yam", "xdof", "gr1_unified", "mecka_hands", "lapa", "dream")
"""Embodiment tags of the training code. Source: DreamZero official code, its table of embodiments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings that were found; None or empty where the file says nothing. `was_read` is false if it could not say.

    `keys` has, for each of `KINDS`, the names in order, without their kind in front. `modes` maps ``state.name`` and
    ``action.name`` to how it is normalised, `rotations` those that are turned into another representation to that one.
    `statistics_by_row`: those of relative actions are for each row of a chunk. `view_size` is (height, width) of a
    camera's view. `misstated`: settings that stand there, but as what can't be used, which is a problem already.
    """

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modes: Mapping[str, NormalizationMode] = field(default_factory=dict)
    rotations: Mapping[str, str] = field(default_factory=dict)
    relative_action: bool | None = None
    relative_action_keys: tuple[str, ...] | None = None
    statistics_by_row: bool = False
    view_size: tuple[int, int] | None = None
    misstated: frozenset[str] = frozenset()
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
        # A tree that holds itself ends in a RecursionError too, and a date that there is not in a ValueError.
        tables = list(_tables(_load_yaml(content), ()))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problems.append(f"{file.name}: is not valid YAML ({str(error).splitlines()[0]})")
        return TrainingConfig(was_read=False)
    return _Finder(tables, tag, file.name, problems).read()


def _load_yaml(content: bytes) -> object:
    """Parse YAML without repeated keys. Raises `yaml.YAMLError`, `RecursionError`, `ValueError`."""
    import yaml

    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_repeated_keys(root)
        if _num_values(root, {}) > MAX_CONFIG_VALUES:
            raise yaml.YAMLError(f"it repeats its parts until there are more than {MAX_CONFIG_VALUES} of them")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _refuse_repeated_keys(root: object) -> None:
    """Raise `yaml.YAMLError` for a key that stands twice in one table. Nodes may be shared, and hold themselves."""
    import yaml

    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        children: list[object] = []
        if isinstance(node, yaml.MappingNode):
            found: set[str] = set()
            for key, value in node.value:
                children += [key, value]
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in found:
                        where = f"line {key.start_mark.line + 1}"
                        raise yaml.YAMLError(f"key {key.value!r} stands there twice, the second time in {where}")
                    found.add(key.value)
        elif isinstance(node, yaml.SequenceNode):
            children += node.value
        for child in children:
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _num_values(node: object, known: dict[int, int]) -> int:
    """Count a node and all below it, those that are shared as often as they are reached."""
    import yaml

    if id(node) not in known:
        children: list[object] = []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


class _Finder:
    def __init__(self, tables: list[Table], tag: str, name: str, problems: list[str]) -> None:
        self._word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9])")
        self._frames = {frame for path, _ in tables if (frame := self._frame(path)) is not None}
        others = "|".join(re.escape(robot) for robot in ROBOTS if robot != tag)
        self._other_robot = re.compile(rf"(?<![A-Za-z0-9])(?:{others})(?![A-Za-z0-9])")
        self._tables = [(path, table) for path, table in tables if not self._is_of_another(path)]
        self._name = name
        self._problems = problems
        self._misstated: set[str] = set()

    def read(self) -> TrainingConfig:
        relative = self._read("relative_action", bool, "true or false")
        by_row = self._read("relative_action_per_horizon", bool, "true or false")
        relative_keys = self._read("relative_action_keys", list, "a list of keys")
        keys = {kind: self._keys(kind) for kind in KINDS}
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
            misstated=frozenset(self._misstated),
        )

    def _read(self, key: str, kind: type[T], expected: str) -> T | None:
        """Return the value of a setting, None if it is not said; one of another type is a problem."""
        return self._typed(key, self._one(key, self._values(key)), kind, expected)

    def _typed(self, key: str, value: object, kind: type[T], expected: str) -> T | None:
        if value is None or isinstance(value, kind):
            return value
        self._misstate(key, f"expected {expected}, got {value!r:.80}")
        return None

    def _misstate(self, key: str, problem: str) -> None:
        self._misstated.add(key)
        self._problems.append(f"{self._name}: {key}: {problem}")

    def _one(self, key: str, found: list[tuple[KeyPath, T]]) -> T | None:
        """Return the one value of a setting, None if there is none; note a problem if there are several."""
        values = _different(found)
        if len(values) > 1:
            values = _different([(path, value) for path, value in found if self._is_ours(path)]) or values
        if len(values) > 1:
            self._misstated.add(key)
            self._problems.append(f"{self._name}: {key} stands there with different values: {values}")
        elif values and (unclear := self._only_unclear(found)) is not None:
            self._misstate(key, f"stands only below {unclear}, which may be of another robot: write it below yours")
            return None
        return values[0] if values else None

    def _only_unclear(self, found: Iterable[tuple[KeyPath, object]]) -> str | None:
        """Return the first key that may be of another robot, None if any value is not below one."""
        below = [self._unclear_key(path) for path, _ in found]
        return None if None in below else below[0]

    def _is_ours(self, path: KeyPath) -> bool:
        return any(self._word.search(part) for part in path)

    def _frame(self, path: KeyPath) -> Frame | None:
        """Return where the first key of a path that names our robot stands, and what its name has around that."""
        for depth, part in enumerate(path):
            if (word := self._word.search(part)) is not None:
                return path[:depth], part[: word.start()], part[word.end() :]
        return None

    def _unclear_key(self, path: KeyPath) -> str | None:
        """Return the key of a path that is named like one of our robot's beside it, None if there is none."""
        if self._is_ours(path):
            return None
        for above, before, after in self._frames:
            beside = path[len(above)] if path[: len(above)] == above and len(path) > len(above) else None
            if beside is not None and beside.startswith(before) and beside.endswith(after):
                return beside
        return None

    def _is_of_another(self, path: KeyPath) -> bool:
        """Return whether a path goes through the key of another robot beside that of ours."""
        key = self._unclear_key(path)
        return key is not None and self._other_robot.search(key) is not None

    def _concerns_us(self, found: Iterable[tuple[KeyPath, object]]) -> bool:
        return any(self._is_ours(path) for path, _ in found)

    def _values(self, key: str) -> list[tuple[KeyPath, object]]:
        """Return what stands there for a key and where; nothing (null) says nothing."""
        return [(path, value) for path, table in self._tables if (value := table.get(key)) is not None]

    def _keys(self, kind: str) -> tuple[str, ...] | None:
        found: list[tuple[KeyPath, object]] = []
        for path, table in self._tables:
            entry = table.get(kind)
            if isinstance(entry, Mapping) and (keys := entry.get("modality_keys")) is not None:
                found.append((path, keys))
        name = f"{kind}.modality_keys"
        keys = self._typed(name, self._one(name, found), list, "a list of keys")
        return None if keys is None else tuple(str(key).removeprefix(f"{kind}.") for key in keys)

    def _modes(self) -> dict[str, NormalizationMode]:
        by_key: dict[str, list[tuple[KeyPath, object]]] = {}
        tables = self._table_values("normalization_modes")
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
            if self._only_unclear(found) is not None:
                # A key of ours is then missed where it is looked for.
                continue
            word = self._one(f"normalization of {key}", found)
            try:
                modes[key] = NormalizationMode(str(word))
            except ValueError:
                if len(words) == 1:
                    known = ", ".join(NormalizationMode)
                    self._misstate(f"normalization of {key}", f"expected one of {known}, got {word!r}")
        return modes

    def _table_values(self, key: str) -> list[tuple[KeyPath, Mapping[object, object]]]:
        """Return the tables of a key; what is no table is a problem."""
        tables: list[tuple[KeyPath, Mapping[object, object]]] = []
        for path, value in self._values(key):
            if isinstance(value, Mapping):
                tables.append((path, value))
            else:
                self._misstate(key, f"expected a table, got {value!r:.80}")
        return tables

    def _rotations(self) -> dict[str, str]:
        tables = self._table_values("target_rotations")
        own = {str(key) for path, table in tables if self._is_ours(path) for key in table}
        return {
            str(key): str(word)
            for path, table in tables
            for key, word in table.items()
            if word is not None and (self._unclear_key(path) is None or str(key) not in own)
        }

    def _refuse_prompt_switches(self) -> None:
        for key in PROMPT_SWITCHES:
            found = self._values(key)
            clear = [value for path, value in found if self._unclear_key(path) is None]
            values = clear if self._concerns_us(found) else [value for _, value in found]
            if (wrong := next((value for value in values if value not in (None, False)), None)) is not None:
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
