"""Where in a chunk events act when their time within it counts, at 12 media frames a second: 1000 ms are three latent
frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.lingbot.camera_sources import CameraReducerState, HeldKeys
from worldmodel.lingbot.config import CameraScale, EventTiming, LingBotOptions
from worldmodel.lingbot.controls import ACTIONS_SCHEMA, MOTION_SCHEMA, Action, parse_control
from worldmodel.lingbot.poses import key_step
from worldmodel.lingbot.reducer import CameraPlan, CameraReducer
from worldmodel.messages import Control, ControlEvent

COUNT, FPS = 3, 12


def event(event_id: int, schema: str, data: dict[str, object], age_ms: float) -> ControlEvent:
    control = Control(track="camera", schema=schema, data=parse_control("camera", schema, data))
    return ControlEvent(event_id=event_id, controls=(control,), age_ms=age_ms)


def held(event_id: int, keys: str, age_ms: float) -> ControlEvent:
    return event(event_id, ACTIONS_SCHEMA, {"mode": "state", "held": list(keys)}, age_ms)


def velocity(event_id: int, z: float, age_ms: float) -> ControlEvent:
    data: dict[str, object] = {"mode": "velocity", "translation": [0, 0, z], "rotation": [0, 0, 0, 1]}
    return event(event_id, MOTION_SCHEMA, data, age_ms)


def plan_of(events: list[ControlEvent], state: CameraReducerState | None = None, **options: object) -> CameraPlan:
    chosen = LingBotOptions(event_timing=EventTiming.WITHIN_CHUNK, **options)  # type: ignore[arg-type]
    subject = CameraReducer(chosen, 160, 96, fps=FPS)
    return subject.prepare(state or subject.initial(), events, COUNT)


def shown(plan: CameraPlan) -> list[str]:
    return ["".join(frame) for frame in plan.keys]


def applied(plan: CameraPlan) -> list[tuple[int, int]]:
    return [(entry.event_id, entry.latent_frame) for entry in plan.applied]


@pytest.mark.parametrize(
    ("ages_ms", "frames", "acts"),
    [
        ([5000.0], ["w", "w", "w"], [0]),
        ([1000.0], ["w", "w", "w"], [0]),
        ([700.0], ["w", "w", "w"], [0]),
        ([660.0], ["", "w", "w"], [1]),
        ([1.0], ["", "", "w"], [2]),
        ([0.0], ["", "", "w"], [2]),
        ([900.0, 100.0], ["w", "w", ""], [0, 2]),
        ([600.0, 550.0], ["", "w", ""], [1, 2]),
        # pressed and released in the last latent frame: shown there, released in the next chunk
        ([100.0, 50.0], ["", "", "w"], [2, 2]),
        # the release came out of order: it acts no earlier than the press
        ([100.0, 900.0], ["", "", "w"], [2, 2]),
    ],
)
def test_a_key_acts_as_far_into_the_chunk_as_it_came(ages_ms: list[float], frames: list[str], acts: list[int]) -> None:
    events = [held(index, "w" if index == 0 else "", age_ms) for index, age_ms in enumerate(ages_ms)]
    plan = plan_of(events)
    assert shown(plan) == frames
    assert applied(plan) == list(enumerate(acts))
    following = plan_of([], plan.state)
    assert shown(following) == ["w" if len(ages_ms) == 1 else ""] * COUNT
    assert plan.state.source == HeldKeys(keys=(Action.W,) if len(ages_ms) == 1 else ())


def test_what_was_in_force_goes_on_until_the_event() -> None:
    before = plan_of([held(0, "w", 1000.0)])
    assert shown(plan_of([held(1, "d", 300.0)], before.state)) == ["w", "w", "d"]
    moving = plan_of([velocity(0, 0.1, 2000.0)])
    plan = plan_of([held(1, "", 600.0)], moving.state)
    assert plan.relative_n44[:, 2, 3] == pytest.approx([2.0, 0.0, 0.0])


def test_each_piece_is_scaled_by_its_own_rule() -> None:
    """Two steps of keys, the largest of the chunk's being 1, then a motion in units of 0.05."""
    plan = plan_of([held(0, "w", 1000.0), velocity(1, 0.15, 10.0)])
    assert plan.relative_n44[:, 2, 3] == pytest.approx([1.0, 1.0, 3.0], abs=1e-4)
    assert plan.scale is CameraScale.UNIT
    whole = plan_of([held(0, "w", 1000.0), velocity(1, 0.15, 10.0)], camera_scale=CameraScale.CHUNK_MAX)
    assert whole.relative_n44[:, 2, 3] == pytest.approx([1 / 3, 1 / 3, 1.0], abs=1e-4)


def test_without_ages_the_options_differ_in_the_frame_only() -> None:
    events = [held(0, "w", 1000.0), held(1, "", 1000.0)]
    at_start = CameraReducer(LingBotOptions(), 160, 96, fps=FPS)
    plan = at_start.prepare(at_start.initial(), [replace(entry, age_ms=3.0) for entry in events], COUNT)
    assert shown(plan) == shown(plan_of(events)) == ["w", "", ""]


KEY_SETS = st.sets(st.sampled_from("wdjl"), max_size=2).map(lambda keys: "".join(sorted(keys)))


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(KEY_SETS, st.floats(0, 1500)), max_size=6))
def test_poses_are_those_of_the_keys_shown(timed: list[tuple[str, float]]) -> None:
    """Against one key step after the other; every event is reported once, in order."""
    plan = plan_of([held(index, keys, age_ms) for index, (keys, age_ms) in enumerate(timed)])
    pose, pitch_rad = np.eye(4), 0.0
    for keys, got in zip(plan.keys, plan.poses_n44, strict=True):
        pose, pitch_rad = key_step(pose, pitch_rad, keys)
        assert np.array_equal(got, pose)
    frames = [frame for _, frame in applied(plan)]
    assert [event_id for event_id, _ in applied(plan)] == list(range(len(timed)))
    assert frames == sorted(frames)
    assert len(plan.keys) == COUNT
