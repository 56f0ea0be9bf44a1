"""Where a picture was taken from is found by drawing others; needs a C++ compiler, so it is in the slow set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from training.demo_world import scene
from training.demo_world.drift import drift
from training.demo_world.trajectories import METRES_PER_UNIT, Cameras, media_poses


@pytest.mark.slow
def test_the_camera_of_a_picture_is_found_where_it_is_and_not_where_it_should_be() -> None:
    true = Cameras(position=np.array([[[0.6, 0.6]]]), yaw=np.full((1, 1), 1.2), pitch=np.zeros((1, 1)))
    shown = Cameras(
        position=true.position + np.array([0.3, -0.4]) / METRES_PER_UNIT,
        yaw=true.yaw + math.radians(8.0),
        pitch=true.pitch,
    )
    style = np.zeros(1, np.int32)
    frames = torch.cat([scene.render(media_poses(cameras)[0], style, rays=1) for cameras in (true, shown)])
    both = Cameras(position=np.repeat(true.position, 2, axis=0), yaw=np.full((2, 1), 1.2), pitch=np.zeros((2, 1)))
    reaches = ((0.4, 0.1, 40), (0.15, 0.04, 20), (0.05, 0.02, 20))
    (metres_0, degrees_0), (metres, degrees) = drift(frames, both, 0, np.zeros(2, int), reaches=reaches)
    assert metres_0 < 0.05
    assert degrees_0 < 0.5
    assert abs(metres - 0.5) < 0.15
    assert abs(degrees - 8.0) < 2.0
