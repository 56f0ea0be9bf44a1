"""The robots that checkpoints were trained for: their cameras, how views are tiled, how prompts are framed.

Torch-free. What a robot measures and commands (keys, dimensions, statistics) is in a checkpoint's `metadata.json`; only
what the training code fixed is here. Source: DreamZero official code, its transforms by embodiment tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

KEY_PREFIX = "observation/"
"""What request keys begin with."""


class Tiling(StrEnum):
    """How two or three views make one picture of twice their height and width.

    WRIST_TOP: the last of three, every column twice, over the first and the second. QUADRANTS: the first view top left,
    the second bottom left, the third top right; a corner without a view is black, the one bottom right always.
    """

    WRIST_TOP = "wrist_top"
    QUADRANTS = "quadrants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embodiment:
    """One robot. `cameras` maps video keys of `metadata.json` to request keys, in tiling order; None takes all the
    checkpoint has, under their own names. `template` frames a prompt; `{prompt}` stands for it in lower case.
    """

    tag: str
    cameras: tuple[tuple[str, str], ...] | None
    tiling: Tiling
    template: str
    num_external_cameras: int
    needs_wrist_camera: bool


_DROID_TEMPLATE = (
    "A multi-view video shows that a robot {prompt} The video is split into three views: The top view shows the camera "
    "view from the robot's wrist, the bottom-left view shows the camera view from the left exterior camera, and the "
    "bottom-right view shows the camera view from the right exterior camera. During training, one of the two bottom "
    "exterior views may be a black screen (dropped view). The robot {prompt}"
)

_AGIBOT_TEMPLATE = (
    "A multi-view video shows that a robot {prompt} The video is split into four views: The top-left view shows the "
    "camera view from the robot's head, the top-right view shows the camera view from the right hand, the bottom-left "
    "view shows the camera view from the left hand, and the bottom-right view is a black screen (inactive view). The "
    "robot {prompt}"
)

_YAM_TEMPLATE = (
    "A multi-view video shows that a robot {prompt} The video is split into four views: The top-left view shows the "
    "top camera, the top-right view shows the right camera, the bottom-left view shows the left camera, and the "
    "bottom-right view is a black screen. The robot {prompt}"
)

EMBODIMENTS: tuple[Embodiment, ...] = (
    Embodiment(
        tag="oxe_droid",
        cameras=(
            ("exterior_image_1_left", "exterior_image_0_left"),
            ("exterior_image_2_left", "exterior_image_1_left"),
            ("wrist_image_left", "wrist_image_left"),
        ),
        tiling=Tiling.WRIST_TOP,
        template=_DROID_TEMPLATE,
        num_external_cameras=2,
        needs_wrist_camera=True,
    ),
    Embodiment(
        tag="agibot",
        cameras=None,
        tiling=Tiling.QUADRANTS,
        template=_AGIBOT_TEMPLATE,
        num_external_cameras=1,
        needs_wrist_camera=True,
    ),
    Embodiment(
        tag="yam",
        cameras=None,
        tiling=Tiling.QUADRANTS,
        template=_YAM_TEMPLATE,
        num_external_cameras=1,
        needs_wrist_camera=True,
    ),
)

NEGATIVE_PROMPT = (
    "Vibrant colors, overexposed, static, blurry details, text, subtitles, style, artwork, painting, image, still, "
    "grayscale, dull, worst quality, low quality, JPEG artifacts, ugly, mutilated, extra fingers, bad hands, bad face, "
    "deformed, disfigured, mutated limbs, fused fingers, stagnant image, cluttered background, three legs, many people "
    "in the background, walking backwards."
)
"""What the negative branch is told; it is not framed."""


def embodiment(tag: str) -> Embodiment:
    """Look a robot up by its tag. Raises ValueError naming the known ones."""
    for entry in EMBODIMENTS:
        if entry.tag == tag:
            return entry
    raise ValueError(f"unknown embodiment {tag!r}: expected one of {', '.join(entry.tag for entry in EMBODIMENTS)}")
