"""The frames a robot's cameras sent, as far as the next call needs them: the last few of every camera.

Shapes: T frames, H and W pixels, 3 colours. Source: DreamZero official code, the frame buffers of its policy server;
those keep every frame, of which only the last four are ever looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

FIRST_CALL_FRAMES = 1
CALL_FRAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CameraFrames:
    """Frames of one camera, at most the last four, oldest first; never changed in place."""

    frames_THW3: Pixels

    def last(self, count: int) -> Pixels:
        """Return exactly `count` frames, the oldest repeated in front if there are fewer."""
        missing = count - len(self.frames_THW3)
        if missing <= 0:
            return self.frames_THW3[-count:]
        return np.concatenate([np.repeat(self.frames_THW3[:1], missing, axis=0), self.frames_THW3])


def add_frames(before: CameraFrames | None, new_THW3: Pixels) -> CameraFrames:
    """Append what arrived and drop what no later call looks at."""
    frames = new_THW3 if before is None else np.concatenate([before.frames_THW3, new_THW3])
    return CameraFrames(frames_THW3=np.ascontiguousarray(frames[-CALL_FRAMES:]))
