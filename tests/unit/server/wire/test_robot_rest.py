"""A step in JSON: what its arrays may be, and what is said of others."""

from __future__ import annotations

import numpy as np
import pytest

from server.dialects.world_messages import validate
from server.errors import BadInput
from server.wire.robot_rest import RobotStep, read_step_arrays

ARRAY = {"dtype": "|u1", "shape": [1, 2], "data": "AAE="}


def test_numbers_lists_and_arrays_are_read() -> None:
    observation = {"a": ARRAY, "b": [1.0, 2], "c": 3.0, "d": 4}
    arrays = read_step_arrays(validate(RobotStep, {"step_id": 0, "observation": observation}))
    assert {name: (array.dtype.str, array.tolist()) for name, array in arrays.items()} == {
        "a": ("|u1", [[0, 1]]),
        "b": ("<f8", [1.0, 2.0]),
        "c": ("<f8", 3.0),
        "d": ("<f8", 4.0),
    }
    assert arrays["a"].dtype == np.uint8


@pytest.mark.parametrize("value", ["x", None, [1.0, "x"], {}, ARRAY | {"shape": [-1]}, ARRAY | {"more": 1}, [ARRAY]])
def test_what_is_no_array_is_explained_in_one_sentence(value: object) -> None:
    key = "observation/joint_position"
    with pytest.raises(BadInput) as caught:
        validate(RobotStep, {"step_id": 0, "observation": {"fine": 1.0, key: value}})
    assert caught.value.field == f"observation.{key}"
    assert caught.value.message == (
        f"observation.{key}: expected a number, a list of numbers, or an array as exactly dtype, shape and data, got "
        f"{repr(value)[:80]}"
    )
