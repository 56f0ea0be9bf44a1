"""Who waits for which call of a robot's session, and how calls end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from server.errors import ServerError
from server.robot_metrics import RobotMetrics
from server.robot_session import RobotAnswer, RobotCall

ANSWERED, REFUSED, FAILED, DROPPED = "answered", "refused", "failed", "dropped"
"""Results of a call as the metrics count them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submission:
    """A call and whoever waits for it; several may wait for one call."""

    call: RobotCall
    future: asyncio.Future[RobotAnswer]

    async def answer(self) -> RobotAnswer:
        """Wait for the answer; cancelling leaves the call alone. Raises `ServerError`."""
        return await asyncio.shield(self.future)


class RobotCalls:
    """The futures of one session's calls, and the count of their results."""

    def __init__(self, metrics: RobotMetrics) -> None:
        self._metrics = metrics
        self._futures: dict[RobotCall, asyncio.Future[RobotAnswer]] = {}

    def submission(self, call: RobotCall) -> Submission:
        """Return what waits for a call; a call that was answered has its answer at once."""
        future = self._futures.get(call)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if call.answer is not None:
                future.set_result(call.answer)
            else:
                self._futures[call] = future
        return Submission(call=call, future=future)

    def answer(self, call: RobotCall) -> None:
        """Hand out the answer that a call has got."""
        assert call.answer is not None
        timing = call.answer.server_timing
        self._metrics.calls.labels(ANSWERED).inc()
        self._metrics.call_s.observe(timing["total_ms"] / 1000)
        self._metrics.wait_s.observe(timing["queue_ms"] / 1000)
        self._futures.pop(call).set_result(call.answer)

    def reject(self, calls: Iterable[RobotCall], error: ServerError, result: str) -> None:
        """End calls with an error; `result` is what the metrics count."""
        for call in calls:
            self._metrics.calls.labels(result).inc()
            future = self._futures.pop(call, None)
            if future is not None and not future.done():
                future.set_exception(error)
                # Counted as seen: nobody has to wait for it.
                future.exception()
