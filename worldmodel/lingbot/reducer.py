"""From the events of one chunk to the camera of each latent frame. Torch-free, functional.

`CameraReducer.prepare` is speculative: it reads a state and returns a plan that holds the next one. Committing a plan
means keeping `plan.state`; rolling back means dropping it; resetting means starting again from `initial()`.

What moves the camera is one of five sources, replaced as a whole by the last control of the chunk's events:

    HeldKeys         keys that stay down until told otherwise (also the rest state: no keys)
    ScriptQueue      key sets for a number of latent frames, then rest
    TrajectoryQueue  relative poses for a number of latent frames, then rest
    Velocity         the same relative pose in every latent frame, without end
    TargetMotion     interpolation to a pose, then rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

import numpy as np

from worldmodel.errors import RequestRefused
from worldmodel.lingbot.config import CameraScale, LingBotOptions
from worldmodel.lingbot.controls import (
    Action,
    Actions,
    CameraActionsState,
    CameraMotion,
    CameraScript,
    CameraTrajectory,
    MotionMode,
    decode_control,
)
from worldmodel.lingbot.poses import (
    STEP,
    Float64,
    framewise,
    frozen,
    key_step,
    largest_step,
    nlerp_poses,
    pitch_of,
    project_rotations,
    relative,
    rotations_from_quaternions,
)
from worldmodel.messages import AppliedEvent, ControlEvent

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CameraPlan:
    """Camera of the latent frames of one chunk, and the state to keep if the chunk commits; arrays are float64.

    `relative_n44` is each pose seen from the one before (frame 0: from the last pose of the chunk before), translations
    divided as `scale` says. `keys` are the key sets that acted, empty tuples where something else moved the camera.
    """

    state: CameraReducerState
    poses_n44: Float64
    relative_n44: Float64
    intrinsics_n4: Float64
    keys: tuple[Actions, ...]
    scale: CameraScale
    applied: tuple[AppliedEvent, ...]

    @property
    def pose(self) -> tuple[float, ...]:
        """Camera-to-world of the last latent frame, 16 numbers, row-major."""
        return tuple(self.poses_n44[-1].ravel().tolist())


class FoldedKeys(NamedTuple):
    """Key sets of a chunk, and for each shown snapshot (its index, the latent frame where it shows), both ascending."""

    frames: tuple[Actions, ...]
    shown: tuple[tuple[int, int], ...]

    def first_frame_of(self, snapshot: int) -> int:
        """Return the latent frame that first shows this snapshot or one that followed it."""
        return next(frame for index, frame in self.shown if index >= snapshot)


class _Movement(NamedTuple):
    """What a source does with one chunk, before scaling."""

    poses_n44: Float64
    relative_n44: Float64
    next: CameraSource
    scale: CameraScale
    keys: tuple[Actions, ...]
    pitch_rad: float | None = None
    intrinsics_n4: Float64 | None = None
    clip_step: float | None = None


class CameraReducer:
    """Turns events into cameras for one model and one target size in pixels. Holds no session's state."""

    def __init__(self, options: LingBotOptions, width: int, height: int) -> None:
        self._options = options
        self._width = width
        self._height = height

    def initial(self) -> CameraReducerState:
        """Return the state before chunk 0: identity pose, no keys."""
        return CameraReducerState(
            pose_44=frozen(np.eye(4)), intrinsics=self._options.default_intrinsics(self._width, self._height)
        )

    def prepare(self, state: CameraReducerState, events: Sequence[ControlEvent], num_latent_frames: int) -> CameraPlan:
        """Compute the camera of the next `num_latent_frames`; `state` is left as it was.

        Events act in ascending id order and the last control wins, except that key states are folded, so that a press
        and release between two chunks shows for one latent frame. Every event is in `applied`; one that a later
        control replaced is listed with the frame where that one starts.

        Raises:
            RequestRefused: a control that `decode_control` refuses, or a trajectory above `max_trajectory_poses`.
        """
        ordered = sorted(events, key=lambda event: event.event_id)
        source, folded, applied = self._reduce(state, ordered, num_latent_frames)
        movement = _move(source, state, num_latent_frames, folded)
        intrinsics_n4 = movement.intrinsics_n4
        if intrinsics_n4 is None:
            intrinsics_n4 = np.tile(np.array(state.intrinsics), (num_latent_frames, 1))
        run_step = max(state.largest_step, largest_step(movement.relative_n44))
        scale = self._options.camera_scale or movement.scale
        pose = frozen(movement.poses_n44[-1].copy())
        fx, fy, cx, cy = intrinsics_n4[-1].tolist()
        return CameraPlan(
            state=CameraReducerState(
                pose_44=pose,
                intrinsics=(fx, fy, cx, cy),
                pitch_rad=pitch_of(pose) if movement.pitch_rad is None else movement.pitch_rad,
                source=movement.next,
                largest_step=run_step,
            ),
            poses_n44=frozen(movement.poses_n44),
            relative_n44=frozen(_scaled(movement, scale, run_step)),
            intrinsics_n4=frozen(intrinsics_n4),
            keys=movement.keys,
            scale=scale,
            applied=applied,
        )

    def _reduce(
        self, state: CameraReducerState, events: Sequence[ControlEvent], num_latent_frames: int
    ) -> tuple[CameraSource, FoldedKeys | None, tuple[AppliedEvent, ...]]:
        """Find the source in force, the folded key states if it is keys, and where each event first acts."""
        source = state.source
        snapshots: list[Actions] = []
        first_snapshot: dict[int, int] = {}
        for event in events:
            for control in event.controls:
                decoded = decode_control(control)
                if isinstance(decoded, CameraActionsState):
                    first_snapshot.setdefault(event.event_id, len(snapshots))
                    snapshots.extend(transition.actions for transition in decoded.transitions)
                else:
                    source = self._source(decoded, state, num_latent_frames)
                    snapshots.clear()
                    first_snapshot.clear()
        folded = None
        if snapshots:
            held = source.keys if isinstance(source, HeldKeys) else ()
            folded = fold_keys(held, snapshots, num_latent_frames)
            source = HeldKeys(keys=snapshots[-1])
        frames = {event_id: folded.first_frame_of(index) if folded else 0 for event_id, index in first_snapshot.items()}
        applied = tuple(
            AppliedEvent(event_id=event.event_id, latent_frame=frames.get(event.event_id, 0)) for event in events
        )
        return source, folded, applied

    def _source(
        self, control: CameraScript | CameraTrajectory | CameraMotion, state: CameraReducerState, num_latent_frames: int
    ) -> CameraSource:
        match control:
            case CameraScript(frames=frames):
                return ScriptQueue(frames=frames)
            case CameraTrajectory():
                return self._trajectory(control)
            case CameraMotion(mode=MotionMode.VELOCITY):
                return Velocity(relative_44=_motion_pose(control))
            case CameraMotion():
                return TargetMotion(
                    start_44=state.pose_44,
                    target_44=_motion_pose(control),
                    num_latent_frames=control.transition_chunks * num_latent_frames,
                )
            case _:
                assert_never(control)

    def _trajectory(self, control: CameraTrajectory) -> TrajectoryQueue:
        limit = self._options.max_trajectory_poses
        if len(control.poses) > limit:
            raise RequestRefused(
                f"poses: expected at most {limit} (max_trajectory_poses), got {len(control.poses)}",
                code="bad_control",
                field="poses",
            )
        relative_n44 = framewise(project_rotations(np.array(control.poses).reshape(-1, 4, 4)))
        intrinsics = np.array([self._options.default_intrinsics(self._width, self._height)])
        if control.intrinsics:
            scale_x, scale_y = self._width / control.intrinsics_size[0], self._height / control.intrinsics_size[1]
            intrinsics = np.array(control.intrinsics) * np.array([scale_x, scale_y, scale_x, scale_y])
        return TrajectoryQueue(
            relative_n44=frozen(relative_n44),
            intrinsics_n4=frozen(np.broadcast_to(intrinsics, (len(relative_n44), 4)).copy()),
            largest_step=largest_step(relative_n44),
        )


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


