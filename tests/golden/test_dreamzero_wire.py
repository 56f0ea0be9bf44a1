"""The robot dialect speaks the exact bytes of the golden `wire/` files.

The folder is `$WORLDSERVE_GOLDEN_DIR/dreamzero`, by default the copy in `tests/golden/data`. The files were made by the
packers that robot clients and both servers use; see the README beside the golden vectors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from server.wire.robot_arrays import pack_message, unpack_message
from server.wire.robot_messages import (
    InferRequest,
    ResetRequest,
    RobotConfig,
    RobotForm,
    config_map,
    error_reply,
    pack_actions,
    read_request,
    reset_reply,
)

FOLDER = Path(os.environ.get("WORLDSERVE_GOLDEN_DIR") or Path(__file__).parent / "data") / "dreamzero"


def wire(name: str) -> bytes:
    return (FOLDER / "wire" / name).read_bytes()


def manifest() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8")))


def values() -> dict[str, Any]:
    return dict(load_file(FOLDER / "wire_values.safetensors"))


@pytest.mark.parametrize(
    ("form", "name"),
    [(RobotForm.OFFICIAL, "handshake_official.bin"), (RobotForm.OPENPI, "handshake_vllm_omni.bin")],
)
def test_the_first_message(form: RobotForm, name: str) -> None:
    said = unpack_message(wire(name))
    assert isinstance(said, dict)
    robot = RobotConfig(
        image_height=said["image_resolution"][0],
        image_width=said["image_resolution"][1],
        needs_wrist_camera=said["needs_wrist_camera"],
        num_external_cameras=said["n_external_cameras"],
        needs_stereo_camera=said["needs_stereo_camera"],
        action_space=said["action_space"],
    )
    assert pack_message(config_map(robot, form)) == wire(name)


@pytest.mark.parametrize(
    ("name", "prefix"), [("request_infer_single.bin", "single/"), ("request_infer_4frames.bin", "four/")]
)
def test_a_request_for_actions(name: str, prefix: str) -> None:
    request = read_request(wire(name))
    assert isinstance(request, InferRequest)
    expected = {key.removeprefix(prefix): array for key, array in values().items() if key.startswith(prefix)}
    assert request.arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert request.arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(request.arrays[key], array)
    fields = manifest()["cases"]["wire"]["request_fields"]
    assert (request.prompt, request.session_id) == (fields["prompt"], fields["session_id"])
    assert request.step_id is None


@pytest.mark.parametrize("name", ["request_infer_single.bin", "request_infer_4frames.bin", "scalar_npgeneric.bin"])
def test_what_clients_pack_is_what_we_pack(name: str) -> None:
    message = unpack_message(wire(name))
    if name == "scalar_npgeneric.bin":
        assert isinstance(message, dict)
        message = {key: value[()] for key, value in message.items() if isinstance(value, np.ndarray)}
    assert pack_message(message) == wire(name)


def test_a_request_for_a_reset() -> None:
    assert read_request(wire("request_reset.bin")) == ResetRequest(session_id=None)


def test_the_answer_to_a_request() -> None:
    actions = values()["response"]
    assert actions.ndim == 2
    assert pack_actions(actions) == wire("response_infer.bin")


def test_the_answers_to_a_reset() -> None:
    assert reset_reply(RobotForm.OPENPI) == wire("response_reset_vllm_omni.bin")
    assert reset_reply(RobotForm.OFFICIAL) == wire("response_reset_official.txt").decode()


def test_the_answer_to_a_failure_of_the_server() -> None:
    reply = error_reply(RobotForm.OPENPI, "internal", "NumPy said something at line 3")
    assert reply == wire("response_error_vllm_omni.bin")
