"""Relative poses of a camera path as a session gets them: file -> control -> reducer, one latent frame at a time."""

from __future__ import annotations

import numpy as np

from worldmodel.lingbot.config import OFFICIAL_HEIGHT, OFFICIAL_WIDTH, LingBotOptions
from worldmodel.lingbot.controls import TRAJECTORY_SCHEMA, parse_control
from worldmodel.lingbot.poses import Float64
from worldmodel.lingbot.reducer import CameraReducer
from worldmodel.lingbot.trajectory import CameraClip, trajectory_control
from worldmodel.messages import Control, ControlEvent


def relative_path(latent: CameraClip) -> Float64:
    """Return framewise relative poses [n, 4, 4] of a path with a pose for each latent frame, scaled by its largest."""
    row = CameraClip(poses_n44=latent.poses_n44, intrinsics_n4=latent.intrinsics_n4[:1])
    data = parse_control("camera", TRAJECTORY_SCHEMA, trajectory_control(row))
    control = Control(track="camera", schema=TRAJECTORY_SCHEMA, data=data)
    reducer = CameraReducer(LingBotOptions(), OFFICIAL_WIDTH, OFFICIAL_HEIGHT)
    state, events = reducer.initial(), [ControlEvent(event_id=0, controls=(control,))]
    frames = []
    for _ in range(len(latent.poses_n44)):
        plan = reducer.prepare(state, events, 1)
        state, events = plan.state, []
        frames.append(plan.relative_n44)
    return np.concatenate(frames)
