"""Camera reducer: folding of key states, finite scripts and trajectories, motions, scales, speculation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.errors import RequestRefused
from worldmodel.lingbot.camera_sources import SMALLEST_STEP, CameraReducerState, HeldKeys, fold_keys
from worldmodel.lingbot.config import CameraScale, LingBotOptions, ReferenceIntrinsics
from worldmodel.lingbot.controls import ACTIONS_SCHEMA, MOTION_SCHEMA, TRAJECTORY_SCHEMA, Action, parse_control
from worldmodel.lingbot.poses import framewise, rotation_x, rotation_y
from worldmodel.lingbot.reducer import CameraPlan, CameraReducer
from worldmodel.messages import Control, ControlEvent

WIDTH, HEIGHT, COUNT = 160, 96, 3


def event(event_id: int, schema: str, data: dict[str, object]) -> ControlEvent:
    control = Control(track="camera", schema=schema, data=parse_control("camera", schema, data))
    return ControlEvent(event_id=event_id, controls=(control,))


def keys(event_id: int, *snapshots: str) -> ControlEvent:
    """A state event whose snapshots are written as strings of keys."""
    transitions = [{"actions": list(snapshot)} for snapshot in snapshots]
    return event(event_id, ACTIONS_SCHEMA, {"mode": "state", "transitions": transitions})


def script(event_id: int, *frames: str) -> ControlEvent:
    return event(event_id, ACTIONS_SCHEMA, {"mode": "script", "frames": [list(frame) for frame in frames]})


def walk_poses(count: int) -> np.ndarray:
    """Camera-to-world poses of a walk that turns and climbs, far from the origin."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    for index in range(count):
        poses[index, :3, :3] = rotation_y(0.1 * index) @ rotation_x(0.02 * index)
        poses[index, :3, 3] = (1000.0 + 0.1 * index, -0.02 * index, 0.3 * index * index)
    return poses


def trajectory(event_id: int, poses: np.ndarray, **extra: object) -> ControlEvent:
    return event(event_id, TRAJECTORY_SCHEMA, {"poses": poses.tolist(), **extra})


def motion(event_id: int, mode: str, x: float, yaw_rad: float = 0.0, **extra: object) -> ControlEvent:
    rotation = [0.0, math.sin(yaw_rad / 2), 0.0, math.cos(yaw_rad / 2)]
    return event(event_id, MOTION_SCHEMA, {"mode": mode, "translation": [x, 0, 0], "rotation": rotation, **extra})


def reducer(options: LingBotOptions | None = None) -> CameraReducer:
    return CameraReducer(options or LingBotOptions(), WIDTH, HEIGHT)


def run(
    subject: CameraReducer, *chunks: list[ControlEvent], state: CameraReducerState | None = None
) -> list[CameraPlan]:
    """Prepare and commit one chunk after the other."""
    state = state or subject.initial()
    plans = []
    for events in chunks:
        plans.append(subject.prepare(state, events, COUNT))
        state = plans[-1].state
    return plans


def shown(plan: CameraPlan) -> list[str]:
    return ["".join(frame) for frame in plan.keys]


def applied(plan: CameraPlan) -> list[tuple[int, int]]:
    return [(entry.event_id, entry.latent_frame) for entry in plan.applied]


# ---------------------------------------------------------------- key states


@pytest.mark.parametrize(
    ("held", "events", "frames", "acts"),
    [
        ("", [keys(1, "w")], ["w", "w", "w"], [(1, 0)]),
        ("w", [keys(1, "")], ["", "", ""], [(1, 0)]),
        # a tap, in one event or in two
        ("", [keys(1, "w", "")], ["w", "", ""], [(1, 0)]),
        ("", [keys(1, "w"), keys(2, "")], ["w", "", ""], [(1, 0), (2, 1)]),
        # a tap beside a held key, and a second press of a held key
        ("w", [keys(1, "wd"), keys(2, "w")], ["wd", "w", "w"], [(1, 0), (2, 1)]),
        ("w", [keys(1, ""), keys(2, "w"), keys(3, "")], ["w", "", ""], [(1, 0), (2, 0), (3, 1)]),
        # release and press again: nothing was tapped
        ("w", [keys(1, ""), keys(2, "w")], ["w", "w", "w"], [(1, 0), (2, 0)]),
        # two presses that stay
        ("", [keys(1, "w"), keys(2, "wd")], ["wd", "wd", "wd"], [(1, 0), (2, 0)]),
        # a tap before a press that stays
        ("", [keys(1, "j"), keys(2, ""), keys(3, "w")], ["j", "w", "w"], [(1, 0), (2, 1), (3, 1)]),
        # more taps than room: the later ones share a frame, the final state keeps the last one
        (
            "",
            [keys(1, "w"), keys(2, ""), keys(3, "d"), keys(4, ""), keys(5, "j"), keys(6, "")],
            ["w", "dj", ""],
            [(1, 0), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2)],
        ),
    ],
)
def test_key_states_are_folded(
    held: str, events: list[ControlEvent], frames: list[str], acts: list[tuple[int, int]]
) -> None:
    plans = run(reducer(), [keys(0, held)], events, [])
    assert shown(plans[1]) == frames
    assert applied(plans[1]) == acts
    assert shown(plans[2]) == [frames[-1]] * COUNT


