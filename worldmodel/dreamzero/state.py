"""What a DreamZero session owns between two calls, besides its K/V.

Shapes: C channels, F latent frames, Y and X latent rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from worldmodel.dreamzero.frames import CameraFrames
from worldmodel.dreamzero.prompts import Prompt
from worldmodel.messages import MediaFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DreamZeroState:
    """Committed state of a session. Never changed in place; a tick returns the next one.

    `prompt_text` is in force until a tick brings another. `prompt` is what the last call ran with, None before the
    first. `start_latent_frame` is where the last call's predicted frames end, and the next call's begin unless it
    starts anew. `condition_CFYX` are the condition channels of the run, None without them and before the first call.
    """

    outputs: tuple[MediaFormat, ...]
    seed: int
    prompt_text: str
    prompt: Prompt | None = None
    cameras: tuple[CameraFrames | None, ...] = ()
    start_latent_frame: int = 0
    condition_CFYX: Tensor | None = None
