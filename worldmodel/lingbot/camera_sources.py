"""What moves a camera, latent frame by latent frame: the five sources, and what each does. Torch-free, functional.

    HeldKeys         keys that stay down until told otherwise (also the rest state: no keys)
    ScriptQueue      key sets for a number of latent frames, then rest
    TrajectoryQueue  relative poses for a number of latent frames, then rest
    Velocity         the same relative pose in every latent frame, without end
    TargetMotion     interpolation to a pose, then rest

Which source is in force belongs to `reducer.py`.

Shape suffixes: n latent frames, 4 rows or columns of a pose, or (fx, fy, cx, cy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

import numpy as np

from worldmodel.lingbot.config import CameraScale
from worldmodel.lingbot.controls import Action, Actions, CameraMotion
from worldmodel.lingbot.poses import (
    STEP,
    Float64,
    frozen,
    key_step,
    largest_step,
    nlerp_poses,
    pitch_of,
    relative,
    rotations_from_quaternions,
)

SMALLEST_STEP = 1e-9
"""Largest step that counts as rounding: scaling it up to 1 would turn noise into motion."""

Intrinsics = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldKeys:
    keys: Actions = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptQueue:
    frames: tuple[Actions, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryQueue:
    """What is left of a trajectory: relative poses [n, 4, 4], intrinsics [n, 4] at the target size, the clip's
    scale."""

    relative_n44: Float64
    intrinsics_n4: Float64
    largest_step: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Velocity:
    relative_44: Float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetMotion:
    """Way from `start_44` to `target_44` in `num_latent_frames`, of which `done_latent_frames` are behind."""

    start_44: Float64
    target_44: Float64
    num_latent_frames: int
    done_latent_frames: int = 0


CameraSource = HeldKeys | ScriptQueue | TrajectoryQueue | Velocity | TargetMotion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CameraReducerState:
    """Camera of one session after its last committed chunk; arrays are read-only float64.

    `pose_44` is camera-to-world with the run's first camera as the world. `intrinsics` (fx, fy, cx, cy at the target
    size) stays after a trajectory that brought its own, until the next trajectory. `largest_step` is over the run.
    """

    pose_44: Float64
    intrinsics: Intrinsics
    pitch_rad: float = 0.0
    source: CameraSource = HeldKeys()
    largest_step: float = 0.0


class FoldedKeys(NamedTuple):
    """Key sets of a chunk, and for each shown snapshot (its index, the latent frame where it shows), both ascending."""

    frames: tuple[Actions, ...]
    shown: tuple[tuple[int, int], ...]

    def first_frame_of(self, snapshot: int) -> int:
        """Return the latent frame that first shows this snapshot or one that followed it."""
        return next(frame for index, frame in self.shown if index >= snapshot)


class Movement(NamedTuple):
    """What a source does with one piece of a chunk, before scaling."""

    poses_n44: Float64
    relative_n44: Float64
    next: CameraSource
    scale: CameraScale
    keys: tuple[Actions, ...]
    intrinsics_n4: Float64
    pitch_rad: float | None = None
    clip_step: float | None = None


def fold_keys(held: Actions, snapshots: Sequence[Actions], num_latent_frames: int) -> FoldedKeys:
    """Spread the key snapshots that arrived since the last chunk over the latent frames of this one.

    The last snapshot fills the chunk, except that a key pressed since then and up again must still be seen: each
    snapshot with such a press takes one latent frame at the start. Presses that find no frame of their own share the
    last such frame. With a single latent frame the press is shown and the last snapshot waits for the next chunk.
    """
    final = frozenset(snapshots[-1])
    before = frozenset(held)
    taps: list[tuple[int, frozenset[Action]]] = []
    for index, snapshot in enumerate(snapshots):
        now = frozenset(snapshot)
        if (now - before) - final:
            taps.append((index, now))
        before = now
    room = max(num_latent_frames - 1, 1)
    sets: list[frozenset[Action]] = []
    shown: list[tuple[int, int]] = []
    for index, keys in taps:
        if len(sets) < room:
            sets.append(keys)
        else:
            sets[-1] |= keys
        shown.append((index, len(sets) - 1))
    shown.append((len(snapshots) - 1, min(len(sets), num_latent_frames - 1)))
    sets.extend([final] * (num_latent_frames - len(sets)))
    return FoldedKeys(frames=tuple(_ordered(keys) for keys in sets), shown=tuple(shown))


def _ordered(keys: frozenset[Action]) -> Actions:
    return tuple(action for action in Action if action in keys)


# ---------------------------------------------------------------- sources


def move(source: CameraSource, state: CameraReducerState, count: int, folded: FoldedKeys | None) -> Movement:
    """Advance the camera by `count` latent frames under one source."""
    match source:
        case HeldKeys(keys=keys):
            return _walk(state, folded.frames if folded else (keys,) * count, source)
        case ScriptQueue(frames=frames):
            now, rest = frames[:count], frames[count:]
            neutral: tuple[Actions, ...] = ((),) * (count - len(now))
            return _walk(state, now + neutral, ScriptQueue(frames=rest) if rest else HeldKeys())
        case TrajectoryQueue():
            return _follow(state, source, count)
        case Velocity(relative_44=step):
            repeated = np.tile(step, (count, 1, 1))
            return Movement(
                poses_n44=_accumulate(state.pose_44, repeated),
                relative_n44=repeated,
                next=source,
                scale=CameraScale.UNIT,
                keys=((),) * count,
                intrinsics_n4=_still(state, count),
            )
        case TargetMotion():
            return _approach(state, source, count)
        case _:
            assert_never(source)


def _walk(state: CameraReducerState, frames: tuple[Actions, ...], following: CameraSource) -> Movement:
    pose, pitch_rad = state.pose_44, state.pitch_rad
    poses = []
    for keys in frames:
        pose, pitch_rad = key_step(pose, pitch_rad, keys)
        poses.append(pose)
    poses_n44 = np.stack(poses)
    return Movement(
        poses_n44=poses_n44,
        relative_n44=_differences(state.pose_44, poses_n44),
        next=following,
        scale=CameraScale.CHUNK_MAX,
        keys=frames,
        intrinsics_n4=_still(state, len(frames)),
        pitch_rad=pitch_rad,
    )


def _follow(state: CameraReducerState, queue: TrajectoryQueue, count: int) -> Movement:
    now = queue.relative_n44[:count]
    missing = count - len(now)
    relative_n44 = np.concatenate([now, np.tile(np.eye(4), (missing, 1, 1))])
    rows = queue.intrinsics_n4[:count]
    rest: CameraSource = HeldKeys()
    if len(queue.relative_n44) > count:
        rest = replace(queue, relative_n44=queue.relative_n44[count:], intrinsics_n4=queue.intrinsics_n4[count:])
    return Movement(
        poses_n44=_accumulate(state.pose_44, relative_n44),
        relative_n44=relative_n44,
        next=rest,
        scale=CameraScale.CLIP_MAX,
        keys=((),) * count,
        intrinsics_n4=np.concatenate([rows, np.tile(rows[-1], (missing, 1))]),
        clip_step=queue.largest_step,
    )


def _approach(state: CameraReducerState, motion: TargetMotion, count: int) -> Movement:
    frames = motion.done_latent_frames + np.arange(1, count + 1)
    fractions = np.minimum(frames / motion.num_latent_frames, 1.0)
    poses_n44 = nlerp_poses(motion.start_44, motion.target_44, fractions)
    done = motion.done_latent_frames + count
    return Movement(
        poses_n44=poses_n44,
        relative_n44=_differences(state.pose_44, poses_n44),
        next=HeldKeys() if done >= motion.num_latent_frames else replace(motion, done_latent_frames=done),
        scale=CameraScale.UNIT,
        keys=((),) * count,
        intrinsics_n4=_still(state, count),
    )


def _still(state: CameraReducerState, count: int) -> Float64:
    """Return the intrinsics of latent frames that have none of their own."""
    return np.tile(np.array(state.intrinsics), (count, 1))


def after(state: CameraReducerState, movement: Movement) -> CameraReducerState:
    """Return the state after a movement."""
    pose = frozen(movement.poses_n44[-1].copy())
    fx, fy, cx, cy = movement.intrinsics_n4[-1].tolist()
    return CameraReducerState(
        pose_44=pose,
        intrinsics=(fx, fy, cx, cy),
        pitch_rad=pitch_of(pose) if movement.pitch_rad is None else movement.pitch_rad,
        source=movement.next,
        largest_step=max(state.largest_step, largest_step(movement.relative_n44)),
    )


def motion_pose(motion: CameraMotion) -> Float64:
    pose = np.eye(4)
    pose[:3, :3] = rotations_from_quaternions(np.array([motion.rotation]))[0]
    pose[:3, 3] = motion.translation
    return frozen(pose)


def _differences(before_44: Float64, poses_n44: Float64) -> Float64:
    return relative(np.concatenate([before_44[None], poses_n44[:-1]]), poses_n44)


def _accumulate(before_44: Float64, relative_n44: Float64) -> Float64:
    poses = []
    for step in relative_n44:
        before_44 = before_44 @ step
        poses.append(before_44)
    return np.stack(poses)


def scaled(movements: Sequence[Movement], override: CameraScale | None, run_step: float) -> Float64:
    """Divide translations as the rules say; where there is no motion they stay as they are.

    `run_step` is the largest step of the run, this chunk included.
    """
    rules = [override or movement.scale for movement in movements]
    by_chunk = [movement for movement, rule in zip(movements, rules, strict=True) if rule is CameraScale.CHUNK_MAX]
    chunk_step = max((largest_step(movement.relative_n44) for movement in by_chunk), default=0.0)
    divided = []
    for movement, rule in zip(movements, rules, strict=True):
        match rule:
            case CameraScale.CHUNK_MAX:
                divisor = chunk_step
            case CameraScale.CLIP_MAX:
                divisor = run_step if movement.clip_step is None else movement.clip_step
            case CameraScale.UNIT:
                divisor = STEP
            case _:
                assert_never(rule)
        divided.append(movement.relative_n44.copy())
        if divisor > SMALLEST_STEP:
            divided[-1][:, :3, 3] /= divisor
    return np.concatenate(divided)
