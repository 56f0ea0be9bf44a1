from __future__ import annotations

import numpy as np
import pytest

from server.robot_history import NUM_REMEMBERED_CALLS, CallHistory
from server.robot_session import Observation, RobotAnswer, RobotCall


def answered(number: int, total_ms: float, prompt: str = "go") -> RobotCall:
    call = RobotCall(
        observation=Observation(prompt=prompt, arrays=(), payload=()), step_id=None, arrived_at=0.0, started_at=0.0
    )
    actions = np.full((24, 8), number, np.float32)
    call.answer = RobotAnswer(run=0, step_id=None, actions=actions, server_timing={"total_ms": total_ms})
    return call


def test_nothing_is_known_before_the_first_answer() -> None:
    history = CallHistory()
    assert history.times is None
    assert history.actions is None
    assert history.recent_ms == ()


@pytest.mark.parametrize(
    ("times", "median_ms", "p95_ms"),
    [([7.0], 7.0, 7.0), ([9.0, 1.0], 5.0, 9.0), (list(range(1, 21)), 10.5, 19), (list(range(1, 41)), 20.5, 38)],
)
def test_times_of_the_latest_calls(times: list[float], median_ms: float, p95_ms: float) -> None:
    history = CallHistory()
    for time_ms in times:
        history.note(answered(0, time_ms))
    assert history.times is not None
    assert (history.times.last_ms, history.times.median_ms, history.times.p95_ms) == (times[-1], median_ms, p95_ms)


def test_old_calls_are_forgotten_and_the_last_one_is_shown() -> None:
    history = CallHistory()
    history.note(answered(0, 1000.0, "old"))
    for number in range(1, NUM_REMEMBERED_CALLS + 1):
        history.note(answered(number, 1.0, f"task {number}"))
    assert history.recent_ms == (1.0,) * NUM_REMEMBERED_CALLS
    assert history.actions is not None
    assert history.actions[0, 0] == NUM_REMEMBERED_CALLS
    assert history.prompt == f"task {NUM_REMEMBERED_CALLS}"
