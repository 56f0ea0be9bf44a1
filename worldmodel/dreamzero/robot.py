"""One robot as a checkpoint knows it: what a request must hold, and how numbers become the network's and back.

Shapes: N rows of an action chunk, A numbers of a row, S numbers of the state.
Source: DreamZero official code, its state and action transforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worldmodel.dreamzero.embodiments import KEY_PREFIX, Embodiment
from worldmodel.dreamzero.normalize import NormalizationMode, Normalizer, count_of_numbers, read_normalizer
from worldmodel.dreamzero.training_config import TrainingConfig
from worldmodel.json_checks import describe
from worldmodel.messages import RobotInfo, StateInput

ACTION_SPACE = "joint_position"
MAX_REQUEST_FRAMES = 64

DROID_KEYS = ("joint_position", "gripper_position")

MIN_SIDE, MAX_SIDE = 2, 16_384
"""Pixels of a camera's side. Of fewer nothing is left when the borders are cut off."""

NUM_VIEWS = (2, 3)
"""Cameras that can be tiled as in training: there a single view is not tiled, and a fourth one is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of state or action: `dims` are its places in the joined vector.

    `relative_to` are places of the raw state to which an action of this key is added, None if it is absolute.
    """

    name: str
    dims: slice
    normalizer: Normalizer
    relative_to: slice | None = None

    @property
    def num_dims(self) -> int:
        return int(self.dims.stop - self.dims.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Robot:
    """What requests hold and how they are read. `cameras` are request keys in tiling order."""

    embodiment: Embodiment
    cameras: tuple[str, ...]
    camera_height: int
    camera_width: int
    states: tuple[Field, ...]
    actions: tuple[Field, ...]

    @property
    def num_action_dims(self) -> int:
        return int(self.actions[-1].dims.stop)

    def info(self, action_horizon: int) -> RobotInfo:
        """Describe the robot to the server."""
        return RobotInfo(
            embodiment=self.embodiment.tag,
            cameras=self.cameras,
            states=tuple(StateInput(name=KEY_PREFIX + state.name, num_dims=state.num_dims) for state in self.states),
            image_height=self.camera_height,
            image_width=self.camera_width,
            max_request_frames=MAX_REQUEST_FRAMES,
            action_space=ACTION_SPACE,
            action_horizon=action_horizon,
            action_dims=self.num_action_dims,
            needs_wrist_camera=self.embodiment.needs_wrist_camera,
            num_external_cameras=self.embodiment.num_external_cameras,
            needs_stereo_camera=False,
        )

    def normalize_state(self, raw_S: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float32]:
        """Return the normalised state, padded with zeros to `width`."""
        out = np.zeros(width, np.float32)
        for state in self.states:
            out[state.dims] = state.normalizer.forward(raw_S[state.dims])
        return out

    def absolute_actions(
        self, normalized_NA: npt.NDArray[np.float32], raw_state_S: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float32]:
        """Return actions in the robot's units, [N, A] without padding.

        Relative keys are added to the state of the request as it came, not as it was normalised and clipped.
        """
        out = np.empty((normalized_NA.shape[0], self.num_action_dims), np.float32)
        for action in self.actions:
            values = action.normalizer.inverse(normalized_NA[:, action.dims].astype(np.float64))
            if action.relative_to is not None:
                values = values + raw_state_S[action.relative_to]
            out[:, action.dims] = values
        return out


def read_robot(
    metadata: Mapping[str, object],
    training: TrainingConfig,
    embodiment: Embodiment,
    *,
    state_width: int,
    action_width: int,
    action_rows: int,
    problems: list[str],
    cameras: tuple[str, ...] | None = None,
) -> Robot | None:
    """Build the robot of an embodiment from `metadata.json`. Appends to `problems` all that is missing or wrong.

    The file has entries by embodiment, or is the entry of one. `cameras` are video keys in tiling order, for a robot
    whose training run decided it; None takes that of `training`.
    """
    is_one_entry = embodiment.tag not in metadata and metadata.get("embodiment_tag", embodiment.tag) == embodiment.tag
    entry = metadata if is_one_entry else metadata.get(embodiment.tag)
    if not isinstance(entry, Mapping) or "statistics" not in entry or "modalities" not in entry:
        known = str(metadata.get("embodiment_tag") or ", ".join(map(str, metadata)) or "nothing")
        problems.append(f"metadata.json: no statistics of {embodiment.tag}, only of {known}")
        return None
    reader = _Reader(entry, training, embodiment, problems, elsewhere=_action_names(metadata))
    camera_keys, height, width = reader.cameras(cameras)
    states = reader.fields("state", state_width)
    actions = reader.relative(reader.fields("action", action_width, num_rows=action_rows), states)
    if problems:
        return None
    return Robot(
        embodiment=embodiment,
        cameras=camera_keys,
        camera_height=height,
        camera_width=width,
        states=states,
        actions=actions,
    )


def _action_names(metadata: Mapping[str, object]) -> set[str]:
    """Name the actions of all robots that the file has entries of."""
    names: set[str] = set()
    for entry in metadata.values():
        match entry:
            case {"modalities": {"action": dict(actions)}}:
                names.update(map(str, actions))
    return names


class _Reader:
    def __init__(
        self,
        entry: Mapping[str, object],
        training: TrainingConfig,
        embodiment: Embodiment,
        problems: list[str],
        *,
        elsewhere: set[str],
    ) -> None:
        self._entry = entry
        self._elsewhere = elsewhere
        self._training = training
        self._embodiment = embodiment
        self._problems = problems

    def _table(self, section: str, kind: str) -> Mapping[str, object]:
        tables = self._entry.get(section)
        table = tables.get(kind) if isinstance(tables, Mapping) else None
        if not isinstance(table, Mapping):
            self._problems.append(f"metadata.json: {section}.{kind} is missing")
            return {}
        return table

    def _keys(self, kind: str, known: Mapping[str, object], remedy: str = "write it there") -> tuple[str, ...]:
        """Name the keys in the order of the training run.

        Only one key needs no order, and states and actions of DROID have one of their own. The order of
        `metadata.json` means nothing: numbers or views in a wrong place would be taken for others.
        """
        if kind in self._training.keys:
            return self._training.keys[kind]
        if self._embodiment.tag == "oxe_droid":
            return DROID_KEYS
        if len(known) > 1 and self._is_silent(f"{kind}.modality_keys"):
            names = ", ".join(known)
            self._problems.append(
                f"conf.yaml: {kind}.modality_keys is missing, which is the order of {names}: {remedy}"
            )
        return tuple(known)

    def _is_silent(self, setting: str) -> bool:
        """Return whether `conf.yaml` could say a setting and does not."""
        return self._training.was_read and setting not in self._training.misstated

    def cameras(self, stated: tuple[str, ...] | None) -> tuple[tuple[str, ...], int, int]:
        """Return request keys in tiling order and the one size (height, width) that all cameras have."""
        table = self._table("modalities", "video")
        pairs = self._embodiment.cameras
        if pairs is None:
            names = stated or self._keys("video", table, 'write it there, or set model.options.cameras = ["...", ...]')
            pairs = tuple((name, name) for name in names)
        elif stated is not None:
            self._problems.append(f"model.options.cameras: the cameras of {self._embodiment.tag} have a fixed order")
        sizes = set()
        for key, _ in pairs:
            entry = table.get(key)
            resolution = entry.get("resolution") if isinstance(entry, Mapping) else None
            match resolution:
                case [int(width), int(height)] if min(width, height) >= MIN_SIDE and max(width, height) <= MAX_SIDE:
                    sizes.add((height, width))
                case _:
                    self._problems.append(
                        f"metadata.json: modalities.video.{key}.resolution must be [width, height], each from "
                        f"{MIN_SIDE} to {MAX_SIDE}, got {describe(resolution)}"
                    )
        if len(sizes) > 1:
            self._problems.append(f"metadata.json: cameras of different sizes are not supported: {sorted(sizes)}")
        if len(pairs) not in NUM_VIEWS:
            shown = ", ".join(name for name, _ in pairs) or "none"
            expected = " or ".join(map(str, NUM_VIEWS))
            self._problems.append(f"{self._embodiment.tag}: expected {expected} cameras, got {len(pairs)}: {shown}")
        height, width = next(iter(sizes), (1, 1))
        return tuple(KEY_PREFIX + request for _, request in pairs), height, width

    def fields(self, kind: str, width: int, *, num_rows: int | None = None) -> tuple[Field, ...]:
        """Lay the keys of state or action one after the other into a vector of at most `width` numbers.

        Of `num_rows` such vectors, each may have statistics of its own.
        """
        modalities, statistics = self._table("modalities", kind), self._table("statistics", kind)
        fields: list[Field] = []
        start = 0
        for key in self._keys(kind, modalities):
            entry = modalities.get(key)
            shape = entry.get("shape") if isinstance(entry, Mapping) else None
            match shape:
                case [int(num_dims)] if num_dims > 0:
                    pass
                case _:
                    self._problems.append(f"metadata.json: modalities.{kind}.{key}.shape must be one number")
                    continue
            dims = slice(start, start + num_dims)
            start += num_dims
            if rotation := self._training.rotations.get(f"{kind}.{key}"):
                self._problems.append(f"conf.yaml: target_rotations turns {kind}.{key} into {rotation}: not supported")
            mode = self._mode(f"{kind}.{key}")
            if mode is None:
                continue
            where = f"metadata.json: statistics.{kind}.{key}"
            normalizer = read_normalizer(
                statistics.get(key), mode, num_dims, where=where, problems=self._problems, num_rows=num_rows
            )
            fields.append(Field(name=key, dims=dims, normalizer=normalizer))
        if not 1 <= start <= width:
            self._problems.append(f"metadata.json: {kind} has {count_of_numbers(start)}, expected 1 to {width}")
        return tuple(fields)

    def _relative_names(self) -> tuple[str, ...]:
        """Return the actions that are relative; that it is not said is a problem."""
        training = self._training
        if training.relative_action is None and self._is_silent("relative_action"):
            self._problems.append("conf.yaml: relative_action is missing: expected true or false")
        if not training.relative_action:
            return ()
        if training.relative_action_keys is None:
            if self._is_silent("relative_action_keys"):
                self._problems.append("conf.yaml: relative_action is true, but relative_action_keys is missing")
            return ()
        return tuple(name.removeprefix("action.") for name in training.relative_action_keys)

    def _mode(self, name: str) -> NormalizationMode | None:
        """Return how a key is normalised; that it is not said is a problem."""
        mode = self._training.modes.get(name)
        if mode is None and self._is_silent("normalization_modes") and self._is_silent(f"normalization of {name}"):
            known = ", ".join(NormalizationMode)
            self._problems.append(f"conf.yaml: normalization_modes does not name {name}: expected one of {known}")
        return mode

    def relative(self, actions: tuple[Field, ...], states: tuple[Field, ...]) -> tuple[Field, ...]:
        """Mark the actions that are relative to the state of the same name.

        The file says this once for all robots of the training run, so that it may name actions of another one.

        The official code takes a missing `relative_action` for false; here it must be said, since a robot that adds
        nothing to actions which were meant to be added, or the other way round, moves to a wrong place.
        """
        names = self._relative_names()
        by_name = {state.name: state for state in states}
        marked = []
        for action in actions:
            if action.name not in names:
                marked.append(action)
                continue
            state = by_name.get(action.name)
            if state is None or state.num_dims != action.num_dims:
                self._problems.append(
                    f"relative action {action.name} needs a state of its name and {count_of_numbers(action.num_dims)}"
                )
                continue
            if self._training.statistics_by_row and not action.normalizer.is_by_row:
                self._problems.append(
                    f"metadata.json: statistics.action.{action.name} must be for each row of actions: conf.yaml has "
                    "relative_action_per_horizon true"
                )
            marked.append(
                Field(name=action.name, dims=action.dims, normalizer=action.normalizer, relative_to=state.dims)
            )
        unknown = sorted(set(names) - {action.name for action in actions} - self._elsewhere)
        if unknown:
            self._problems.append(f"relative_action_keys names no action: {', '.join(unknown)}")
        return tuple(marked)