def test_a_tap_in_a_chunk_of_one_latent_frame_is_shown_and_then_released() -> None:
    subject = reducer()
    first = subject.prepare(subject.initial(), [keys(0, "w", "")], 1)
    second = subject.prepare(first.state, [], 1)
    assert (shown(first), shown(second)) == (["w"], [""])


KEY_SETS = st.sets(st.sampled_from(Action), max_size=3).map(lambda keys: tuple(a for a in Action if a in keys))


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(KEY_SETS, st.lists(KEY_SETS, min_size=1, max_size=6), st.integers(1, 4))
def test_folding_loses_no_press_and_ends_in_the_final_state(
    held: tuple[Action, ...], snapshots: list[tuple[Action, ...]], count: int
) -> None:
    folded = fold_keys(held, snapshots, count)
    assert len(folded.frames) == count
    if count > 1:
        assert folded.frames[-1] == snapshots[-1]
    for before, now in zip([held, *snapshots], snapshots, strict=False):
        for pressed in set(now) - set(before):
            assert any(pressed in frame for frame in (*folded.frames, snapshots[-1]))
    allowed = set(snapshots[-1]).union(*snapshots)
    assert all(set(frame) <= allowed for frame in folded.frames)
    starts = [folded.first_frame_of(index) for index in range(len(snapshots))]
    assert starts == sorted(starts)
    assert all(0 <= frame < count for frame in starts)


def test_events_act_in_ascending_id_order() -> None:
    plan = run(reducer(), [keys(7, "s"), keys(3, "w")])[0]
    assert shown(plan) == ["w", "s", "s"]
    assert applied(plan) == [(3, 0), (7, 1)]


def test_an_event_without_controls_is_applied_and_moves_nothing() -> None:
    plan = run(reducer(), [keys(0, "w")], [ControlEvent(event_id=4, controls=())])[1]
    assert applied(plan) == [(4, 0)]
    assert shown(plan) == ["w"] * COUNT


# ---------------------------------------------------------------- scripts


def test_a_script_runs_out_into_neutral_frames() -> None:
    plans = run(reducer(), [script(0, "w", "wd", "d", "s")], [], [])
    assert [shown(plan) for plan in plans] == [["w", "wd", "d"], ["s", "", ""], ["", "", ""]]
    assert np.array_equal(plans[2].poses_n44, np.tile(plans[1].poses_n44[-1], (COUNT, 1, 1)))
    assert plans[1].state.source == HeldKeys()


def test_a_new_script_replaces_and_a_state_replaces_a_script() -> None:
    plans = run(reducer(), [script(0, "w", "w", "w", "w", "w")], [script(1, "j")], [script(2, *"dddd")], [keys(3, "s")])
    assert [shown(plan) for plan in plans] == [["w"] * 3, ["j", "", ""], ["d"] * 3, ["s"] * 3]


def test_the_last_control_of_a_chunk_wins() -> None:
    plan = run(reducer(), [keys(0, "w"), keys(1, ""), script(2, "j"), script(3, "l")])[0]
    assert shown(plan) == ["l", "", ""]
    assert applied(plan) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    plan = run(reducer(), [script(0, "j"), keys(1, "w"), keys(2, "")])[0]
    assert shown(plan) == ["w", "", ""]
    assert applied(plan) == [(0, 0), (1, 0), (2, 1)]


# ---------------------------------------------------------------- trajectories


def test_a_trajectory_acts_through_its_differences_from_where_the_camera_is() -> None:
    poses = walk_poses(5)
    before, first, second, third = run(reducer(), [keys(0, "wl")], [trajectory(1, poses)], [], [])
    deltas = framewise(poses)
    largest = np.linalg.norm(deltas[:, :3, 3], axis=-1).max()
    relative = np.concatenate([first.relative_n44, second.relative_n44])
    assert np.abs(relative[:5, :3, 3] * largest - deltas[:, :3, 3]).max() < 1e-9
    assert np.abs(relative[:5, :3, :3] - deltas[:, :3, :3]).max() < 1e-12
    assert np.array_equal(relative[5], np.eye(4))
    assert first.scale is CameraScale.CLIP_MAX
    start = before.poses_n44[-1]
    absolute = np.concatenate([first.poses_n44, second.poses_n44])
    assert np.abs(absolute[:5] - start @ np.linalg.inv(poses[0]) @ poses).max() < 1e-9
    assert np.array_equal(third.poses_n44[-1], absolute[-1])
    assert third.state.source == HeldKeys()


