"""What all sessions of a server share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.admission import Place
from server.clock import Clock
from server.metrics import Metrics
from server.scheduler import Scheduler
from server.uploads import RawImage
from server.worker import Worker

if TYPE_CHECKING:
    from server.actor import SessionActor


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorServices:
    """`take_place` waits for one, or raises `Unavailable`; `load_image` blocks."""

    worker: Worker
    scheduler: Scheduler
    encode_pool: Executor
    clock: Clock
    metrics: Metrics
    max_missed_messages: int
    max_watchers: int
    take_place: Callable[[], Coroutine[Any, Any, Place]]
    load_image: Callable[[bytes], RawImage]
    ended: Callable[[SessionActor], None]
    not_released: Callable[[], None]
    parked_again: Callable[[], None]
