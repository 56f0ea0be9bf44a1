"""All robot sessions of a server: names, owners, places, idle ones, and what a worker's death does to them.

Places and turns in the worker are those of `server/session_table.py`; a session here has no viewer to wait for and no
parked life: it ends with its connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from server.admission import Place
from server.clock import Clock, wait_until
from server.config import ServerConfig
from server.errors import BadInput, ErrorCode, SessionFailed, Unavailable, UnknownId
from server.ids import new_session_id
from server.logs import about
from server.metrics import Metrics
from server.robot_actor import EVICTED, Holder, RobotActor
from server.robot_metrics import RobotMetrics
from server.robot_services import RobotServices
from server.robot_session import RobotPhase, RobotSession
from server.session_table import SessionTable
from server.tasks import TaskSet
from server.worker import Worker, WorkerStatus

NUM_REMEMBERED_NAMES = 1024
"""How many names of ended sessions are remembered, so that closing twice over REST succeeds."""

TAKEN_OVER = "taken over"

log = logging.getLogger(__name__)

_Name = tuple[str | None, str]
"""Owner and the client's own name for its session."""


class Connection(Protocol):
    """A robot's connection as the table sees it."""

    def say_goodbye(self) -> None:
        """Tell the client that the server ends, and close."""
        ...