def test_a_keyboard_takes_over_with_the_pitch_the_trajectory_left() -> None:
    poses = np.tile(np.eye(4), (2, 1, 1))
    poses[1, :3, :3] = rotation_x(math.radians(84))
    plans = run(reducer(), [trajectory(0, poses)], [keys(1, "i")], [keys(2, "k")])
    assert plans[0].state.pitch_rad == pytest.approx(math.radians(84))
    assert plans[1].state.pitch_rad == pytest.approx(math.radians(84))
    assert plans[2].state.pitch_rad == pytest.approx(math.radians(72))


def test_keys_lead_back_from_beyond_the_limit_of_keys() -> None:
    poses = np.tile(np.eye(4), (2, 1, 1))
    poses[1, :3, :3] = rotation_x(math.radians(-89.5))
    plans = run(reducer(), [trajectory(0, poses)], [keys(1, "k")], [keys(2, "i")])
    assert plans[1].state.pitch_rad == pytest.approx(math.radians(-89.5))
    assert plans[2].state.pitch_rad == pytest.approx(math.radians(-77.5))


def test_trajectory_intrinsics_are_scaled_and_stay() -> None:
    rows = [[832.0, 480.0, 416.0, 240.0], [1664.0, 960.0, 416.0, 240.0]]
    plans = run(
        reducer(), [trajectory(0, walk_poses(2), intrinsics=rows)], [keys(1, "w")], [trajectory(2, walk_poses(1))]
    )
    assert plans[0].intrinsics_n4.tolist() == [[160, 96, 80, 48], [320, 192, 80, 48], [320, 192, 80, 48]]
    assert plans[1].intrinsics_n4.tolist() == [[320, 192, 80, 48]] * 3
    assert plans[2].intrinsics_n4.tolist() == [[500, 500, 80, 48]] * 3
    other = run(reducer(), [trajectory(0, walk_poses(1), intrinsics=[[80, 48, 40, 24]], intrinsics_size=[80, 48])])
    assert other[0].intrinsics_n4.tolist() == [[160, 96, 80, 48]] * 3


def test_a_trajectory_above_the_configured_limit_is_refused() -> None:
    with pytest.raises(RequestRefused, match=r"at most 4 .*got 5") as caught:
        run(reducer(LingBotOptions(max_trajectory_poses=4)), [trajectory(0, walk_poses(5))])
    assert caught.value.field == "poses"


# ---------------------------------------------------------------- motions


def test_a_velocity_repeats_until_replaced() -> None:
    plans = run(reducer(), [motion(0, "velocity", 0.1, 0.2)], [], [keys(1, "")])
    step = np.eye(4)
    step[:3, :3], step[0, 3] = rotation_y(0.2), 0.1
    pose = np.eye(4)
    for plan in plans[:2]:
        for got in plan.poses_n44:
            pose = pose @ step
            assert np.abs(got - pose).max() < 1e-12
        assert np.allclose(plan.relative_n44[:, :3, 3], [2.0, 0.0, 0.0])
        assert plan.scale is CameraScale.UNIT
    assert np.array_equal(plans[2].poses_n44[-1], plans[1].poses_n44[-1])


def test_a_target_is_reached_after_its_chunks_and_held() -> None:
    plans = run(reducer(), [motion(0, "target", 0.6, 0.3, transition_chunks=2)], [], [])
    xs = np.concatenate([plan.poses_n44[:, 0, 3] for plan in plans])
    assert xs == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6])
    assert np.abs(plans[1].poses_n44[-1, :3, :3] - rotation_y(0.3)).max() < 1e-12
    assert plans[2].state.source == HeldKeys()
    assert plans[2].relative_n44 == pytest.approx(np.tile(np.eye(4), (3, 1, 1)), abs=1e-15)
    assert np.array_equal(plans[2].relative_n44[:, :3, 3], np.zeros((3, 3)))


def test_a_target_starts_where_the_camera_is() -> None:
    plans = run(reducer(), [keys(0, "d")], [motion(1, "target", 0.0)])
    assert plans[1].poses_n44[:, 0, 3] == pytest.approx([0.10, 0.05, 0.0], abs=1e-6)


# ---------------------------------------------------------------- scales and intrinsics


