"""Options of DreamZero and what a training configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from worldmodel.dreamzero.config import DreamZeroOptions, StepSkipping, parse_options
from worldmodel.dreamzero.controls import control_schemas, parse_control
from worldmodel.dreamzero.normalize import NormalizationMode
from worldmodel.dreamzero.training_config import PROMPT_SWITCHES, TrainingConfig, read_training_config
from worldmodel.errors import RequestRefused


def test_options_survive_the_trip() -> None:
    given = {
        "embodiment": "yam",
        "cameras": ["top", "left"],
        "tokenizer": "elsewhere",
        "step_skipping": "dynamic",
        "computed_steps": 16,
        "noise_seed": "session",
        "guidance": 3,
        "shift": 2.5,
        "prompt_template": "do {prompt}",
    }
    options = DreamZeroOptions.from_json(parse_options(given))
    assert options == DreamZeroOptions(
        embodiment="yam",
        cameras=("top", "left"),
        tokenizer="elsewhere",
        step_skipping=StepSkipping.DYNAMIC,
        computed_steps=16,
        noise_seed=None,
        guidance=3.0,
        shift=2.5,
        prompt_template="do {prompt}",
    )
    assert DreamZeroOptions.from_json(parse_options({})) == DreamZeroOptions()
    assert DreamZeroOptions().noise_seed == 1140


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"computed_steps": 9}, "computed_steps"),
        ({"computed_steps": True}, "computed_steps"),
        ({"computed_steps": 8.0}, "computed_steps"),
        ({"noise_seed": -1}, "noise_seed"),
        ({"noise_seed": "other"}, "noise_seed"),
        ({"guidance": 0}, "guidance"),
        ({"shift": "5"}, "shift"),
        ({"shift": True}, "shift"),
        ({"embodiment": "droid"}, "embodiment"),
        ({"step_skipping": "none"}, "step_skipping"),
        ({"prompt_template": "no place"}, "prompt_template"),
        ({"tokenizer": ""}, "tokenizer"),
        ({"cameras": []}, "cameras"),
        ({"cameras": "top"}, "cameras"),
        ({"cameras": ["top", ""]}, "cameras[1]"),
        ({"cameras": ["top", "left", "top"]}, "cameras[2]"),
        ({"steps": 8}, "steps"),
    ],
)
def test_bad_options_are_named(given: dict[str, object], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_options(given)
    assert (caught.value.code, caught.value.field) == ("bad_options", field)


def test_there_are_no_controls() -> None:
    assert control_schemas() == {}
    with pytest.raises(RequestRefused, match="takes no controls"):
        parse_control("camera", "x", {})


def read(tmp_path: Path, content: Any, tag: str = "oxe_droid") -> tuple[TrainingConfig, list[str]]:
    problems: list[str] = []
    file = tmp_path / "conf.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return read_training_config(file, tag, problems), problems


MODES = ", ".join(NormalizationMode)


def keys(kind: str, *names: str) -> dict[str, Any]:
    return {kind: {"modality_keys": [f"{kind}.{name}" for name in names]}}


def test_settings_are_found_wherever_they_stand(tmp_path: Path) -> None:
    config, problems = read(
        tmp_path,
        {
            "relative_action": False,
            "a": [{"b": {"relative_action_keys": ["x"]}}, keys("state", "x", "y")],
            "c": {"_target_": "lib.VideoResize", "height": 16, "width": 32},
            "d": {"normalization_modes": {"state.x": "min_max"}},
        },
    )
    assert not problems
    assert config == TrainingConfig(
        keys={"state": ("x", "y")},
        modes={"state.x": NormalizationMode.MIN_MAX},
        relative_action=False,
        relative_action_keys=("x",),
        view_size=(16, 32),
    )


@pytest.mark.parametrize(
    ("relative", "by_row", "expected"),
    [(False, True, True), (True, False, True), (False, False, False), (False, None, False), (None, True, True)],
)
def test_actions_are_relative_by_either_switch(
    tmp_path: Path, relative: bool | None, by_row: bool | None, expected: bool
) -> None:
    switches = {"relative_action": relative, "relative_action_per_horizon": by_row}
    config, problems = read(tmp_path, {key: value for key, value in switches.items() if value is not None})
    assert not problems
    assert config.relative_action is expected
    assert config.statistics_by_row is bool(by_row)


def test_the_robots_own_settings_win(tmp_path: Path) -> None:
    tree = {"oxe_droid": keys("state", "x"), "config_agibot": keys("state", "y")}
    config, problems = read(tmp_path, tree)
    assert not problems
    assert config.keys == {"state": ("x",)}
    config, problems = read(tmp_path, tree, tag="agibot")
    assert config.keys == {"state": ("y",)}


@pytest.mark.parametrize(
    ("tag", "other", "expected"),
    [
        ("yam", "yaml_v1", ()),
        ("yam", "config_yam_v2", ("x",)),
        ("agibot", "agibots", ()),
        ("agibot", "Agibot-agibot", ("x",)),
    ],
)
def test_a_key_names_a_robot_by_whole_words(tmp_path: Path, tag: str, other: str, expected: tuple[str, ...]) -> None:
    config, problems = read(tmp_path, {other: keys("state", "x"), "else": keys("state", "y")}, tag=tag)
    assert len(problems) == (not expected)
    if expected:
        assert config.keys["state"] == expected


@pytest.mark.parametrize("switch", PROMPT_SWITCHES)
@pytest.mark.parametrize("value", [True, "yes", 1])
def test_a_prompt_that_would_be_another_text_is_a_problem(tmp_path: Path, switch: str, value: object) -> None:
    text = f"conf.yaml: {switch}: expected false, the only form that is served, got {value!r}"
    wrong: list[dict[str, Any]] = [
        {switch: value},
        {"transforms": {"oxe_droid": {"transforms": [{switch: value}]}, "yam": {switch: False}}},
        {"transforms": {"oxe_droid": {"a": 1}}, "data": [{switch: value}, {switch: False}]},
        {"transform_oxe_droid": {"a": 1}, "data": {switch: value}},
    ]
    fine: list[dict[str, Any]] = [
        {switch: False},
        {switch: None},
        {"transforms": {"oxe_droid": {"transforms": [{switch: False}]}, "yam": {"transforms": [{switch: value}]}}},
        {"transforms": {"oxe_droid": {"a": 1}, "yam": {"transforms": [{switch: value}]}}},
        {"transform_oxe_droid": {"a": 1}, "transform_yam": {switch: value}},
    ]
    for tree in wrong:
        assert read(tmp_path, tree)[1] == [text]
    for tree in fine:
        assert read(tmp_path, tree)[1] == []


def test_what_only_another_robot_says_is_not_said(tmp_path: Path) -> None:
    said = {
        "relative_action": True,
        "relative_action_keys": ["x"],
        "normalization_modes": {"state.x": "q99"},
        "resize": {"_target_": "lib.VideoResize", "height": 16, "width": 32},
        **keys("state", "x"),
    }
    for ours, others in (("oxe_droid", "yam"), ("config_oxe_droid_v1", "config_yam_v1")):
        config, problems = read(tmp_path, {ours: {"a": 1}, others: said})
        assert not problems
        assert config == TrainingConfig()
    assert read(tmp_path, {"config_oxe_droid": {"a": 1}, "all": said})[0].relative_action is True


def test_rotations_of_our_robot_are_found(tmp_path: Path) -> None:
    turned = {"target_rotations": {"state.x": "rotation_6d", "state.y": None}}
    for tree in ([turned], {"transforms": {"oxe_droid": [turned]}}, {"transforms": {"oxe_droid": {}}, "data": turned}):
        config, problems = read(tmp_path, tree)
        assert not problems
        assert config.rotations == {"state.x": "rotation_6d"}
    assert read(tmp_path, {"transforms": {"oxe_droid": {}, "yam": [turned]}})[0].rotations == {}


def test_what_other_robots_say_of_their_keys_is_no_problem(tmp_path: Path) -> None:
    def modes(**words: str) -> dict[str, Any]:
        return {"normalization_modes": {f"state.{key}": word for key, word in words.items()}}

    tree = {
        "oxe_droid": modes(x="q99"),
        "agibot": modes(x="min_max", head="q99", hand="log"),
        "yam": modes(head="scale"),
    }
    config, problems = read(tmp_path, tree)
    assert not problems
    assert config.modes == {"state.x": NormalizationMode.Q99}
    _, problems = read(tmp_path, tree, tag="agibot")
    assert problems == ["conf.yaml: normalization of state.hand: expected one of " + MODES + ", got 'log'"]
    _, problems = read(tmp_path, {"a": modes(head="q99"), "b": modes(head="scale")})
    assert problems == ["conf.yaml: normalization of state.head stands there with different values: ['q99', 'scale']"]


@pytest.mark.parametrize("beside", ["data", "gr2", "oxe_droids"])
def test_what_may_be_of_another_robot_is_not_taken_for_ours_and_not_passed_over(tmp_path: Path, beside: str) -> None:
    turned = {"target_rotations": {"state.x": "rotation_6d"}}
    config, problems = read(tmp_path, {"oxe_droid": {}, beside: {"formalize_language": True, "t": turned}})
    assert problems == ["conf.yaml: formalize_language: expected false, the only form that is served, got True"]
    assert config.rotations == {"state.x": "rotation_6d"}
    own = {"formalize_language": False, "target_rotations": {"state.x": None}}
    config, problems = read(tmp_path, {"oxe_droid": own, beside: {"formalize_language": True, "t": turned}})
    assert (config.rotations, problems) == ({}, [])
    where = f"stands only below {beside}, which may be of another robot: write it below yours"
    config, problems = read(tmp_path, {"oxe_droid": {}, beside: {"relative_action": True, **keys("state", "x")}})
    assert problems == [f"conf.yaml: {name}: {where}" for name in ("relative_action", "state.modality_keys")]
    assert config == TrainingConfig(misstated=frozenset({"relative_action", "state.modality_keys"}))
    by_row = {"relative_action_per_horizon": True}
    _, problems = read(tmp_path, {"relative_action": False, "a": {"oxe_droid": {}, beside: by_row}})
    assert problems == [f"conf.yaml: relative_action_per_horizon: {where}"]
    _, problems = read(tmp_path, {"relative_action": False, "oxe_droid": {}, beside: {"relative_action": True}})
    assert problems == ["conf.yaml: relative_action stands there with different values: [False, True]"]


def test_a_setting_of_another_type_is_not_called_missing(tmp_path: Path) -> None:
    content = {"relative_action": "${x}", "relative_action_keys": "x", "normalization_modes": "${y}"}
    content |= {"state": {"modality_keys": "${z}"}}
    config, problems = read(tmp_path, content)
    assert problems == [
        "conf.yaml: relative_action: expected true or false, got '${x}'",
        "conf.yaml: relative_action_keys: expected a list of keys, got 'x'",
        "conf.yaml: state.modality_keys: expected a list of keys, got '${z}'",
        "conf.yaml: normalization_modes: expected a table, got '${y}'",
    ]
    assert config.misstated >= {"relative_action", "state.modality_keys"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "relative_action: true\nb: {c: 1}\nrelative_action: false\n",
            "is not valid YAML (key 'relative_action' stands there twice, the second time in line 3)",
        ),
        ("a:\n- b:\n    x: 1\n    x: 1\n", "is not valid YAML (key 'x' stands there twice, the second time in line 4)"),
        ({"a": keys("state", "x"), "b": keys("state", "y")}, "state.modality_keys stands there with different values"),
        ({"a": {"relative_action": True}, "b": {"relative_action": False}}, "relative_action stands there"),
        ({"normalization_modes": {"state.x": "log"}}, "normalization of state.x: expected one of"),
        ("a: [", "is not valid YAML"),
        ("&a\nb: *a", "is not valid YAML"),
        ("trained: 2026-13-45", "is not valid YAML (month must be in 1..12)"),
        (
            "\n".join(["a0: &a0 [1]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9))]),
            "is not valid YAML (it repeats its parts until there are more than 1000000 of them)",
        ),
        ("a: &a\n- *a", "is not valid YAML"),
    ],
)
def test_contradictions_are_problems(tmp_path: Path, content: Any, problem: str) -> None:
    _, problems = read(tmp_path, content)
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    problems: list[str] = []
    config = read_training_config(tmp_path / "experiment_cfg" / "conf.yaml", "yam", problems)
    assert config == TrainingConfig(was_read=False)
    assert problems == ["experiment_cfg/conf.yaml is missing: it says how actions and states are normalised"]
