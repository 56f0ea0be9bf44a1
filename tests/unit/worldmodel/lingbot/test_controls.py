"""Camera controls: canonical form, refusals with a path, and agreement with the schemas shown to clients."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.errors import RequestRefused
from worldmodel.lingbot.config import MIN_FOCAL_PX, parse_options
from worldmodel.lingbot.control_schemas import control_schemas
from worldmodel.lingbot.controls import (
    ACTIONS_SCHEMA,
    FOLDER_SCHEMA,
    MAX_SCRIPT_LATENT_FRAMES,
    MOTION_SCHEMA,
    SCHEMAS,
    TRAJECTORY_SCHEMA,
    TRANSITION_SCHEMA,
    Action,
    CameraActionsState,
    CameraMotion,
    CameraScript,
    CameraTrajectory,
    MotionMode,
    Transition,
    decode_control,
    parse_control,
)
from worldmodel.lingbot.trajectory import load_clip
from worldmodel.messages import Control

IDENTITY = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
MOTION = {"mode": "velocity", "translation": [0, 0, 0.05], "rotation": [0, 0, 0, 1]}


def decoded(schema: str, data: object) -> object:
    return decode_control(Control(track="camera", schema=schema, data=parse_control("camera", schema, data)))


def test_transitions_keep_their_order_and_keys_become_canonical() -> None:
    data = {"mode": "state", "transitions": [{"actions": ["d", "w"], "client_ts_ms": 12}, {"actions": []}]}
    assert decoded(ACTIONS_SCHEMA, data) == CameraActionsState(
        transitions=(Transition(actions=(Action.W, Action.D), client_ts_ms=12.0), Transition(actions=()))
    )


def test_held_is_short_for_one_transition() -> None:
    short = parse_control("camera", ACTIONS_SCHEMA, {"mode": "state", "held": ["j"]})
    assert short == parse_control("camera", ACTIONS_SCHEMA, {"mode": "state", "transitions": [{"actions": ["j"]}]})


def test_script_has_one_key_set_per_latent_frame() -> None:
    assert decoded(ACTIONS_SCHEMA, {"mode": "script", "frames": [["l"], [], ["s", "a"]]}) == CameraScript(
        frames=((Action.L,), (), (Action.A, Action.S))
    )


def test_trajectory_defaults_to_official_intrinsics_size() -> None:
    control = decoded(TRAJECTORY_SCHEMA, {"poses": [IDENTITY], "intrinsics": [[500, 501, 416, 240]]})
    assert isinstance(control, CameraTrajectory)
    assert control.poses == ((1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1),)
    assert control.intrinsics == ((500, 501, 416, 240),)
    assert control.intrinsics_size == (832, 480)


def test_motion_defaults_to_one_chunk() -> None:
    assert decoded(MOTION_SCHEMA, MOTION) == CameraMotion(
        mode=MotionMode.VELOCITY, translation=(0, 0, 0.05), rotation=(0, 0, 0, 1), transition_chunks=1
    )


MIRROR = [[-1, 0, 0, 0], *IDENTITY[1:]]
STRETCHED = [[1.01, 0, 0, 0], *IDENTITY[1:]]


@pytest.mark.parametrize(
    ("schema", "data", "field"),
    [
        (ACTIONS_SCHEMA, [], None),
        (ACTIONS_SCHEMA, {}, "mode"),
        (ACTIONS_SCHEMA, {"mode": "State"}, "mode"),
        (ACTIONS_SCHEMA, {"mode": "state"}, "transitions"),
        (ACTIONS_SCHEMA, {"mode": "state", "held": [], "transitions": []}, "transitions"),
        (ACTIONS_SCHEMA, {"mode": "state", "transitions": []}, "transitions"),
        (ACTIONS_SCHEMA, {"mode": "state", "transitions": [{"actions": ["w", "W"]}]}, "transitions[0].actions[1]"),
        (ACTIONS_SCHEMA, {"mode": "state", "transitions": [{"actions": ["w", "w"]}]}, "transitions[0].actions[1]"),
        (ACTIONS_SCHEMA, {"mode": "state", "transitions": [{"action": []}]}, "transitions[0].action"),
        (ACTIONS_SCHEMA, {"mode": "state", "transitions": [{}]}, "transitions[0].actions"),
        (ACTIONS_SCHEMA, {"mode": "state", "held": "w"}, "held"),
        (ACTIONS_SCHEMA, {"mode": "state", "held": ["q"]}, "held[0]"),
        (ACTIONS_SCHEMA, {"mode": "state", "held": [["w"]]}, "held[0]"),
        (ACTIONS_SCHEMA, {"mode": "state", "held": [], "frames": []}, "frames"),
        (ACTIONS_SCHEMA, {"mode": "script", "frames": []}, "frames"),
        (ACTIONS_SCHEMA, {"mode": "script", "frames": [[], ["up"]]}, "frames[1][0]"),
        (ACTIONS_SCHEMA, {"mode": "script", "held": []}, "held"),
        (ACTIONS_SCHEMA, {"mode": "script", "frames": [[]] * (MAX_SCRIPT_LATENT_FRAMES + 1)}, "frames"),
        (TRAJECTORY_SCHEMA, {"poses": []}, "poses"),
        (TRAJECTORY_SCHEMA, {"poses": [IDENTITY, [[1]] * 4]}, "poses[1][0]"),
        (TRAJECTORY_SCHEMA, {"poses": [IDENTITY[:3]]}, "poses[0]"),
        (TRAJECTORY_SCHEMA, {"poses": [MIRROR]}, "poses[0]"),
        (TRAJECTORY_SCHEMA, {"poses": [STRETCHED]}, "poses[0]"),
        (TRAJECTORY_SCHEMA, {"poses": [[*IDENTITY[:3], [0, 0, 0, 2]]]}, "poses[0][3]"),
        (TRAJECTORY_SCHEMA, {"poses": [[[1, 0, 0, math.inf], *IDENTITY[1:]]]}, "poses[0][0][3]"),
        (TRAJECTORY_SCHEMA, {"poses": [IDENTITY] * 3, "intrinsics": [[1, 1, 0, 0]] * 2}, "intrinsics"),
        (TRAJECTORY_SCHEMA, {"poses": [IDENTITY], "intrinsics": [[0, 1, 0, 0]]}, "intrinsics[0][0]"),
        (TRAJECTORY_SCHEMA, {"poses": [IDENTITY], "intrinsics": [[1, 0.99 * MIN_FOCAL_PX, 0, 0]]}, "intrinsics[0][1]"),
        (TRAJECTORY_SCHEMA, {"poses": [IDENTITY], "intrinsics_size": [832, 480]}, "intrinsics_size"),
        (MOTION_SCHEMA, MOTION | {"mode": "w"}, "mode"),
        (MOTION_SCHEMA, MOTION | {"translation": [0, math.nan, 0]}, "translation[1]"),
        (MOTION_SCHEMA, MOTION | {"translation": [0, 10**400, 0]}, "translation[1]"),
        (MOTION_SCHEMA, MOTION | {"rotation": [0, 0, 0, 0]}, "rotation"),
        (MOTION_SCHEMA, MOTION | {"rotation": [0, 0, 0, True]}, "rotation[3]"),
        (MOTION_SCHEMA, MOTION | {"transition_chunks": 2}, "transition_chunks"),
        (MOTION_SCHEMA, MOTION | {"mode": "target", "transition_chunks": 0}, "transition_chunks"),
    ],
)
def test_bad_controls_are_refused_with_a_path(schema: str, data: object, field: str | None) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_control("camera", schema, data)
    assert caught.value.code == "bad_control"
    assert caught.value.field == field
    assert str(caught.value).startswith(field or "data")


def test_unknown_track_and_schema_are_named() -> None:
    with pytest.raises(RequestRefused, match="one of camera, prompt") as caught:
        parse_control("lens", ACTIONS_SCHEMA, {})
    assert (caught.value.code, caught.value.field) == ("unknown_track", "track")
    with pytest.raises(RequestRefused, match=r"did you mean 'lingbot\.camera_actions\.v1'") as caught:
        parse_control("camera", "lingbot.camera_action.v1", {})
    assert (caught.value.code, caught.value.field) == ("unknown_schema", "schema")
    with pytest.raises(
        RequestRefused, match=r"^track 'prompt': expected 'camera', to which the schema .* belongs$"
    ) as caught:
        parse_control("prompt", ACTIONS_SCHEMA, {"mode": "state", "held": []})
    assert (caught.value.code, caught.value.field) == ("unknown_schema", "track")


def test_decode_refuses_bytes_that_are_not_json() -> None:
    with pytest.raises(RequestRefused, match="expected JSON"):
        decode_control(Control(track="camera", schema=ACTIONS_SCHEMA, data=b"{"))


def test_a_refusal_does_not_repeat_large_input() -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_control("camera", ACTIONS_SCHEMA, {"mode": "x" * 100_000, "y" * 100_000: 1})
    assert len(str(caught.value)) < 400


# ---------------------------------------------------------------- schemas and parser agree

KEYS = st.lists(st.sampled_from([*"wasdijkl", "q", 1]), max_size=9)
NUMBERS = st.sampled_from([0, 1, -1, 0.5, 1e-6, 2e6, -70000, True, None, "1"])


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Objects that have any subset of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


TRANSITIONS = st.lists(some_of({"actions": KEYS, "client_ts_ms": NUMBERS}), max_size=3)
POSE = st.tuples(*[NUMBERS] * 3).map(lambda t: [[1, 0, 0, t[0]], [0, 1, 0, t[1]], [0, 0, 1, t[2]], [0, 0, 0, 1]])
SIZES = st.lists(st.sampled_from([832, 480, 0, 1.5]), max_size=3)
DATA: dict[str, st.SearchStrategy[Any]] = {
    ACTIONS_SCHEMA: some_of(
        {
            "mode": st.sampled_from(["state", "script", "target", None]),
            "transitions": TRANSITIONS,
            "held": KEYS,
            "frames": st.lists(KEYS, max_size=4),
        }
    ),
    TRAJECTORY_SCHEMA: some_of(
        {
            "poses": st.lists(POSE, max_size=2),
            "intrinsics": st.lists(st.lists(NUMBERS, min_size=3, max_size=5), min_size=0, max_size=1),
            "intrinsics_size": SIZES,
            "scale": NUMBERS,
        }
    ),
    FOLDER_SCHEMA: some_of({"folder": st.sampled_from(["walk", "a/b.c", "../a", "", "a//b", "a/", ".a", 3])}),
    TRANSITION_SCHEMA: some_of({"chunks": NUMBERS, "prompt": st.just("a")}),
    MOTION_SCHEMA: some_of(
        {
            "mode": st.sampled_from(["velocity", "target", "state"]),
            "translation": st.lists(NUMBERS, min_size=2, max_size=4),
            "rotation": st.sampled_from([[0, 0, 0, 1], [0.6, 0, 0, 0.8], [0, 0, 1], [0, 1, 0, None]]),
            "transition_chunks": st.sampled_from([1, 2, 0, 1.5, True]),
        }
    ),
}
GOOD: dict[str, st.SearchStrategy[Any]] = {
    ACTIONS_SCHEMA: st.one_of(
        st.fixed_dictionaries({"mode": st.just("state"), "held": KEYS}),
        st.fixed_dictionaries({"mode": st.just("state"), "transitions": TRANSITIONS}),
        st.fixed_dictionaries({"mode": st.just("script"), "frames": st.lists(KEYS, max_size=4)}),
    ),
    TRAJECTORY_SCHEMA: st.fixed_dictionaries(
        {"poses": st.just([IDENTITY])},
        optional={"intrinsics": st.just([[500, 500, 416, 240]]), "intrinsics_size": SIZES},
    ),
    FOLDER_SCHEMA: st.fixed_dictionaries({"folder": st.sampled_from(["walks/first", "W-1_2.x"])}),
    TRANSITION_SCHEMA: st.fixed_dictionaries({"chunks": st.integers(0, 300)}),
    MOTION_SCHEMA: st.fixed_dictionaries(
        {"mode": st.sampled_from(["velocity", "target"]), "translation": st.lists(NUMBERS, min_size=3, max_size=3)},
        optional={"rotation": st.just([0, 0.6, 0, 0.8]), "transition_chunks": st.integers(0, 3)},
    ),
}


@pytest.mark.parametrize("focal_px", [MIN_FOCAL_PX, 0.99 * MIN_FOCAL_PX])
def test_options_controls_schemas_and_files_have_one_smallest_focal_length(focal_px: float, tmp_path: Path) -> None:
    np.save(tmp_path / "poses.npy", np.eye(4)[None])
    np.save(tmp_path / "intrinsics.npy", np.array([[500.0, focal_px, 416.0, 240.0]]))
    pinhole = {"width": 832, "height": 480, "fx": 500.0, "fy": focal_px, "cx": 416.0, "cy": 240.0}
    data = {"poses": [IDENTITY], "intrinsics": [[500.0, focal_px, 416.0, 240.0]]}

    def fits(check: Callable[[], object]) -> bool:
        try:
            check()
        except (RequestRefused, jsonschema.ValidationError):
            return False
        return True

    schemas: dict[str, Any] = dict(control_schemas())
    doors: list[Callable[[], object]] = [
        lambda: parse_options({"reference_intrinsics": pinhole}),
        lambda: parse_control("camera", TRAJECTORY_SCHEMA, data),
        lambda: jsonschema.validate(data, schemas[TRAJECTORY_SCHEMA]),
        lambda: load_clip(tmp_path),
    ]
    assert [fits(door) for door in doors] == [focal_px >= MIN_FOCAL_PX] * 4


def test_every_schema_is_described() -> None:
    assert set(control_schemas()) == {schema for schemas in SCHEMAS.values() for schema in schemas}


@pytest.mark.parametrize(("track", "schema"), [(track, schema) for track, names in SCHEMAS.items() for schema in names])
def test_schema_and_parser_agree(track: str, schema: str) -> None:
    document = control_schemas()[schema]
    assert isinstance(document, dict)
    jsonschema.Draft202012Validator.check_schema(document)
    validator = jsonschema.Draft202012Validator(document)
    verdicts: set[bool] = set()

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.one_of(DATA[schema], GOOD[schema]))
    def agree(data: object) -> None:
        try:
            canonical = json.loads(parse_control(track, schema, data))
            accepted = True
        except RequestRefused:
            accepted = False
        assert validator.is_valid(data) == accepted, data
        if accepted:
            assert validator.is_valid(canonical), canonical
            assert json.loads(parse_control(track, schema, canonical)) == canonical
        verdicts.add(accepted)

    agree()
    assert verdicts == {True, False}


def test_the_only_possible_number_is_named_as_such() -> None:
    with pytest.raises(RequestRefused, match=r"^transition_chunks: expected 1, got 2"):
        parse_control("camera", MOTION_SCHEMA, MOTION | {"transition_chunks": 2})
