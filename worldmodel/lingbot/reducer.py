"""From the events of one chunk to the camera of each latent frame. Torch-free, functional.

`CameraReducer.prepare` is speculative: it reads a state and returns a plan that holds the next one. Committing a plan
means keeping `plan.state`; rolling back means dropping it; resetting means starting again from `initial()`.

What moves the camera is one of the sources of `camera_sources.py`, replaced as a whole by the last control.

Where in the chunk an event acts is said by `EventTiming`. With `CHUNK_START` all events act at latent frame 0; with
`WITHIN_CHUNK` the chunk falls into pieces, one from each latent frame at which events act, and each piece is reduced
like a chunk of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, assert_never

import numpy as np

from worldmodel.errors import RequestRefused
from worldmodel.lingbot.camera_sources import (
    CameraReducerState,
    CameraSource,
    FoldedKeys,
    HeldKeys,
    Movement,
    ScriptQueue,
    TargetMotion,
    TrajectoryQueue,
    Velocity,
    after,
    fold_keys,
    motion_pose,
    move,
    scaled,
)
from worldmodel.lingbot.config import OFFICIAL_HEIGHT, OFFICIAL_WIDTH, CameraScale, EventTiming, LingBotOptions
from worldmodel.lingbot.controls import (
    CAMERA_TRACK,
    Actions,
    CameraActionsState,
    CameraControl,
    CameraFolder,
    CameraMotion,
    CameraScript,
    CameraTrajectory,
    MotionMode,
    PromptTransition,
    decode_control,
)
from worldmodel.lingbot.poses import Float64, framewise, frozen, largest_step, project_rotations
from worldmodel.lingbot.trajectory import MEDIA_FRAMES_PER_LATENT_FRAME, load_clip
from worldmodel.messages import AppliedEvent, ControlEvent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CameraPlan:
    """Camera of the latent frames of one chunk, and the state to keep if the chunk commits; arrays are float64.

    `relative_n44` is each pose seen from the one before (frame 0: from the last pose of the chunk before), translations
    divided as `scale` says, which is that of the last latent frame. `keys` are the key sets that acted, empty tuples
    where something else moved the camera.
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


class _Reduced(NamedTuple):
    """What moves the camera in one piece of a chunk, and where in it each of its events first acts."""

    source: CameraSource
    folded: FoldedKeys | None
    applied: tuple[AppliedEvent, ...]


