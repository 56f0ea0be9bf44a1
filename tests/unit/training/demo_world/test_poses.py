"""The lesson about poses: what is taught."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.demo_world.poses import NUM_FEATURES, pose_features
from training.demo_world.scene import PERIOD_M
from training.demo_world.trajectories import METRES_PER_UNIT, Cameras


def _features(x: float, z: float, heading_deg: float, pitch_deg: float = 0.0) -> np.ndarray:
    return pose_features(
        Cameras(
            position=np.array([[[x, z]]]),
            yaw=np.array([[math.radians(heading_deg)]]),
            pitch=np.array([[math.radians(pitch_deg)]]),
        )
    )[0, 0]


def test_a_period_and_a_full_turn_further_on_is_the_same_pose() -> None:
    here, period = _features(0.31, 0.0, 42.5), PERIOD_M / METRES_PER_UNIT
    assert here.shape == (NUM_FEATURES,)
    np.testing.assert_allclose(_features(0.31 - period, 2 * period, 42.5 + 360), here, atol=1e-4)
    assert np.abs(_features(0.35, 0.0, 42.5) - here).max() > 0.5


@pytest.mark.parametrize(("heading_deg", "rest"), [(0, 0.0), (42, 0.0), (44, 3.0), (40, -3.0), (359, -1.5)])
def test_the_last_number_is_what_a_heading_is_off_a_whole_step(heading_deg: float, rest: float) -> None:
    np.testing.assert_allclose(_features(0.1, 0.2, heading_deg)[-1], rest, atol=1e-4)


def test_the_pitch_is_a_share_of_the_largest() -> None:
    np.testing.assert_allclose(_features(0.1, 0.2, 30, 17)[-2], 0.2, atol=1e-6)
