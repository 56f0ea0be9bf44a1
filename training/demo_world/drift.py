"""Where pictures seem to have been taken from: the camera whose true picture is most like them.

Shape suffixes: E sessions, Q candidates.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from training.demo_world import scene
from training.demo_world.trajectories import METRES_PER_UNIT, Cameras, Float64, media_poses

Reaches = tuple[tuple[float, float, int], ...]

REACHES: Reaches = ((1.0, 0.3, 400), (0.35, 0.12, 200), (0.12, 0.04, 200), (0.04, 0.015, 200))
_BLUR = 4


def drift(
    frames: Tensor, cameras: Cameras, latent_frame: int, styles_E: np.ndarray, *, reaches: Reaches = REACHES
) -> Float64:
    """Return how far the pictures' cameras are from the true ones, [E, 2]: metres and degrees of heading.

    Args:
        frames: uint8 [E, H, W, 3], on the device where candidates are drawn.
        cameras: The true walks.
        latent_frame: Of which latent frame the pictures are the last ones.
        styles_E: Their styles.
        reaches: How the search narrows, metres and radians around the best camera so far, and how many are tried there.
            Pictures of nowhere end up anywhere within a few metres.
    """
    rng = np.random.default_rng(0)
    found = np.zeros((len(frames), 2))
    for session, (frame, style) in enumerate(zip(_blurred(frames), styles_E, strict=True)):
        best_3 = np.zeros(3)
        for metres, radians, count in reaches:
            offsets_Q3 = best_3 + rng.normal(size=(count, 3)) * (metres, metres, radians)
            offsets_Q3[0] = best_3
            drawn = _blurred(_draw(cameras, session, latent_frame, offsets_Q3, int(style), frames.device))
            best_3 = offsets_Q3[int((drawn - frame).square().mean(dim=(1, 2, 3)).argmin())]
        found[session] = np.hypot(*best_3[:2]), np.degrees(abs(best_3[2]))
    return found


def _draw(cameras: Cameras, session: int, frame: int, offsets_Q3: Float64, style: int, device: torch.device) -> Tensor:
    position = cameras.position[session, frame] + offsets_Q3[:, :2] / METRES_PER_UNIT
    heading = cameras.yaw[session, frame] + offsets_Q3[:, 2]
    pitch = np.full(len(offsets_Q3), cameras.pitch[session, frame])
    poses = media_poses(Cameras(position=position[:, None], yaw=heading[:, None], pitch=pitch[:, None]))[:, 0]
    styles = torch.full((len(poses),), style, dtype=torch.int32, device=device)
    return scene.render(torch.from_numpy(poses).to(device), styles, rays=1)


def _blurred(frames: Tensor) -> Tensor:
    return functional.avg_pool2d(frames.permute(0, 3, 1, 2).float(), _BLUR)