class CameraReducer:
    """Turns events into cameras for one model and one target size in pixels. Holds no session's state."""

    def __init__(self, options: LingBotOptions, width: int, height: int, *, fps: int = 16) -> None:
        self._options = options
        self._width = width
        self._height = height
        self._latent_frame_ms = 1000.0 * MEDIA_FRAMES_PER_LATENT_FRAME / fps

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
            RequestRefused: a control that `decode_control` refuses, a trajectory above `max_trajectory_poses`, or a
                camera folder that cannot be used.
        """
        movements: list[Movement] = []
        applied: list[AppliedEvent] = []
        pieces = self._pieces(events, num_latent_frames)
        ends = [*(first for first, _ in pieces[1:]), num_latent_frames]
        for (first, some), end in zip(pieces, ends, strict=True):
            reduced = self._reduce(state, some, end - first, num_latent_frames)
            movements.append(move(reduced.source, state, end - first, reduced.folded))
            state = after(state, movements[-1])
            applied += [replace(entry, latent_frame=first + entry.latent_frame) for entry in reduced.applied]
        override = self._options.camera_scale
        return CameraPlan(
            state=state,
            poses_n44=frozen(np.concatenate([movement.poses_n44 for movement in movements])),
            relative_n44=frozen(scaled(movements, override, state.largest_step)),
            intrinsics_n4=frozen(np.concatenate([movement.intrinsics_n4 for movement in movements])),
            keys=tuple(keys for movement in movements for keys in movement.keys),
            scale=override or movements[-1].scale,
            applied=tuple(applied),
        )

    def _pieces(
        self, events: Sequence[ControlEvent], num_latent_frames: int
    ) -> list[tuple[int, Sequence[ControlEvent]]]:
        """Group events, ascending, by the latent frame at which they act; the first piece begins at frame 0."""
        pieces: list[tuple[int, list[ControlEvent]]] = [(0, [])]
        for event in sorted(events, key=lambda event: event.event_id):
            # An event acts no earlier than one with a smaller id, whenever the two came.
            first = max(pieces[-1][0], self._frame_of(event, num_latent_frames))
            if first > pieces[-1][0]:
                pieces.append((first, []))
            pieces[-1][1].append(event)
        return list(pieces)

    def _frame_of(self, event: ControlEvent, num_latent_frames: int) -> int:
        """Return the latent frame at which an event acts, from how long before the boundary it came."""
        if self._options.event_timing is EventTiming.CHUNK_START:
            return 0
        frames_ago = event.age_ms / self._latent_frame_ms
        return min(num_latent_frames - 1, max(0, math.floor(num_latent_frames - frames_ago)))

    def _reduce(
        self, state: CameraReducerState, events: Sequence[ControlEvent], num_latent_frames: int, chunk_frames: int
    ) -> _Reduced:
        """Find the source in force in a piece, the folded key states if it is keys, and where each event first acts."""
        source = state.source
        snapshots: list[Actions] = []
        first_snapshot: dict[int, int] = {}
        for event in events:
            for control in _camera_controls(event):
                if isinstance(control, CameraActionsState):
                    first_snapshot.setdefault(event.event_id, len(snapshots))
                    snapshots.extend(transition.actions for transition in control.transitions)
                else:
                    source = self._source(control, state, chunk_frames)
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
        return _Reduced(source=source, folded=folded, applied=applied)

    def _source(
        self,
        control: CameraScript | CameraTrajectory | CameraFolder | CameraMotion,
        state: CameraReducerState,
        chunk_frames: int,
    ) -> CameraSource:
        match control:
            case CameraScript(frames=frames):
                return ScriptQueue(frames=frames)
            case CameraTrajectory():
                intrinsics_n4 = np.array(control.intrinsics) if control.intrinsics else None
                poses_n44 = np.array(control.poses).reshape(-1, 4, 4)
                return self._trajectory(poses_n44, intrinsics_n4, control.intrinsics_size, "poses")
            case CameraFolder():
                return self._folder(control)
            case CameraMotion(mode=MotionMode.VELOCITY):
                return Velocity(relative_44=motion_pose(control))
            case CameraMotion():
                return TargetMotion(
                    start_44=state.pose_44,
                    target_44=motion_pose(control),
                    num_latent_frames=control.transition_chunks * chunk_frames,
                )
            case _:
                assert_never(control)

    def _folder(self, control: CameraFolder) -> TrajectoryQueue:
        """Read a trajectory with a pose for each media frame and take the one of each latent frame."""
        if self._options.camera_root is None:
            raise RequestRefused(
                "folder: this server has no camera folders (camera_root)", code="bad_control", field="folder"
            )
        try:
            clip = load_clip(Path(self._options.camera_root), control.parts)
        except RequestRefused as error:
            raise RequestRefused(f"folder: {error.message}", code="bad_control", field="folder") from error
        poses_n44 = clip.poses_n44[::MEDIA_FRAMES_PER_LATENT_FRAME]
        intrinsics_n4 = clip.intrinsics_n4[::MEDIA_FRAMES_PER_LATENT_FRAME]
        return self._trajectory(poses_n44, intrinsics_n4, (OFFICIAL_WIDTH, OFFICIAL_HEIGHT), "folder")

    def _trajectory(
        self, poses_n44: Float64, intrinsics_n4: Float64 | None, intrinsics_size: tuple[int, int], field: str
    ) -> TrajectoryQueue:
        limit = self._options.max_trajectory_poses
        if len(poses_n44) > limit:
            raise RequestRefused(
                f"{field}: expected at most {limit} poses, one a latent frame (max_trajectory_poses), "
                f"got {len(poses_n44)}",
                code="bad_control",
                field=field,
            )
        relative_n44 = framewise(project_rotations(poses_n44))
        intrinsics = np.array([self._options.default_intrinsics(self._width, self._height)])
        if intrinsics_n4 is not None:
            scale_x, scale_y = self._width / intrinsics_size[0], self._height / intrinsics_size[1]
            intrinsics = intrinsics_n4 * np.array([scale_x, scale_y, scale_x, scale_y])
        return TrajectoryQueue(
            relative_n44=frozen(relative_n44),
            intrinsics_n4=frozen(np.broadcast_to(intrinsics, (len(relative_n44), 4)).copy()),
            largest_step=largest_step(relative_n44),
        )


def _camera_controls(event: ControlEvent) -> list[CameraControl]:
    """Decode the controls of an event that are about the camera."""
    decoded = [decode_control(control) for control in event.controls if control.track == CAMERA_TRACK]
    return [control for control in decoded if not isinstance(control, PromptTransition)]
