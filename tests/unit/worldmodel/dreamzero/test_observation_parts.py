"""Parts of an observation that the golden files do not reach: other robots, other modes, prompts as literals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from worldmodel.dreamzero.embodiments import EMBODIMENTS, Tiling, embodiment
from worldmodel.dreamzero.normalize import NormalizationMode, Normalizer, read_normalizer
from worldmodel.dreamzero.observation import Cameras, Observation, ObservationReader
from worldmodel.dreamzero.pictures import observation_clip, signed_pictures, start_picture, tile_views, transform_view
from worldmodel.dreamzero.prompts import REMEMBERED_PROMPTS, PromptEncoder, frame_prompt
from worldmodel.dreamzero.robot import Robot, read_robot
from worldmodel.dreamzero.training_config import TrainingConfig

INVERTIBLE = [mode for mode in NormalizationMode if mode is not NormalizationMode.BINARY]
numbers = st.floats(-5, 5, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(mode=st.sampled_from(INVERTIBLE), low=numbers, span=st.floats(0.1, 5), part=st.floats(0, 1))
def test_what_lies_inside_comes_back(mode: NormalizationMode, low: float, span: float, part: float) -> None:
    high = span if mode is NormalizationMode.MEAN_STD else low + span
    normalizer = Normalizer(mode=mode, low=np.array([low]), high=np.array([high]))
    x = np.array([low + part * span])
    np.testing.assert_allclose(normalizer.inverse(normalizer.forward(x)), x, atol=1e-9)


def test_dimensions_that_never_varied() -> None:
    for mode, value in (("q99", 0.3), ("min_max", 0.0), ("scale", 0.0), ("mean_std", 0.3)):
        still = np.array([0.0])
        normalizer = Normalizer(mode=NormalizationMode(mode), low=still, high=still)
        np.testing.assert_allclose(normalizer.forward(np.array([0.3])), [value])
    q99 = Normalizer(mode=NormalizationMode.Q99, low=np.array([2.0]), high=np.array([2.0]))
    assert q99.forward(np.array([9.0])) == [1.0]
    assert q99.inverse(np.array([0.5])) == [2.0]
    mean_std = Normalizer(mode=NormalizationMode.MEAN_STD, low=np.array([2.0]), high=np.array([0.0]))
    assert mean_std.inverse(np.array([0.5])) == [2.0]


def test_statistics_that_do_not_fit_are_named() -> None:
    problems: list[str] = []
    for statistics in (
        {},
        {"q01": [1, 2], "q99": [3]},
        {"q01": ["a"], "q99": [float("nan")]},
        {"q01": [2], "q99": [1]},
    ):
        read_normalizer(statistics, NormalizationMode.Q99, 1, where="x", problems=problems)
    for value in (["1"], [True], [10**400], [None], [[1], [1, 2]], {}):
        read_normalizer({"q01": value, "q99": [3]}, NormalizationMode.Q99, 1, where="x", problems=(found := []))
        assert found == ["x: q01 must be 1 finite number"], value
    assert len(problems) == 6
    assert problems[:3] == [
        "x: q01 is missing, which normalization by q99 needs",
        "x: q99 is missing, which normalization by q99 needs",
        "x: q01 must be 1 finite number",
    ]
    assert problems[-1] == "x: q01 must not exceed q99"


@pytest.mark.parametrize(("num_rows", "count"), [(None, 1), (12, 1), (24, 0)])
def test_statistics_by_row_are_for_as_many_rows_as_there_are(num_rows: int | None, count: int) -> None:
    problems: list[str] = []
    statistics = {"q01": [[0.0]] * 24, "q99": [1.0]}
    read_normalizer(statistics, NormalizationMode.Q99, 1, where="x", problems=problems, num_rows=num_rows)
    assert len(problems) == count


def test_a_crop_is_rounded_down_and_its_place_to_even() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, 41, 10, 3), dtype=np.uint8)
    # 0.95 of 41 and 10 is 38.95 and 9.5; what is left at both sides is 3 and 1, a half of which is 1.5 and 0.5.
    seen = transform_view(frames, 38, 9)
    assert np.allclose(seen.astype(int), frames[:, 2:40, :9], atol=1)


@pytest.mark.parametrize(
    ("frames", "size", "view"), [(4, (180, 320), (176, 320)), (1, (41, 10), (38, 9)), (3, (37, 53), (16, 64))]
)
def test_a_view_has_the_bits_of_the_plain_form(frames: int, size: tuple[int, int], view: tuple[int, int]) -> None:
    frames_THW3 = np.random.default_rng(frames).integers(0, 256, (frames, *size, 3), dtype=np.uint8)
    before = frames_THW3.copy()
    height, width = (int(0.95 * side) for side in size)
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    cropped = np.ascontiguousarray(frames_THW3[:, top : top + height, left : left + width])
    unit_TCHW = torch.from_numpy(cropped).permute(0, 3, 1, 2).float() / 255
    resized_TCHW = functional.interpolate(unit_TCHW, size=view, mode="bilinear", align_corners=False, antialias=True)
    plain = (resized_TCHW * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    np.testing.assert_array_equal(transform_view(frames_THW3, *view), plain)
    np.testing.assert_array_equal(frames_THW3, before)


def test_a_view_is_made_on_one_thread_and_the_others_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads, inside = torch.get_num_threads(), []

    def fail(*_: object, **__: object) -> None:
        inside.append(torch.get_num_threads())
        raise MemoryError

    monkeypatch.setattr(functional, "interpolate", fail)
    torch.set_num_threads(3)
    try:
        with pytest.raises(MemoryError):
            transform_view(np.zeros((1, 20, 20, 3), np.uint8), 8, 8)
        assert (inside, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(num_threads)


def test_quadrants() -> None:
    views = [np.full((2, 3, 4, 3), value, np.uint8) for value in (10, 20, 30)]
    picture = tile_views(views, Tiling.QUADRANTS)
    assert picture.shape == (2, 6, 8, 3)
    assert (picture[:, :3, :4] == 10).all()
    assert (picture[:, 3:, :4] == 20).all()
    assert (picture[:, :3, 4:] == 30).all()
    assert (picture[:, 3:, 4:] == 0).all()


def test_clips_of_every_length() -> None:
    def clip(count: int) -> list[float]:
        return observation_clip(torch.arange(float(count)).expand(3, count).reshape(3, count, 1, 1))[
            0, :, 0, 0
        ].tolist()

    assert clip(4) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert clip(8) == [0, *range(8)]
    assert clip(9) == list(range(9))
    with pytest.raises(ValueError, match="4, 8 or 9 frames, got 5"):
        clip(5)


@pytest.mark.parametrize(("count", "chosen"), [(1, 0), (4, 3), (8, 0), (9, 8)])
def test_the_picture_a_run_begins_with(count: int, chosen: int) -> None:
    pictures = torch.arange(float(count)).expand(3, count).reshape(3, count, 1, 1)
    assert start_picture(pictures)[0, 0, 0] == chosen


def test_signed_pictures_are_resized_after_scaling() -> None:
    """Each place is the mean of the two around its centre: corners are not aligned, and farther ones have no part."""
    ramp = np.array([0, 85, 170, 255], np.uint8)
    pictures = np.tile(ramp[:, None], (1, 4, 1, 3))
    signed = signed_pictures(pictures, 2, 2)
    assert signed.shape == (3, 1, 2, 2)
    torch.testing.assert_close(signed[0, 0], torch.tensor([[-2 / 3, 2 / 3]] * 2))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Close It", "x close it"),
        ("['Open it', 'b']", "x open it"),
        ("('A',)", "x a"),
        ("'Open it'", "x open it"),
        ("0x10", "x 0x10"),
        ("{'a', 'b', 'C'}", "x {'a', 'b', 'c'}"),
        ("[{'a', 'b', 'C'}]", "x [{'a', 'b', 'c'}]"),
        ("{'a': 1,  'b': 2}", "x {'a': 1,  'b': 2}"),
        ("[5]", "x [5]"),
        ("(['a'],)", "x (['a'],)"),
        ("None", "x none"),
        ("[]", "x []"),
        ("[{[]: 1}]", "x [{[]: 1}]"),
        ("0x" + "f" * 4000, "x 0x" + "f" * 4000),
        ("2in 1", "x 2in 1"),
        ("[broken", "x [broken"),
        ("[" * 3000, "x " + "[" * 3000),
        ("", "x "),
        ("{prompt}", "x {prompt}"),
    ],
)
def test_prompts_are_framed(prompt: str, expected: str) -> None:
    assert frame_prompt(prompt, "x {prompt}") == expected


def test_prompts_are_remembered() -> None:
    class Counting:
        calls = 0

        def token_ids(self, prompt: str) -> list[int]:
            return [len(prompt), 1]

        def encode(self, prompt: str) -> torch.Tensor:
            self.calls += 1
            return torch.zeros(2, 4)

    encoder = Counting()
    prompts = PromptEncoder(encoder)
    assert prompts.encode("a") is prompts.encode("a")
    for number in range(REMEMBERED_PROMPTS):
        prompts.encode(str(number))
    prompts.encode("a")
    assert encoder.calls == REMEMBERED_PROMPTS + 2


def metadata(tag: str, cameras: list[str], states: dict[str, int], actions: dict[str, int]) -> dict[str, Any]:
    def entries(dims: dict[str, int]) -> dict[str, Any]:
        return {key: {"shape": [count]} for key, count in dims.items()}

    def statistics(dims: dict[str, int]) -> dict[str, Any]:
        return {key: {"q01": [-1.0] * count, "q99": [1.0] * count} for key, count in dims.items()}

    return {
        tag: {
            "modalities": {
                "video": {name: {"resolution": [8, 6]} for name in cameras},
                "state": entries(states),
                "action": entries(actions),
            },
            "statistics": {"state": statistics(states), "action": statistics(actions)},
        }
    }


def training(content: dict[str, Any], tag: str, **settings: Any) -> TrainingConfig:
    """Say everything that must be said: the order of keys, all normalised by quantiles, joints relative."""
    modalities = content.get(tag, content)["modalities"]
    names = [f"{kind}.{key}" for kind in ("state", "action") for key in modalities[kind]]
    said = {
        "keys": {} if tag == "oxe_droid" else {kind: tuple(modalities[kind]) for kind in modalities},
        "modes": dict.fromkeys(names, NormalizationMode.Q99),
        "relative_action": True,
        "relative_action_keys": tuple(key for key in modalities["action"] if "joint" in key),
    }
    return TrainingConfig(**said | settings)


def read(
    content: dict[str, Any], tag: str, problems: list[str], cameras: tuple[str, ...] | None = None, **settings: Any
) -> Robot | None:
    return read_robot(
        content,
        training(content, tag, **settings),
        embodiment(tag),
        state_width=64,
        action_width=32,
        action_rows=24,
        problems=problems,
        cameras=cameras,
    )


def robot(tag: str, content: dict[str, Any], **settings: Any) -> Robot:
    problems: list[str] = []
    found = read(content, tag, problems, **settings)
    assert found is not None, problems
    return found


AGIBOT_STATES = {"left_arm_joint_position": 7, "right_arm_joint_position": 7, "left_effector": 1, "head": 2}
AGIBOT_ACTIONS = {"left_arm_joint_position": 7, "right_arm_joint_position": 7, "left_effector": 1, "base_velocity": 2}


AGIBOT = metadata("agibot", ["hand_left", "hand_right", "head"], AGIBOT_STATES, AGIBOT_ACTIONS)
AGIBOT_ORDER = {
    "video": ("head", "hand_left", "hand_right"),
    "state": tuple(AGIBOT_STATES),
    "action": tuple(AGIBOT_ACTIONS),
}


def test_a_robot_with_many_keys_reads_them_in_the_order_of_its_training_run() -> None:
    agibot = robot("agibot", AGIBOT, keys=AGIBOT_ORDER)
    assert agibot.cameras == ("observation/head", "observation/hand_left", "observation/hand_right")
    info = agibot.info(24)
    assert [state.num_dims for state in info.states] == [7, 7, 1, 2]
    assert (info.action_dims, info.action_horizon, info.image_height, info.image_width) == (17, 24, 6, 8)
    assert [action.relative_to for action in agibot.actions] == [slice(0, 7), slice(7, 14), None, None]
    raw = np.arange(17.0)
    actions = agibot.absolute_actions(np.zeros((24, 32), np.float32), raw)
    np.testing.assert_array_equal(actions[5], [*range(14), 0, 0, 0])


def test_an_order_that_nobody_stated_is_not_guessed() -> None:
    problems: list[str] = []
    assert read(AGIBOT, "agibot", problems, keys={"state": tuple(AGIBOT_STATES)}) is None
    assert problems == [
        "conf.yaml: video.modality_keys is missing, which is the order of hand_left, hand_right, head: write it there, "
        'or set model.options.cameras = ["...", ...]',
        "conf.yaml: action.modality_keys is missing, which is the order of left_arm_joint_position, "
        "right_arm_joint_position, left_effector, base_velocity: write it there",
    ]


def test_a_rotation_that_would_be_turned_into_another_form_is_refused() -> None:
    rotations = {"state.head": "rotation_6d", "state.another_robots": "quaternion"}
    problems: list[str] = []
    assert read(AGIBOT, "agibot", problems, keys=AGIBOT_ORDER, rotations=rotations) is None
    assert problems == ["conf.yaml: target_rotations turns state.head into rotation_6d: not supported"]


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d")])
def test_a_robot_has_as_many_cameras_as_can_be_tiled(names: tuple[str, ...]) -> None:
    dims = {"joint_position": 7}
    problems: list[str] = []
    found = read(metadata("yam", list(names), dims, dims), "yam", problems)
    if len(names) in (2, 3):
        assert found is not None, problems
        return
    assert found is None
    assert problems == [f"yam: expected 2 or 3 cameras, got {len(names)}: {', '.join(names) or 'none'}"]


@pytest.mark.parametrize("resolution", [[1, 6], [8, 1], [8, 10**9], [8, 6, 3], [8.0, 6], "8x6"])
def test_a_camera_s_size_is_one_that_pictures_have(resolution: object) -> None:
    dims = {"joint_position": 7}
    table = metadata("yam", ["a", "b"], dims, dims)
    table["yam"]["modalities"]["video"]["b"]["resolution"] = resolution
    problems: list[str] = []
    assert read(table, "yam", problems) is None
    assert [each.split(", got")[0] for each in problems] == [
        "metadata.json: modalities.video.b.resolution must be [width, height], each from 2 to 16384"
    ]


def test_the_order_of_cameras_can_be_stated() -> None:
    order = {kind: AGIBOT_ORDER[kind] for kind in ("state", "action")}
    stated = robot("agibot", AGIBOT, keys=order, cameras=("head", "hand_right", "hand_left"))
    assert stated.cameras == ("observation/head", "observation/hand_right", "observation/hand_left")
    problems: list[str] = []
    assert read(AGIBOT, "agibot", problems, keys=order, cameras=("head", "feet")) is None
    assert problems == [
        "metadata.json: modalities.video.feet.resolution must be [width, height], each from 2 to 16384, got null"
    ]
    problems.clear()
    dims = {"joint_position": 7, "gripper_position": 1}
    cameras = [key for key, _ in embodiment("oxe_droid").cameras or ()]
    assert read(metadata("oxe_droid", cameras, dims, dims), "oxe_droid", problems, cameras=tuple(cameras)) is None
    assert problems == ["model.options.cameras: the cameras of oxe_droid have a fixed order"]


@pytest.mark.parametrize("tag", [entry.tag for entry in EMBODIMENTS])
def test_every_embodiment_reads_a_request(tag: str) -> None:
    entry = embodiment(tag)
    cameras = ["a", "b", "c"] if entry.cameras is None else [key for key, _ in entry.cameras]
    dims = {"joint_position": 7, "gripper_position": 1}
    one = robot(tag, metadata(tag, cameras, dims, dims))
    arrays = {key: np.full((6, 8, 3), 10 * (number + 1), np.uint8) for number, key in enumerate(one.cameras)}
    observation = ObservationReader(one, height=4, width=8).read(arrays, ())
    picture = observation.pictures_THW3
    assert picture.shape == (1, 4, 8, 3)
    corners = [int(picture[0, row, column, 0]) for row, column in ((0, 0), (-1, 0), (0, -1), (-1, -1))]
    # Resizing truncates, so that a level may lose one.
    expected = [30, 10, 30, 20] if entry.tiling is Tiling.WRIST_TOP else [10, 20, 30, 0]
    assert np.allclose(corners, expected, atol=1)
    assert "{prompt}" in entry.template


def test_of_more_frames_than_a_call_looks_at_the_last_ones_count() -> None:
    dims = {"joint_position": 7, "gripper_position": 1}
    one = robot("yam", metadata("yam", ["a", "b"], dims, dims))
    reader = ObservationReader(one, height=4, width=8)

    def see(first: int, end: int, cameras: Cameras = ()) -> Observation:
        frames = np.stack([np.full((6, 8, 3), 10 * number, np.uint8) for number in range(first, end)])
        return reader.read(dict.fromkeys(one.cameras, frames), cameras)

    begun = see(0, 6)
    np.testing.assert_array_equal(begun.pictures_THW3, see(5, 6).pictures_THW3)
    long, short = see(6, 13, begun.cameras), see(9, 13, begun.cameras)
    assert np.allclose(long.pictures_THW3[:, 0, 0, 0], [90, 100, 110, 120], atol=1)
    np.testing.assert_array_equal(long.pictures_THW3, short.pictures_THW3)


def test_templates_tell_which_camera_is_where() -> None:
    frames = {tag: frame_prompt("Wave", embodiment(tag).template) for tag in ("oxe_droid", "agibot", "yam")}
    assert "The top view shows the camera view from the robot's wrist" in frames["oxe_droid"]
    assert (
        "The top-left view shows the camera view from the robot's head, the top-right view shows the camera view from "
        "the right hand, the bottom-left view shows the camera view from the left hand, and the bottom-right view is a "
        "black screen (inactive view). The"
    ) in frames["agibot"]
    assert (
        "The top-left view shows the top camera, the top-right view shows the right camera, the bottom-left view shows "
        "the left camera, and the bottom-right view is a black screen. The"
    ) in frames["yam"]
    for text in frames.values():
        assert text.startswith("A multi-view video shows that a robot wave The video is split into ")
        assert text.endswith(" The robot wave")


def test_a_file_of_one_robot_is_not_taken_for_another() -> None:
    dims = {"joint_position": 7, "gripper_position": 1}
    content = metadata("yam", ["a", "b"], dims, dims)["yam"] | {"embodiment_tag": "yam"}
    assert robot("yam", content).cameras == ("observation/a", "observation/b")
    problems: list[str] = []
    assert read(content, "agibot", problems) is None
    assert problems == ["metadata.json: no statistics of agibot, only of yam"]


def test_relative_actions_can_be_off_and_must_have_a_state() -> None:
    dims = {"joint_position": 7, "gripper_position": 1}
    content = metadata("yam", ["a", "b"], dims, dims)
    off = robot("yam", content, relative_action=False)
    assert all(action.relative_to is None for action in off.actions)
    problems: list[str] = []
    content = metadata("yam", ["a", "b"], {"gripper_position": 1}, dims)
    assert read(content, "yam", problems) is None
    assert problems == ["relative action joint_position needs a state of its name and 7 numbers"]


def test_relative_actions_of_another_robot_of_the_file_are_no_problem() -> None:
    dims = {"joint_position": 7, "gripper_position": 1}
    content = metadata("yam", ["a", "b"], dims, dims) | AGIBOT
    names = ("joint_position", "left_arm_joint_position")
    yam = robot("yam", content, relative_action_keys=names)
    assert [action.relative_to for action in yam.actions] == [slice(0, 7), None]
    problems: list[str] = []
    assert read(content, "yam", problems, relative_action_keys=(*names, "elbow")) is None
    assert problems == ["relative_action_keys names no action: elbow"]


def test_statistics_by_row_reach_the_actions() -> None:
    dims = {"joint_position": 1, "gripper_position": 1}
    content = metadata("yam", ["a", "b"], dims, dims)
    rows = np.arange(24.0)[:, None]
    content["yam"]["statistics"]["action"]["joint_position"] = {"q01": (rows - 1).tolist(), "q99": (rows + 1).tolist()}
    for by_row in (False, True):
        # The gripper is not relative: one row for all its rows is enough.
        one = robot("yam", content, statistics_by_row=by_row)
        actions = one.absolute_actions(np.zeros((24, 32), np.float32), np.array([100.0, 0.0]))
        np.testing.assert_allclose(actions[:, 0], 100 + np.arange(24))


def test_statistics_that_should_be_by_row_and_are_not_are_a_problem() -> None:
    dims = {"joint_position": 1, "gripper_position": 1}
    problems: list[str] = []
    assert read(metadata("yam", ["a", "b"], dims, dims), "yam", problems, statistics_by_row=True) is None
    assert problems == [
        "metadata.json: statistics.action.joint_position must be for each row of actions: conf.yaml has "
        "relative_action_per_horizon true"
    ]


def test_nothing_is_taken_for_granted_about_actions() -> None:
    dims = {"joint_position": 7, "gripper_position": 1}
    content = metadata("yam", ["a", "b"], dims, dims)

    def problems_of(**settings: Any) -> list[str]:
        problems: list[str] = []
        assert read(content, "yam", problems, **settings) is None
        return problems

    known = "expected one of q99, min_max, mean_std, scale, binary"
    modes = {f"{kind}.{key}": NormalizationMode.Q99 for kind, key in (("state", "joint_position"), ("action", "x"))}
    assert problems_of(modes=modes, relative_action=None) == [
        f"conf.yaml: normalization_modes does not name state.gripper_position: {known}",
        f"conf.yaml: normalization_modes does not name action.joint_position: {known}",
        f"conf.yaml: normalization_modes does not name action.gripper_position: {known}",
        "conf.yaml: relative_action is missing: expected true or false",
    ]
    assert problems_of(relative_action_keys=None) == [
        "conf.yaml: relative_action is true, but relative_action_keys is missing"
    ]
    assert all(action.relative_to is None for action in robot("yam", content, relative_action_keys=()).actions)
