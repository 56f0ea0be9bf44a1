"""What all robot sessions of a server share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.admission import Place
from server.clock import Clock
from server.metrics import Metrics
from server.robot_metrics import RobotMetrics
from server.scheduler import Scheduler
from server.worker import Worker

if TYPE_CHECKING:
    from server.robot_actor import RobotActor


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotServices:
    """`admit` gives a place in the worker or raises `Unavailable`."""

    worker: Worker
    scheduler: Scheduler
    clock: Clock
    metrics: Metrics
    robot_metrics: RobotMetrics
    admit: Callable[[], Coroutine[Any, Any, Place]]
    ended: Callable[[RobotActor], None]
    not_released: Callable[[], None]