class RobotTable:
    """Owns every robot session from its first request to its end."""

    def __init__(
        self,
        config: ServerConfig,
        worker: Worker,
        table: SessionTable,
        metrics: Metrics,
        *,
        clock: Clock,
    ) -> None:
        self.metrics = RobotMetrics(metrics.registry)
        self._config = config
        self._worker = worker
        self._table = table
        self._clock = clock
        self._actors: dict[str, RobotActor] = {}
        self._connections: set[Connection] = set()
        self._by_name: dict[_Name, RobotActor] = {}
        self._ended_names: OrderedDict[_Name, None] = OrderedDict()
        self._tasks = TaskSet("robot table")
        self._timers_changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._services = RobotServices(
            worker=worker,
            scheduler=table.scheduler,
            clock=clock,
            metrics=metrics,
            robot_metrics=self.metrics,
            admit=self._admit,
            ended=self._ended,
            not_released=self._not_released,
        )
        self._started_counter = metrics.started

    # ------------------------------------------------------------ life of the table

    def start(self) -> None:
        """Watch the worker and the clock."""
        self._unsubscribe = self._worker.subscribe(self._worker_changed)
        self._tasks.spawn(self._run_timers())

    def say_goodbye(self) -> None:
        """Answer every request that waits and close every connection, because the server ends."""
        for actor in tuple(self._actors.values()):
            actor.say_goodbye()
        for connection in tuple(self._connections):
            connection.say_goodbye()

    async def shut_down(self) -> None:
        """End everything that runs."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self._tasks.cancel()
        await self._tasks.join()
        for actor in tuple(self._actors.values()):
            await actor.shut_down()
        self._actors.clear()
        self._by_name.clear()

    def add_connection(self, connection: Connection) -> None:
        """Have a connection told when the server ends."""
        self._connections.add(connection)

    def remove_connection(self, connection: Connection) -> None:
        self._connections.discard(connection)

    # ------------------------------------------------------------ what can be seen

    @property
    def num_connections(self) -> int:
        """Open connections of robots, whether they have asked for anything yet or not."""
        return len(self._connections)

    @property
    def num_tombstones(self) -> int:
        """Sessions that the worker would not release; they hold their places."""
        return sum(actor.session.phase is RobotPhase.CLEANUP_FAILED for actor in self._actors.values())

    def all(self) -> tuple[RobotActor, ...]:
        return tuple(self._actors.values())

    def owned_by(self, owner: str | None) -> list[RobotActor]:
        return [actor for actor in self._actors.values() if actor.owner == owner]

    def find(self, name: str, owner: str | None) -> RobotActor:
        """Return the session that its owner named so. Raises `UnknownId`."""
        actor = self._by_name.get((owner, name))
        if actor is None:
            raise UnknownId(ErrorCode.NOT_FOUND, f"there is no robot session {name[:64]!r}, or no longer")
        return actor

    def is_in_use(self, name: str, owner: str | None) -> bool:
        """Return whether the owner has a session of this name that is not about to end."""
        actor = self._by_name.get((owner, name))
        return actor is not None and not actor.is_closing

    def has_ended(self, name: str, owner: str | None) -> bool:
        """Return whether the owner had such a session, has no longer, and this is remembered."""
        return (owner, name) in self._ended_names and (owner, name) not in self._by_name

    def observe(self) -> None:
        """Set the gauges."""
        states = Counter(actor.session.phase for actor in self._actors.values())
        for phase in RobotPhase:
            self.metrics.sessions.labels(phase).set(states[phase])

    # ------------------------------------------------------------ beginning

    def begin(
        self,
        name: str | None,
        *,
        owner: str | None,
        holder: Holder,
        idle_s: float | None = None,
        left: Collection[RobotActor] = (),
    ) -> RobotActor:
        """Begin a session that holds nothing in the worker yet.

        A `name` that is taken is refused or taken over, as configured. `left`: sessions that their connection leaves
        for this one; they may give way to it. Raises `ServerError`.
        """
        if self._table.is_stopping:
            raise Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        current = None if name is None else self._in_the_way(name, owner)
        self._keep_limit(owner, current, left)
        if current is not None:
            current.holder.taken_over(current)
            current.begin_close(TAKEN_OVER)
        actor = RobotActor(
            RobotSession(
                session_id=new_session_id(),
                retry_rolled_back_ticks=self._config.session.retry_rolled_back_ticks,
            ),
            name=name,
            owner=owner,
            holder=holder,
            idle_s=idle_s,
            services=self._services,
        )
        self._actors[actor.session_id] = actor
        if name is not None:
            self._by_name[owner, name] = actor
        self._started_counter.inc()
        log.info("robot session %s (%r) started", actor.session_id, name, extra=about(session_id=actor.session_id))
        self._timers_changed.set()
        return actor

    def _in_the_way(self, name: str, owner: str | None) -> RobotActor | None:
        """Return the session of this name that is to be taken over, None if the name is free. Raises `ServerError`."""
        if not self.is_in_use(name, owner):
            return None
        current = self._by_name[owner, name]
        if current.session.phase is RobotPhase.CLEANUP_FAILED:
            # Nobody speaks for it: its name is free as soon as the worker lets go.
            current.begin_close(EVICTED)
            raise SessionFailed(
                ErrorCode.CLEANUP_FAILED, f"the worker has not released the last session {name[:64]!r} yet; ask again"
            )
        if self._config.robot.same_session == "refuse":
            raise BadInput(
                ErrorCode.SESSION_IN_USE,
                f"session_id {name[:64]!r} is in use by {current.holder.title} (robot.same_session)",
                field="session_id",
            )
        return current

    def _keep_limit(self, owner: str | None, current: RobotActor | None, left: Collection[RobotActor]) -> None:
        """Have a session of its owner give way to one more, if that is one too many. Raises `Unavailable` if none can.

        `current` is taken over and does not count. What is closing does, or who comes and goes would hold any number.
        """
        limit = self._config.limits.max_sessions_per_token
        if limit is None or owner is None:
            return
        others = [actor for actor in self.owned_by(owner) if actor is not current]
        if len(others) < limit:
            return
        resting = _resting(actor for actor in others if actor.is_standby or actor in left)
        if len(others) > limit or resting is None:
            raise Unavailable(
                ErrorCode.TOO_MANY_SESSIONS, f"this token has {limit} sessions (limits.max_sessions_per_token)"
            )
        resting.begin_close(EVICTED)

    # ------------------------------------------------------------ places

    async def _admit(self) -> Place:
        return await self._table.admit(self._make_room)

    def _make_room(self) -> bool:
        """Have a place promised to one more session. Returns whether one is."""
        if self._table.num_unclaimed > 0:
            return True
        resting = _resting(other for other in self._actors.values() if other.is_standby and other.holds_place)
        if resting is None:
            return False
        resting.begin_close(EVICTED)
        return True

    def _not_released(self) -> None:
        """A place that was promised is not freed: give up another session for those who wait, or tell them."""
        if self._table.num_unclaimed < 0:
            self._make_room()
        self._table.place_kept()

    def _ended(self, actor: RobotActor) -> None:
        log.info(
            "robot session %s ended: %s", actor.session_id, actor.end_reason, extra=about(session_id=actor.session_id)
        )
        self._actors.pop(actor.session_id, None)
        if actor.name is not None:
            self._forget_name(actor, actor.name)
        self._table.refuse_unpromised()

    def _forget_name(self, actor: RobotActor, name: str) -> None:
        key = (actor.owner, name)
        if self._by_name.get(key) is actor:
            del self._by_name[key]
        self._ended_names[key] = None
        self._ended_names.move_to_end(key)
        while len(self._ended_names) > NUM_REMEMBERED_NAMES:
            self._ended_names.popitem(last=False)

    # ------------------------------------------------------------ time

    async def _run_timers(self) -> None:
        while True:
            self._timers_changed.clear()
            until = self.expire(self._clock())
            await wait_until(self._timers_changed, until=until, clock=self._clock)

    def expire(self, now: float) -> float | None:
        """Close what nobody used for too long and return when to look again, None if nothing will expire."""
        next_at: float | None = None
        for actor in tuple(self._actors.values()):
            if actor.idle_s is None or actor.is_closing:
                continue
            at = (now if actor.session.is_busy else actor.active_at) + actor.idle_s
            if at <= now:
                actor.begin_close("idle")
                continue
            next_at = at if next_at is None else min(next_at, at)
        return next_at

    # ------------------------------------------------------------ worker

    def _worker_changed(self) -> None:
        ready = self._worker.status is WorkerStatus.READY
        for actor in tuple(self._actors.values()):
            if actor.holds_place and (not ready or actor.generation != self._worker.generation):
                actor.worker_lost(self._worker.failure or "the worker is gone")


def _resting(actors: Iterable[RobotActor]) -> RobotActor | None:
    """Return the session that has nothing to do for the longest time."""
    idle = [actor for actor in actors if not actor.session.is_busy and not actor.is_closing]
    return min(idle, key=lambda actor: actor.active_at, default=None)