def _move(source: CameraSource, state: CameraReducerState, count: int, folded: FoldedKeys | None) -> _Movement:
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
            return _Movement(
                poses_n44=_accumulate(state.pose_44, repeated),
                relative_n44=repeated,
                next=source,
                scale=CameraScale.UNIT,
                keys=((),) * count,
            )
        case TargetMotion():
            return _approach(state, source, count)
        case _:
            assert_never(source)


def _walk(state: CameraReducerState, frames: tuple[Actions, ...], following: CameraSource) -> _Movement:
    pose, pitch_rad = state.pose_44, state.pitch_rad
    poses = []
    for keys in frames:
        pose, pitch_rad = key_step(pose, pitch_rad, keys)
        poses.append(pose)
    poses_n44 = np.stack(poses)
    return _Movement(
        poses_n44=poses_n44,
        relative_n44=_differences(state.pose_44, poses_n44),
        next=following,
        scale=CameraScale.CHUNK_MAX,
        keys=frames,
        pitch_rad=pitch_rad,
    )


def _follow(state: CameraReducerState, queue: TrajectoryQueue, count: int) -> _Movement:
    now = queue.relative_n44[:count]
    missing = count - len(now)
    relative_n44 = np.concatenate([now, np.tile(np.eye(4), (missing, 1, 1))])
    rows = queue.intrinsics_n4[:count]
    rest: CameraSource = HeldKeys()
    if len(queue.relative_n44) > count:
        rest = replace(queue, relative_n44=queue.relative_n44[count:], intrinsics_n4=queue.intrinsics_n4[count:])
    return _Movement(
        poses_n44=_accumulate(state.pose_44, relative_n44),
        relative_n44=relative_n44,
        next=rest,
        scale=CameraScale.CLIP_MAX,
        keys=((),) * count,
        intrinsics_n4=np.concatenate([rows, np.tile(rows[-1], (missing, 1))]),
        clip_step=queue.largest_step,
    )


def _approach(state: CameraReducerState, motion: TargetMotion, count: int) -> _Movement:
    frames = motion.done_latent_frames + np.arange(1, count + 1)
    fractions = np.minimum(frames / motion.num_latent_frames, 1.0)
    poses_n44 = nlerp_poses(motion.start_44, motion.target_44, fractions)
    done = motion.done_latent_frames + count
    return _Movement(
        poses_n44=poses_n44,
        relative_n44=_differences(state.pose_44, poses_n44),
        next=HeldKeys() if done >= motion.num_latent_frames else replace(motion, done_latent_frames=done),
        scale=CameraScale.UNIT,
        keys=((),) * count,
    )


def _motion_pose(motion: CameraMotion) -> Float64:
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


def _scaled(movement: _Movement, scale: CameraScale, run_step: float) -> Float64:
    """Divide translations as the rule says; a chunk without motion stays as it is."""
    match scale:
        case CameraScale.CHUNK_MAX:
            divisor = largest_step(movement.relative_n44)
        case CameraScale.CLIP_MAX:
            divisor = run_step if movement.clip_step is None else movement.clip_step
        case CameraScale.UNIT:
            divisor = STEP
        case _:
            assert_never(scale)
    scaled = movement.relative_n44.copy()
    if divisor > SMALLEST_STEP:
        scaled[:, :3, 3] /= divisor
    return scaled
