"""The `omni` dialect on paper: what is accepted, and that whatever is refused is named."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.config import LimitsSection
from server.dialects.omni_events import Span
from server.dialects.omni_messages import (
    InteractionPlan,
    StartPlan,
    find_event_id,
    parse_client_message,
    plan_interaction,
    plan_start,
)
from server.errors import BadInput, ErrorCode
from server.wire.messages import ImageBase64, ImageUpload, Pacing
from server.wire.omni_messages import OmniError, OmniInteraction, OmniStart
from tests.support.server_worker import model_info
from worldmodel import catalog

LIMITS = LimitsSection(max_prompt_chars=100)
INFO = model_info(fps=16)
PARSE = catalog.control_parser("fake")
DATA = "interaction.event.multi_modal_data.camera.data"
SCRIPT = "extra_params.camera_action_script"
IMAGE = {"image_url": "data:image/png;base64,AAAA"}


def start(**fields: Any) -> StartPlan:
    text = json.dumps({"type": "session.start", "prompt": "a town", "image_reference": IMAGE, **fields})
    message = parse_client_message(text, LIMITS)
    assert isinstance(message, OmniStart)
    return plan_start(message, INFO, model="fake", aliases=("org/world",), parse_control=PARSE)


def interact(event: object, **fields: Any) -> InteractionPlan:
    return interact_text(json.dumps({"type": "session.interaction", "interaction": {"event": event, **fields}}))


def interact_text(text: str) -> InteractionPlan:
    message = parse_client_message(text, LIMITS)
    assert isinstance(message, OmniInteraction)
    return plan_interaction(message.interaction, PARSE)


def move(data: object, **fields: Any) -> InteractionPlan:
    return interact({"multi_modal_data": {"camera": {"data": data, **fields}}})


def data_of(plan: InteractionPlan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(plan.controls[-1].data)
    return data


# ---------------------------------------------------------------- session.start


def test_a_start_with_what_it_must_have_goes_on_until_stopped() -> None:
    plan = start()
    assert (plan.max_chunks, plan.num_frames, plan.script) == (None, None, ())
    assert plan.start.pacing is Pacing.CLOCK
    assert plan.start.image == ImageBase64(base64="AAAA")
    assert start(image_reference={"file_id": "u-1"}).start.image == ImageUpload(upload_id="u-1")


@pytest.mark.parametrize(
    ("fields", "num_chunks"),
    [
        ({"num_frames": 9}, 1),
        ({"num_frames": 81}, 7),
        ({"video_params": {"num_frames": 33}}, 3),
        ({"num_frames": 21, "video_params": {"num_frames": 33}}, 2),
        ({"num_frames": 21, "seconds": "9"}, 2),
        ({"seconds": "1"}, 2),
        ({"seconds": "3"}, 5),
    ],
)
def test_a_length_is_a_number_of_chunks(fields: dict[str, Any], num_chunks: int) -> None:
    plan = start(**fields)
    assert plan.max_chunks == num_chunks
    assert plan.num_frames == 9 + 12 * (num_chunks - 1)
    assert plan.start.pacing is Pacing.FREE


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10_000))
def test_frame_counts_are_whole_chunks_or_refused_with_their_neighbours(num_frames: int) -> None:
    valid = [9 + 12 * later for later in range(900)]
    if num_frames in valid:
        plan = start(num_frames=num_frames)
        assert plan.num_frames == valid[(plan.max_chunks or 0) - 1] == num_frames
        return
    with pytest.raises(BadInput) as caught:
        start(num_frames=num_frames)
    assert caught.value.field == "num_frames"
    assert str(max((it for it in valid if it < num_frames), default=9)) in caught.value.message


@pytest.mark.parametrize(
    ("fields", "pacing"),
    [
        ({"streaming_buffer_seconds": 1.25}, Pacing.PLAYBACK),
        ({"streaming_buffer_seconds": 2, "num_frames": 9}, Pacing.PLAYBACK),
        ({"num_frames": 9, "extra_params": {"pace_to_media_time": True}}, Pacing.CLOCK),
        ({"num_frames": 9, "extra_params": {"pace_to_media_time": False}}, Pacing.FREE),
    ],
)
def test_the_pace_is_the_viewers_the_clocks_or_none(fields: dict[str, Any], pacing: Pacing) -> None:
    assert start(**fields).start.pacing is pacing


def test_the_start_of_the_published_client_is_accepted() -> None:
    plan = start(
        model="org/world",
        format="m4s",
        width=32,
        height=32,
        fps=16,
        num_frames=33,
        num_inference_steps=4,
        guidance_scale=1.0,
        negative_prompt="blurred",
        seed=42,
        user="me",
        something_for_another_model={"x": 1},
        extra_params={"flow_shift": 5.0, "camera_action_script": [[["w"], ["w"], ["w"]], [["a"], [], []]]},
    )
    assert (plan.max_chunks, plan.start.seed) == (3, 42)
    (control,) = plan.script
    assert json.loads(control.data) == {"mode": "script", "frames": [["w"], ["w"], ["w"], ["a"], [], []]}


def test_sampling_params_stand_for_fields_and_extras_that_are_not_beside_them() -> None:
    plan = start(seed=1, sampling_params={"seed": 2, "num_frames": 21, "camera_action_script": [[["d"], [], []]]})
    assert (plan.start.seed, plan.num_frames, len(plan.script)) == (1, 21, 1)


REFUSED_STARTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": 3}),
    ("prompt", {"prompt": "  "}),
    ("prompt", {"prompt": "x" * 101}),
    ("model", {"model": "other"}),
    ("model", {"model": 1}),
    ("format", {"format": "webm"}),
    ("image_reference", {"image_reference": None}),
    ("image_reference", {"image_reference": {}}),
    ("image_reference", {"image_reference": {**IMAGE, "file_id": "u"}}),
    ("image_reference.image_url", {"image_reference": {"image_url": 3}}),
    ("image_reference.image_url", {"image_reference": {"image_url": "https://example.org/a.png"}}),
    ("image_reference.image_url", {"image_reference": {"image_url": "data:text/plain;base64,AAAA"}}),
    ("image_reference.image_url", {"image_reference": {"image_url": "data:image/png,AAAA"}}),
    ("image_reference.url", {"image_reference": {"url": "x"}}),
    ("size", {"size": "64x32"}),
    ("size", {"size": "wide"}),
    ("width", {"width": 64}),
    ("width", {"width": True}),
    ("height", {"height": 64}),
    ("height", {"height": 0}),
    ("video_params.width", {"video_params": {"width": 64}}),
    ("video_params.height", {"video_params": {"height": 1.5}}),
    ("video_params.fps", {"video_params": {"fps": 12}}),
    ("video_params.num_frames", {"video_params": {"num_frames": 10}}),
    ("video_params", {"video_params": 3}),
    ("fps", {"fps": 24}),
    ("fps", {"fps": "16"}),
    ("num_frames", {"num_frames": 8}),
    ("num_frames", {"num_frames": 22}),
    ("num_frames", {"num_frames": True}),
    ("seconds", {"seconds": "0"}),
    ("seconds", {"seconds": 4}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": True}),
    ("streaming_buffer_seconds", {"streaming_buffer_seconds": 0}),
    ("streaming_buffer_seconds", {"streaming_buffer_seconds": float("inf")}),
    ("streaming_buffer_seconds", {"streaming_buffer_seconds": True}),
    ("extra_params", {"extra_params": []}),
    ("extra_params.pace_to_media_time", {"extra_params": {"pace_to_media_time": 1}}),
    (SCRIPT, {"extra_params": {"camera_action_script": "w"}}),
    (SCRIPT, {"extra_params": {"camera_action_script": []}}),
    (f"{SCRIPT}[1]", {"extra_params": {"camera_action_script": [[[], [], []], [[], []]]}}),
    (f"{SCRIPT}[0]", {"extra_params": {"camera_action_script": ["www"[:1]]}}),
    (f"{SCRIPT}[1][2][0]", {"extra_params": {"camera_action_script": [[[], [], []], [[], [], ["x"]]]}}),
    (f"{SCRIPT}[0][1]", {"extra_params": {"camera_action_script": [[[], "w", []]]}}),
    ("negative_prompt", {"negative_prompt": 3}),
    ("num_inference_steps", {"num_inference_steps": 0}),
    ("guidance_scale", {"guidance_scale": 21}),
    ("guidance_scale_2", {"guidance_scale_2": "1"}),
    ("true_cfg_scale", {"true_cfg_scale": -1}),
    ("boundary_ratio", {"boundary_ratio": 2}),
    ("flow_shift", {"flow_shift": "5"}),
    ("user", {"user": 5}),
    ("generate_sound", {"generate_sound": True}),
    ("enable_frame_interpolation", {"enable_frame_interpolation": True}),
    ("lora", {"lora": {"name": "x"}}),
    ("sampling_params", {"sampling_params": 3}),
    ("sampling_params.seed", {"sampling_params": {"seed": "x"}}),
]


@pytest.mark.parametrize(
    ("field", "fields"), REFUSED_STARTS, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED_STARTS)]
)
def test_whatever_is_wrong_with_a_start_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        start(**fields)
    assert caught.value.field == field
    assert field in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"image_reference": None}, "image_reference: expected an object, got None"),
        ({"extra_params": []}, "extra_params: expected an object, got []"),
        ({"lora": "x"}, "lora: expected null, got 'x'"),
        ({"video_params": 3}, "video_params: expected an object, got 3"),
        ({"sampling_params": {"num_frames": 22}}, "sampling_params.num_frames: expected 9 and a multiple of 12 more"),
        ({"sampling_params": {"width": 64}}, "sampling_params.width: this server makes 32x32, got 64"),
        (
            {"sampling_params": {"video_params": {"fps": 1}}},
            "sampling_params.video_params.fps: this server makes 16 frames a second, got 1",
        ),
        ({"num_frames": 9.5}, "num_frames: "),
    ],
)
def test_an_error_of_a_start_is_about_json_and_names_where_it_stood(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput) as caught:
        start(**fields)
    assert caught.value.message.startswith(text)
    assert caught.value.field == text.partition(":")[0]


def test_whole_numbers_may_be_written_as_floats() -> None:
    plan = start(width=32.0, height=32.0, fps=16.0, num_frames=33.0, num_inference_steps=4.0, seed=7.0)
    assert (plan.num_frames, plan.start.seed) == (33, 7)
    assert type(plan.num_frames) is type(plan.start.seed) is int
    assert start(video_params={"num_frames": 21.0, "width": 32.0, "height": 32.0, "fps": 16.0}).num_frames == 21


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"translation": [0, 1]}, f"{DATA}.translation: expected at least 3 items, got 2"),
        ({"rotation": [0, 0, 0, 1, 0]}, f"{DATA}.rotation: expected at most 4 items, got 5"),
        ({"translation": "up"}, f"{DATA}.translation: expected a list, got 'up'"),
        (
            {"rotation": [0, 0, 0, 0]},
            f"{DATA}.rotation: expected a quaternion of a length from 1e-06 to 1.8e+308, got 0",
        ),
        (
            {"rotation": [1.7e308] * 4},
            f"{DATA}.rotation: expected a quaternion of a length from 1e-06 to 1.8e+308, got a longer one",
        ),
    ],
)
def test_an_error_of_a_motion_says_what_was_expected(data: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput) as caught:
        move(data)
    assert caught.value.message == text


def test_every_field_of_a_start_has_a_row() -> None:
    tested = {field.partition(".")[0].partition("[")[0] for field, _ in REFUSED_STARTS}
    assert OmniStart.model_fields.keys() - {"type"} <= tested


@pytest.mark.parametrize("missing", ["prompt", "image_reference"])
def test_what_must_be_there_is_named(missing: str) -> None:
    fields = {"type": "session.start", "prompt": "x", "image_reference": IMAGE}
    del fields[missing]
    with pytest.raises(BadInput, match="required") as caught:
        parse_client_message(json.dumps(fields), LIMITS)
    assert caught.value.field == missing


# ---------------------------------------------------------------- session.interaction


def test_a_prompt_alone_acts_at_once_or_over_chunks() -> None:
    assert interact({"prompt": "rain"}) == InteractionPlan(
        prompt="rain", controls=(), spans=(Span(track="prompt", num_chunks=1),)
    )
    assert interact({"prompt": "rain"}, transition_chunks=0).controls == ()
    plan = interact({"prompt": "rain"}, transition_chunks=3.0)
    assert data_of(plan) == {"chunks": 3}
    assert plan.spans == (Span(track="prompt", num_chunks=3),)


def test_a_velocity_lasts_until_replaced() -> None:
    plan = move({"translation": [0, 0, 0.05], "rotation": [0, 0, 0, 1]}, mode="velocity")
    assert data_of(plan)["mode"] == "velocity"
    assert plan.spans == (Span(track="camera", num_chunks=None),)


@pytest.mark.parametrize(("asked", "num_chunks"), [(None, 1), (0, 1), (1, 1), (4, 4)])
def test_a_target_is_reached_within_its_chunks(asked: int | None, num_chunks: int) -> None:
    event = {"multi_modal_data": {"camera": {"data": {"translation": [1, 2, 3]}}}}
    plan = interact(event, transition_chunks=asked)
    assert data_of(plan) == {
        "mode": "target",
        "translation": [1, 2, 3],
        "rotation": [0, 0, 0, 1],
        "transition_chunks": num_chunks,
    }
    assert plan.spans == (Span(track="camera", num_chunks=num_chunks),)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4))
def test_quaternions_of_any_length_but_zero_are_brought_to_one(rotation: list[float]) -> None:
    length = math.hypot(*rotation)
    if length >= 1e-6:
        got = data_of(move({"rotation": rotation}))["rotation"]
        assert got == pytest.approx([value / length for value in rotation], abs=1e-9)
        return
    with pytest.raises(BadInput) as caught:
        move({"rotation": rotation})
    assert caught.value.field == f"{DATA}.rotation"


def test_keys_are_held_and_no_keys_are_rest() -> None:
    plan = move({"actions": ["w", "j"]})
    assert data_of(plan) == {"mode": "state", "transitions": [{"actions": ["w", "j"]}]}
    assert plan.spans == (Span(track="camera", num_chunks=None),)
    assert move({"actions": []}, mode="velocity").spans == (Span(track="camera", num_chunks=1),)


CAMERA = "interaction.event.multi_modal_data.camera"
REFUSED_INTERACTIONS: list[tuple[str, dict[str, Any]]] = [
    ("interaction.event", {"event": {}}),
    ("interaction.event", {"event": {"multi_modal_data": {}}}),
    ("interaction.event", {"event": 3}),
    ("interaction.event", {}),
    ("interaction.event_id", {"event": {"prompt": "x"}, "event_id": ""}),
    ("interaction.event_id", {"event": {"prompt": "x"}, "event_id": 3}),
    ("interaction.event_id", {"event": {"prompt": "x"}, "event_id": "x" * 129}),
    ("interaction.transition_chunks", {"event": {"prompt": "x"}, "transition_chunks": -1}),
    ("interaction.transition_chunks", {"event": {"prompt": "x"}, "transition_chunks": 1.5}),
    ("interaction.transition_chunks", {"event": {"prompt": "x"}, "transition_chunks": True}),
    ("interaction.transition_chunks", {"event": {"prompt": "x"}, "transition_chunks": 1000}),
    ("interaction.transition_chunks", {"event": {"prompt": "x"}, "transition_chunks": float("nan")}),
    ("interaction.dance", {"event": {"prompt": "x"}, "dance": 1}),
    ("interaction.event.prompt", {"event": {"prompt": "  "}}),
    ("interaction.event.prompt", {"event": {"prompt": 3}}),
    ("interaction.event.prompt", {"event": {"prompt": "x" * 101}}),
    ("interaction.event.negative_prompt", {"event": {"prompt": "x", "negative_prompt": "y"}}),
    ("interaction.event.multi_modal_data", {"event": {"multi_modal_data": 1}}),
    ("interaction.event.multi_modal_data.audio", {"event": {"multi_modal_data": {"audio": 1}}}),
]


@pytest.mark.parametrize(
    ("field", "interaction"),
    REFUSED_INTERACTIONS,
    ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED_INTERACTIONS)],
)
def test_whatever_is_wrong_with_an_interaction_is_named(field: str, interaction: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        interact_text(json.dumps({"type": "session.interaction", "interaction": interaction}))
    assert caught.value.field == field
    assert field in caught.value.message


REFUSED_CAMERAS: list[tuple[str, str]] = [
    (f"{DATA}.rotation", '{"data": {"rotation": [0, 0, 0, 0]}}'),
    (f"{DATA}.rotation", '{"data": {"rotation": [0, 0, 1e-7, 0]}, "mode": "velocity"}'),
    (f"{DATA}.rotation[3]", '{"data": {"rotation": [0, 0, 0, NaN]}}'),
    (f"{DATA}.rotation[0]", '{"data": {"rotation": [Infinity, 0, 0, 1]}}'),
    (f"{DATA}.rotation[3]", '{"data": {"rotation": [0, 0, 0, true]}}'),
    (f"{DATA}.rotation", '{"data": {"rotation": [0, 0, 1]}}'),
    (f"{DATA}.rotation", '{"data": {"rotation": [1e300, 1e300, 1e308, 1.7e308]}}'),
    (f"{DATA}.translation[1]", '{"data": {"translation": [0, NaN, 0]}}'),
    (f"{DATA}.translation[2]", '{"data": {"translation": [0, 0, -Infinity]}}'),
    (f"{DATA}.translation[2]", '{"data": {"translation": [0, 0, 1e999]}}'),
    (f"{DATA}.translation[0]", '{"data": {"translation": [false, 0, 0]}}'),
    (f"{DATA}.translation[0]", '{"data": {"translation": ["1", 0, 0]}}'),
    (f"{DATA}.translation[0]", '{"data": {"translation": [1e7, 0, 0]}}'),
    (f"{DATA}.translation", '{"data": {"translation": [0, 0]}}'),
    (f"{DATA}.translation", '{"data": {"translation": "0 0 1"}}'),
    (f"{DATA}.roll", '{"data": {"translation": [0, 0, 1], "roll": 1}}'),
    (f"{DATA}.actions[0]", '{"data": {"actions": ["x"]}}'),
    (f"{DATA}.actions[1]", '{"data": {"actions": ["w", "w"]}}'),
    (f"{DATA}.actions[0]", '{"data": {"actions": [true]}}'),
    (f"{DATA}.actions", '{"data": {"actions": ["w"], "translation": [0, 0, 1]}}'),
    (f"{CAMERA}.mode", '{"data": {"actions": ["w"]}, "mode": "target"}'),
    (f"{CAMERA}.mode", '{"data": {"translation": [0, 0, 1]}, "mode": "teleport"}'),
    (f"{CAMERA}.mode", '{"data": {"translation": [0, 0, 1]}, "mode": true}'),
    (DATA, '{"data": {}}'),
    (DATA, '{"mode": "velocity"}'),
    (CAMERA, "true"),
]


@pytest.mark.parametrize(
    ("field", "camera"),
    REFUSED_CAMERAS,
    ids=[f"{i}-{row[0].rpartition('.')[2]}" for i, row in enumerate(REFUSED_CAMERAS)],
)
def test_whatever_is_wrong_with_a_camera_is_named(field: str, camera: str) -> None:
    text = (
        '{"type": "session.interaction", "interaction": {"event_id": "e", "event": '
        f'{{"prompt": "x", "multi_modal_data": {{"camera": {camera}}}}}}}}}'
    )
    with pytest.raises(BadInput) as caught:
        interact_text(text)
    assert caught.value.field == field


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("{", ErrorCode.BAD_JSON, None),
        ("[]", ErrorCode.BAD_JSON, None),
        ("{}", ErrorCode.BAD_MESSAGE, "type"),
        ('{"type": "session.dance"}', ErrorCode.BAD_MESSAGE, "type"),
        ('{"type": ["session.stop"]}', ErrorCode.BAD_MESSAGE, "type"),
        ('{"type": "session.stop", "now": true}', ErrorCode.BAD_MESSAGE, "now"),
        ('{"type": "session.playback"}', ErrorCode.BAD_MESSAGE, "position_seconds"),
        ('{"type": "session.playback", "position_seconds": -1}', ErrorCode.BAD_MESSAGE, "position_seconds"),
        ('{"type": "session.playback", "position_seconds": true}', ErrorCode.BAD_MESSAGE, "position_seconds"),
        ('{"type": "session.playback", "position_seconds": NaN}', ErrorCode.BAD_JSON, "position_seconds"),
        ('{"type": "session.interaction"}', ErrorCode.BAD_MESSAGE, "interaction"),
    ],
)
def test_other_frames_are_refused(text: str, code: ErrorCode, field: str | None) -> None:
    with pytest.raises(BadInput) as caught:
        parse_client_message(text, LIMITS)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    ("text", "event_id"),
    [
        ('{"interaction": {"event_id": "a", "event": 3}}', "a"),
        ('{"interaction": {"event_id": "", "event": 3}}', None),
        ('{"interaction": {"event_id": 7}}', None),
        ('{"interaction": {"event_id": "a", "event": NaN}}', "a"),
        ('{"interaction": {"event_id": "\\ud800"}}', None),
        ('{"interaction": []}', None),
        ("[" * 100_000, None),
        ('{"interaction": {"event_id": "a", "transition_chunks": 1' + "0" * 5000 + "}}", "a"),
        ('{"interaction"', None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_the_event_id_of_a_wrong_interaction_is_found(text: str, event_id: str | None) -> None:
    assert find_event_id(text) == event_id


# ---------------------------------------------------------------- anything at all

VALID_START: dict[str, Any] = {
    "type": "session.start",
    "prompt": "a town",
    "image_reference": IMAGE,
    "model": "fake",
    "size": "32x32",
    "num_frames": 33,
    "seed": 3,
    "streaming_buffer_seconds": 1.5,
    "video_params": {"fps": 16},
    "sampling_params": {"guidance_scale": 1.0},
    "extra_params": {"pace_to_media_time": True, "camera_action_script": [[["w"], [], ["a", "l"]]]},
}
VALID_INTERACTION: dict[str, Any] = {
    "type": "session.interaction",
    "interaction": {
        "event_id": "e",
        "event": {
            "prompt": "rain",
            "multi_modal_data": {
                "camera": {"mode": "target", "data": {"translation": [0, 0, 1], "rotation": [0, 0, 0, 1]}}
            },
        },
        "transition_chunks": 2,
    },
}
VALID_KEYS: dict[str, Any] = {
    "type": "session.interaction",
    "interaction": {"event": {"multi_modal_data": {"camera": {"data": {"actions": ["w", "l"]}}}}},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """List the path of every value inside another."""
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [it for key, inner in items for it in ((*path, key), *places(inner, (*path, key)))]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_value_anywhere_is_taken_or_refused_in_a_sentence(data: st.DataObject) -> None:
    message = copy.deepcopy(data.draw(st.sampled_from([VALID_START, VALID_INTERACTION, VALID_KEYS])))
    *parents, last = data.draw(st.sampled_from(places(message)))
    target = message
    for key in parents:
        target = target[key]
    target[last] = data.draw(ANYTHING)
    try:
        parsed = parse_client_message(json.dumps(message), LIMITS)
        if isinstance(parsed, OmniStart):
            plan_start(parsed, INFO, model="fake", aliases=(), parse_control=PARSE)
        elif isinstance(parsed, OmniInteraction):
            plan_interaction(parsed.interaction, PARSE)
    except BadInput as error:
        refused = error
    else:
        return
    OmniError(code=refused.code, message=refused.message, field=refused.field).model_dump_json()
    assert len(refused.message) < 700
