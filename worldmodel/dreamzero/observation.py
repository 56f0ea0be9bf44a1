"""Read a request's arrays: checked by name, pictures transformed, states joined. Nothing here knows a network.

Shapes: T frames, H and W pixels, 3 colours, S numbers of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worldmodel.adapter import Arrays
from worldmodel.dreamzero.embodiments import KEY_PREFIX
from worldmodel.dreamzero.frames import CALL_FRAMES, FIRST_CALL_FRAMES, CameraFrames, add_frames
from worldmodel.dreamzero.normalize import count_of_numbers
from worldmodel.dreamzero.pictures import Pixels, tile_views, transform_view
from worldmodel.dreamzero.robot import MAX_REQUEST_FRAMES, Field, Robot
from worldmodel.errors import RequestRefused

Cameras = tuple[CameraFrames | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """One request as the network takes it. `pictures_THW3` has 1 frame in the first call of an episode, else 4."""

    pictures_THW3: Pixels
    raw_state_S: npt.NDArray[np.float64]
    cameras: Cameras


class ObservationReader:
    """Read requests of one robot; `height` and `width` are those of a tiled picture."""

    def __init__(self, robot: Robot, *, height: int, width: int) -> None:
        self._robot = robot
        self._view_height, self._view_width = height // 2, width // 2

    def read(self, arrays: Arrays, cameras: Cameras) -> Observation:
        """Join what arrived with the frames before it.

        Keys that the robot has no use for are let pass, states that are missing are zero. Raises `RequestRefused`
        naming the key that is wrong.
        """
        self._require_cameras(arrays)
        added = tuple(
            self._add_camera(key, arrays[key], before)
            for key, before in zip(self._robot.cameras, cameras or (None,) * len(self._robot.cameras), strict=True)
        )
        count = CALL_FRAMES if any(before is not None for before in cameras) else FIRST_CALL_FRAMES
        views = [camera.last(count) for camera in added]
        return Observation(
            pictures_THW3=tile_views(views, self._robot.embodiment.tiling),
            raw_state_S=np.concatenate([self._state(arrays, state) for state in self._robot.states]),
            cameras=added,
        )

    def _require_cameras(self, arrays: Arrays) -> None:
        """Refuse a request that lacks a camera.

        The official code goes on with the frames a silent camera sent before: the robot would act on what it no longer
        sees, and nobody would be told.
        """
        missing = [key for key in self._robot.cameras if key not in arrays]
        if missing:
            expected = ", ".join(self._robot.cameras)
            lacking = " and ".join(missing)
            raise _refusal(missing[0], f"expected pictures of every camera ({expected}), got none of {lacking}")

    def _add_camera(self, key: str, array: npt.NDArray[np.generic], before: CameraFrames | None) -> CameraFrames:
        frames_THW3 = self._frames(key, array)
        # Frames that no call can look at need not be resized.
        return add_frames(before, transform_view(frames_THW3[-CALL_FRAMES:], self._view_height, self._view_width))

    def _frames(self, key: str, array: npt.NDArray[np.generic]) -> Pixels:
        height, width = self._robot.camera_height, self._robot.camera_width
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise _refusal(
                key,
                f"expected uint8 [{height}, {width}, 3] or [frames, {height}, {width}, 3], got {array.dtype} "
                f"{list(array.shape)}",
            )
        frames_THW3 = np.asarray(array if array.ndim == 4 else array[None], dtype=np.uint8)
        num_frames = frames_THW3.shape[0]
        if frames_THW3.shape[1:] != (height, width, 3):
            raise _refusal(key, f"expected pictures of [{height}, {width}, 3], got {list(frames_THW3.shape[1:])}")
        if not 1 <= num_frames <= MAX_REQUEST_FRAMES:
            raise _refusal(key, f"expected 1 to {MAX_REQUEST_FRAMES} frames, got {num_frames}")
        return frames_THW3

    @staticmethod
    def _state(arrays: Arrays, state: Field) -> npt.NDArray[np.float64]:
        key = KEY_PREFIX + state.name
        array = arrays.get(key)
        if array is None:
            return np.zeros(state.num_dims)
        if array.size != state.num_dims or array.dtype.kind not in "fiu":
            raise _refusal(key, f"expected {count_of_numbers(state.num_dims)}, got {array.dtype} {list(array.shape)}")
        values = array.astype(np.float64).reshape(-1)
        # Not beyond what actions are made of either: relative ones are added to these.
        if not (np.abs(values) <= np.finfo(np.float32).max).all():
            raise _refusal(key, "expected finite numbers in the range of float32, got NaN, infinity or more")
        return values


def _refusal(key: str, problem: str) -> RequestRefused:
    return RequestRefused(f"{key}: {problem}", code="bad_observation", field=key)
