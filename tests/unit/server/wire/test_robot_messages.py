"""What a robot may ask, and each form of answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from server.wire.robot_arrays import pack_message, unpack_message
from server.wire.robot_messages import (
    InferRequest,
    MalformedRequest,
    ResetRequest,
    RobotForm,
    StepAnswer,
    error_reply,
    pack_step_answer,
    read_request,
    reset_reply,
    unsupported_reply,
)
from server.wire.robot_rest import RobotStep, read_step_arrays

STATE = np.arange(7, dtype=np.float32)


def infer(**fields: Any) -> InferRequest:
    request = read_request(pack_message(fields))
    assert isinstance(request, InferRequest)
    return request


@pytest.mark.parametrize(
    "fields", [{}, *({"endpoint": word} for word in ("infer", "anything", "", None, 5, [1], b"reset", STATE))]
)
def test_every_endpoint_but_reset_asks_for_actions(fields: dict[str, Any]) -> None:
    request = infer(prompt="go", **fields)
    assert (request.prompt, request.arrays) == ("go", {})


def test_a_reset_may_name_its_session() -> None:
    request = read_request(pack_message({"endpoint": "reset", "session_id": "a", "rest": 1}))
    assert request == ResetRequest(session_id="a")


def test_what_is_left_out_has_a_default() -> None:
    request = infer()
    assert (request.session_id, request.step_id, request.prompt, request.arrays) == (None, None, "", {})
    assert infer(session_id=None, prompt=None) == request
    assert infer(session_id="") == request


def test_only_arrays_and_what_is_below_observation_is_observed() -> None:
    request = infer(
        **{"observation/joint_position": STATE, "observation/gripper_position": 0.5, "observation/list": [1, 2.5]},
        other=STATE,
        seed=7,
        sampling_params={"num_inference_steps": 4},
    )
    assert request.arrays.keys() == {
        "observation/joint_position",
        "observation/gripper_position",
        "observation/list",
        "other",
    }
    assert request.arrays["observation/gripper_position"].dtype == np.float64
    np.testing.assert_array_equal(request.arrays["observation/list"], [1, 2.5])


@pytest.mark.parametrize("step_id", [0, 5, 2**53 - 1, np.int64(5)])
def test_step_ids(step_id: Any) -> None:
    assert infer(step_id=step_id).step_id == int(step_id)
    assert infer(step_id=0, run=step_id).run == int(step_id)


def test_a_run_belongs_to_a_step_id() -> None:
    assert infer(step_id=0).run is None
    request = infer(run="mine")
    assert (request.run, request.arrays) == (None, {})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session_id": 3}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"step_id": -1}, "step_id"),
        ({"step_id": 2**53}, "step_id"),
        ({"step_id": 1.0}, "step_id"),
        ({"step_id": True}, "step_id"),
        ({"step_id": "1"}, "step_id"),
        ({"step_id": 0, "run": -1}, "run"),
        ({"step_id": 0, "run": "first"}, "run"),
        ({"session_id": STATE}, "session_id"),
        ({"session_id": STATE[:0]}, "session_id"),
        ({"prompt": ["go"]}, "prompt"),
        ({"prompt": STATE}, "prompt"),
        ({"prompt": STATE[:0]}, "prompt"),
        ({"prompt": np.float32(0)}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 0}, "prompt"),
        ({"prompt": False}, "prompt"),
        ({"observation/x": "text"}, "observation/x"),
        ({"observation/x": {"a": 1}}, "observation/x"),
        ({"observation/x": [1, [2]]}, "observation/x"),
        ({"observation/x": [True]}, "observation/x"),
        ({"observation/x": np.array([0.0, np.nan])}, "observation/x"),
        ({"observation/x": float("inf")}, "observation/x"),
        ({"x": np.float32(np.inf)}, "x"),
        ({f"observation/{index}": 1 for index in range(65)}, None),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str | None) -> None:
    with pytest.raises(MalformedRequest) as caught:
        infer(**fields)
    assert caught.value.field == field
    assert field is None or str(caught.value).startswith(field)


@pytest.mark.parametrize("value", ["text", None, {"a": 1}, [1, [2]], True, np.array([0.0, np.nan]), float("inf")])
def test_what_the_model_does_not_take_may_be_anything(value: Any) -> None:
    fields = {"observation/x": value, "observation/joint_position": STATE, "mask": np.zeros(3, bool)}
    request = read_request(pack_message(fields), taken=("observation/joint_position", "observation/gripper_position"))
    assert isinstance(request, InferRequest)
    assert list(request.arrays) == ["observation/joint_position"]
    with pytest.raises(MalformedRequest, match=r"^observation/x: "):
        read_request(pack_message(fields), taken=("observation/x",))


def test_what_the_model_does_not_take_is_bounded_all_the_same() -> None:
    with pytest.raises(MalformedRequest, match=r"the observation has 65 arrays: expected at most 64"):
        read_request(pack_message({f"observation/{index}": 1 for index in range(65)}), taken=())


@pytest.mark.parametrize("data", [b"", b"\xc1", pack_message([1]), pack_message(STATE), b"\x80\x80"])
def test_what_is_no_map_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_request(data)


def test_an_answer_with_a_step_id_says_everything() -> None:
    actions = np.ones((2, 3), np.float32)
    answer = StepAnswer(session_id="a", run=1, step_id=9, actions=actions, server_timing={"infer_ms": 1.5})
    message = unpack_message(pack_step_answer(answer))
    assert isinstance(message, dict)
    np.testing.assert_array_equal(message.pop("actions"), actions)
    assert message == {"session_id": "a", "run": 1, "step_id": 9, "server_timing": {"infer_ms": 1.5}}


def test_errors_have_the_form_of_the_address() -> None:
    assert error_reply(RobotForm.OFFICIAL, "capacity", "full") == "capacity: full"
    assert error_reply(RobotForm.OFFICIAL, "internal", "secret") == "Internal inference error"
    binary = error_reply(RobotForm.OPENPI, "capacity", "full")
    assert isinstance(binary, bytes)
    assert unpack_message(binary) == {"type": "error", "message": "capacity: full"}
    assert isinstance(reset_reply(RobotForm.OFFICIAL), str)
    assert json.loads(unsupported_reply("no robot")) == {"type": "error", "code": "unsupported", "message": "no robot"}


# ---------------------------------------------------------------- JSON


def step(**observation: Any) -> RobotStep:
    return RobotStep.model_validate({"step_id": 0, "observation": observation})


def test_arrays_in_json() -> None:
    arrays = read_step_arrays(step(a={"dtype": "|u1", "shape": [1, 2], "data": "AQI="}, b=[1.0, 2.0], c=3.5))
    np.testing.assert_array_equal(arrays["a"], [[1, 2]])
    assert arrays["a"].dtype == np.uint8
    np.testing.assert_array_equal(arrays["b"], [1.0, 2.0])
    assert arrays["c"].shape == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"dtype": "|u1", "shape": [1, 3], "data": "AQI="}, "has 3 bytes, got 2"),
        ({"dtype": "|u1", "shape": [2], "data": "A?I="}, "not base64"),
        ({"dtype": "|O", "shape": [2], "data": "AQI="}, "is not read"),
        ({"dtype": "<f4", "shape": [1], "data": "AADAfw=="}, "finite"),
    ],
)
def test_a_wrong_array_in_json_is_named(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedRequest, match=reason) as caught:
        read_step_arrays(step(a=body))
    assert caught.value.field == "a"