def test_each_source_has_its_own_scale_unless_one_is_configured() -> None:
    keyboard = [keys(0, "wd")], [script(1, "w", "wd", "")]
    others = [trajectory(2, walk_poses(3))], [motion(3, "velocity", 0.1)], [motion(4, "target", 0.9)]
    chunks = (*keyboard, *others)
    kinds = [plan.scale for plan in run(reducer(), *chunks)]
    assert kinds == [CameraScale.CHUNK_MAX] * 2 + [CameraScale.CLIP_MAX] + [CameraScale.UNIT] * 2
    for rule in CameraScale:
        assert {plan.scale for plan in run(reducer(LingBotOptions(camera_scale=rule)), *chunks)} == {rule}


def norms(plan: CameraPlan) -> list[float]:
    return np.linalg.norm(plan.relative_n44[:, :3, 3], axis=-1).tolist()


def test_scales_of_a_straight_and_a_diagonal_step() -> None:
    chunks = [script(0, "w", "wd", "")], [script(1, "w", "w", "w")]
    root = math.sqrt(2)
    for rule, want in [
        (CameraScale.CHUNK_MAX, [[1 / root, 1, 0], [1, 1, 1]]),
        (CameraScale.CLIP_MAX, [[1 / root, 1, 0], [1 / root] * 3]),
        (CameraScale.UNIT, [[1, root, 0], [1, 1, 1]]),
    ]:
        got = [norms(plan) for plan in run(reducer(LingBotOptions(camera_scale=rule)), *chunks)]
        assert np.array(got) == pytest.approx(np.array(want), abs=1e-4)


def test_a_camera_that_only_turns_has_no_translation_to_scale() -> None:
    plans = run(reducer(), [keys(0, "wd")], [keys(1, "jk")])
    assert np.array_equal(plans[1].relative_n44[:, :3, 3], np.zeros((3, 3)))


@pytest.mark.parametrize("rule", [CameraScale.CLIP_MAX, CameraScale.CHUNK_MAX])
@pytest.mark.parametrize(("step", "scaled_step"), [(SMALLEST_STEP, SMALLEST_STEP), (2 * SMALLEST_STEP, 1.0)])
def test_steps_that_are_rounding_are_not_scaled_up_to_motion(
    rule: CameraScale, step: float, scaled_step: float
) -> None:
    poses = np.tile(np.eye(4), (3, 1, 1))
    poses[:, 0, 3] = step * np.arange(3)
    plan = run(reducer(LingBotOptions(camera_scale=rule)), [trajectory(0, poses)])[0]
    assert norms(plan) == pytest.approx([0.0, scaled_step, scaled_step], rel=1e-6)


def test_reference_intrinsics_replace_the_500_px_rule() -> None:
    reference = ReferenceIntrinsics(width=832, height=480, fx=500, fy=500, cx=416, cy=240)
    plan = run(reducer(LingBotOptions(reference_intrinsics=reference)), [])[0]
    assert plan.intrinsics_n4[0] == pytest.approx([500 * 160 / 832, 100, 80, 48])


# ---------------------------------------------------------------- speculation

EVENTS = st.sampled_from(
    [
        [],
        [keys(0, "wl")],
        [keys(0, "i", "")],
        [script(0, "w", "j", "", "d")],
        [trajectory(0, walk_poses(5))],
        [motion(0, "velocity", 0.1, 0.1)],
        [motion(0, "target", 1.0, 0.5, transition_chunks=2)],
    ]
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(EVENTS, min_size=1, max_size=5), st.lists(EVENTS, min_size=1, max_size=3))
def test_a_dropped_plan_leaves_nothing_behind(
    chunks: list[list[ControlEvent]], dropped: list[list[ControlEvent]]
) -> None:
    subject = reducer()
    state = subject.initial()
    twin = run(reducer(), *chunks)
    for index, events in enumerate(chunks):
        run(subject, *dropped, state=state)
        plan = subject.prepare(state, events, COUNT)
        assert np.array_equal(plan.relative_n44, twin[index].relative_n44)
        assert plan.applied == twin[index].applied
        state = plan.state
    assert state.pitch_rad == twin[-1].state.pitch_rad


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(EVENTS, min_size=1, max_size=6))
def test_every_plan_is_a_chain_of_rigid_poses(chunks: list[list[ControlEvent]]) -> None:
    for plan in run(reducer(), *chunks):
        rotations = plan.poses_n44[:, :3, :3]
        assert np.abs(rotations @ rotations.swapaxes(1, 2) - np.eye(3)).max() < 1e-9
        assert np.isfinite(plan.relative_n44).all()
        assert plan.pose == tuple(plan.poses_n44[-1].ravel())
        assert np.array_equal(plan.state.pose_44, plan.poses_n44[-1])


def test_state_arrays_cannot_be_written() -> None:
    plan = run(reducer(), [keys(0, "w")])[0]
    for frozen_array in (plan.state.pose_44, plan.poses_n44, plan.relative_n44, plan.intrinsics_n4):
        with pytest.raises(ValueError, match="read-only"):
            frozen_array[0] = 1.0
