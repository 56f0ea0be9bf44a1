"""The latest calls of one robot's session, for people who watch: how long they took, and the last actions.

It spans runs: a reset begins a new episode, but whoever looks on wants to see what the robot did last.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from server.robot_session import Actions, RobotCall

NUM_REMEMBERED_CALLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """Milliseconds from the arrival of a request to its answer, over the remembered calls."""

    last_ms: float
    median_ms: float
    p95_ms: float


class CallHistory:
    """Answered calls, the oldest forgotten. `actions` and `prompt` are those of the last one."""

    def __init__(self) -> None:
        self.actions: Actions | None = None
        self.prompt = ""
        self._total_ms: deque[float] = deque(maxlen=NUM_REMEMBERED_CALLS)

    @property
    def recent_ms(self) -> tuple[float, ...]:
        """Times of the remembered calls, oldest first."""
        return tuple(self._total_ms)

    @property
    def times(self) -> CallTimes | None:
        """What the remembered calls took, None before the first."""
        if not self._total_ms:
            return None
        ordered = sorted(self._total_ms)
        return CallTimes(
            last_ms=self._total_ms[-1],
            median_ms=statistics.median(ordered),
            # The nearest rank: of few calls it is the slowest.
            p95_ms=ordered[-(-95 * len(ordered) // 100) - 1],
        )

    def note(self, call: RobotCall) -> None:
        """Take note of an answered call."""
        answer = call.answer
        assert answer is not None
        self.actions = answer.actions
        self.prompt = call.observation.prompt
        self._total_ms.append(answer.server_timing["total_ms"])
