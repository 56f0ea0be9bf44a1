"""All sessions of a server: admission, resume, take-over, expiry, and what a worker's death does to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import assert_never

from server.actor import SessionActor
from server.actor_services import ActorServices
from server.admission import Admission, Place, PositionFn
from server.clock import Clock, wait_until
from server.config import ServerConfig
from server.endings import EVICTED, LOST, Ending, Endings, lost, over
from server.errors import BadInput, ErrorCode, Unavailable, UnknownId
from server.expiry import close_what_is_over
from server.ids import ResumeToken, WatchToken
from server.logs import about
from server.metrics import Metrics
from server.orphans import Orphans
from server.recorder import Recorders
from server.scheduler import Scheduler
from server.session import Phase
from server.session_opener import NewSession, SessionOpener
from server.tasks import TaskSet
from server.uploads import decode_image
from server.worker import Worker, WorkerStatus
from server.worker_log import WorkerLog
from worldmodel.messages import ModelInfo, SessionId

log = logging.getLogger(__name__)


class SessionTable:
    """Owns every session from admission to its end."""

    def __init__(
        self,
        config: ServerConfig,
        worker: Worker,
        metrics: Metrics,
        *,
        encode_pool: Executor,
        clock: Clock,
        recorders: Recorders | None = None,
    ) -> None:
        """`recorders` None: nothing is recorded."""
        self._config = config
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        self._actors: dict[SessionId, SessionActor] = {}
        self._by_token: dict[ResumeToken, SessionActor] = {}
        self._by_watch_token: dict[WatchToken, SessionActor] = {}
        # Their creators have not heard of them yet: without a socket, and yet not left alone.
        self._unclaimed: set[SessionId] = set()
        self._endings = Endings()
        self._num_opening: dict[str | None, int] = {}
        self._admission = Admission(capacity=self._capacity, max_queued=config.session.max_queued)
        self._scheduler = Scheduler(clock)
        self._tasks = TaskSet("session table")
        self._timers_changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._is_stopping = False
        self._worker_log = WorkerLog(worker)
        self._loops: tuple[asyncio.Task[None], ...] = ()
        services = ActorServices(
            worker=worker,
            scheduler=self._scheduler,
            encode_pool=encode_pool,
            clock=clock,
            metrics=metrics,
            max_missed_messages=2 * config.session.max_pending_events,
            max_watchers=config.session.max_watchers,
            take_place=self._take_place_again,
            load_image=partial(decode_image, limits=config.limits, field="image"),
            ended=self._ended,
            not_released=self.place_kept,
            parked_again=self._make_room,
        )
        self._orphans = Orphans(worker, self._tasks, clock)
        self._opener = SessionOpener(
            config, services, recorders=recorders, orphans=self._orphans, require_worker=self.require_worker
        )

    # ------------------------------------------------------------ life of the table

    def start(self) -> None:
        """Start scheduling and expiry."""
        self._unsubscribe = self._worker.subscribe(self._worker_changed)
        self._loops = (self._tasks.spawn(self._scheduler.run()), self._tasks.spawn(self._run_timers()))

    def say_goodbye(self) -> None:
        """Tell every client that the server ends and close its socket; nothing is started any more."""
        self._is_stopping = True
        self._admission.refuse_all(_shutting_down())
        for actor in tuple(self._actors.values()):
            actor.say_goodbye()

    async def shut_down(self) -> None:
        """End everything that runs; clients that are still connected are told."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self.say_goodbye()
        self._tasks.cancel()
        await self._tasks.join()
        last, within_s = TaskSet("end of a session"), self._config.server.last_s
        for actor in self._actors.values():
            last.spawn(actor.shut_down())
        if num_late := await last.finish(within_s=within_s):
            log.warning("the disk took too long for the end of recordings, which is lost: %d", num_late)
        self._actors.clear()
        self._by_token.clear()
        self._by_watch_token.clear()

    # ------------------------------------------------------------ what can be seen

    @property
    def scheduler(self) -> Scheduler:
        """Whose turn it is in the worker; sessions of another table tick with ours."""
        return self._scheduler

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def is_broken(self) -> bool:
        """Whether a loop of the table has ended, which only a bug of ours can do: nothing would tick or expire."""
        return any(loop.done() for loop in self._loops)

    @property
    def num_tombstones(self) -> int:
        """Sessions that the worker would not release; they hold their places."""
        num_closed = sum(actor.session.phase is Phase.CLEANUP_FAILED for actor in self._actors.values())
        return num_closed + len(self._orphans)

    @property
    def num_resident(self) -> int:
        return self._admission.num_taken

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    @property
    def num_unclaimed(self) -> int:
        """How many promised places nobody waits for; below 0, how many wait for whom no place is promised."""
        return self._admission.num_unclaimed

    def all(self) -> tuple[SessionActor, ...]:
        return tuple(self._actors.values())

    def owned_by(self, owner: str | None) -> list[SessionActor]:
        return [actor for actor in self._actors.values() if actor.owner == owner]

    def find(self, session_id: str, owner: str | None, *, field: str | None = None) -> SessionActor:
        """Return a session of its owner. Raises `UnknownId` that names the `field` of the message, if it was in one."""
        actor = self._actors.get(SessionId(session_id))
        if actor is None or actor.owner != owner:
            raise UnknownId(ErrorCode.NOT_FOUND, f"there is no session {session_id[:64]!r}, or no longer", field=field)
        return actor

    def has_ended(self, session_id: str, owner: str | None) -> bool:
        """Return whether the owner had such a session and it was closed."""
        return self._endings.holds(session_id, owner)

    def watchable(self, token: str) -> SessionActor:
        """Find the session that a watch token lets anybody see. Raises `UnknownId`."""
        actor = self._by_watch_token.get(WatchToken(token))
        if actor is None:
            raise UnknownId(
                ErrorCode.BAD_WATCH_TOKEN,
                "there is no session with this watch token, or no longer",
                field="watch_token",
            )
        return actor

    # ------------------------------------------------------------ creating

    async def create(
        self, request: NewSession, *, owner: str | None, on_position: PositionFn | None = None
    ) -> SessionActor:
        """Admit and open a session; it is parked until a socket attaches.

        With `on_position` the caller queues when the server is full, without it is refused. Cancelling leaves nothing
        behind. Raises `ServerError`.
        """
        self.require_worker()
        self._check_owner(owner)
        self._num_opening[owner] = self._num_opening.get(owner, 0) + 1
        try:
            place = await self._admit(on_position, request.image.put_away)
            opening = self._tasks.spawn(self._open(request, place, owner))
            try:
                actor = await asyncio.shield(opening)
                self._unclaimed.discard(actor.session_id)
                # Later, for a socket attaches as soon as this returns.
                asyncio.get_running_loop().call_soon(self._make_room)
                self._timers_changed.set()
                return actor
            except asyncio.CancelledError:
                opening.add_done_callback(self._close_unclaimed)
                raise
        finally:
            self._num_opening[owner] -= 1
            if not self._num_opening[owner]:
                del self._num_opening[owner]

    def require_worker(self) -> ModelInfo:
        """Return what the worker serves. Raises `Unavailable` that says why it serves nothing."""
        if self._is_stopping:
            raise _shutting_down()
        info = self._worker.info
        if self._worker.status is WorkerStatus.READY and info is not None:
            return info
        progress, reason = self._worker.progress, self._worker.failure or f"the worker is {self._worker.status}"
        if progress is not None and self._worker.status is WorkerStatus.LOADING:
            reason = f"the model is loading: {progress.stage}, {progress.fraction:.0%}"
        raise Unavailable(ErrorCode.WORKER_UNAVAILABLE, reason)

    def _check_owner(self, owner: str | None) -> None:
        limit = self._config.limits.max_sessions_per_token
        if limit is None or owner is None:
            return
        if len(self.owned_by(owner)) + self._num_opening.get(owner, 0) >= limit:
            text = f"this token has {limit} sessions (limits.max_sessions_per_token)"
            raise Unavailable(ErrorCode.TOO_MANY_SESSIONS, text)

    async def _admit(self, on_position: PositionFn | None, will_wait: Callable[[], None] | None = None) -> Place:
        """Take a place; `will_wait` is called before waiting for one. Raises `Unavailable`."""
        place = self._admission.try_take()
        if place is None and on_position is None and self._evictable() is None:
            raise self._admission.full()
        if place is not None:
            return place
        evicting = self._evict_one()
        if will_wait is not None:
            will_wait()
        return await self._admission.wait(on_position, limited=not evicting)

    def refuse_unpromised(self) -> None:
        """Tell those who can't queue and for whom no place is promised any more."""
        self._admission.refuse_unpromised()

    async def admit(self, make_room: Callable[[], bool]) -> Place:
        """Take a place for a session of another table. `make_room` has one promised, or returns that it can't.

        Raises `Unavailable`.
        """
        self.require_worker()
        if (place := self._admission.try_take()) is not None:
            return place
        if not make_room():
            raise self._admission.full()
        return await self._admission.wait(None, limited=False)

    async def _take_place_again(self) -> Place:
        """Take a place for a session that has none any more; like a new one it may have a parked one given up.

        Raises `Unavailable`.
        """
        self.require_worker()
        return await self._admit(None)

    async def _open(self, request: NewSession, place: Place, owner: str | None) -> SessionActor:
        actor = await self._opener.open(request, place, owner)
        self._actors[actor.session_id] = actor
        self._by_token[actor.resume_token] = actor
        self._by_watch_token[actor.watch_token] = actor
        self._unclaimed.add(actor.session_id)
        self._metrics.started.inc()
        log.info("session %s started", actor.session_id, extra=about(session_id=actor.session_id))
        return actor

    def _close_unclaimed(self, opening: asyncio.Task[SessionActor]) -> None:
        """Close a session whose client left while it was opened."""
        if not opening.cancelled() and opening.exception() is None:
            actor = opening.result()
            self._unclaimed.discard(actor.session_id)
            actor.begin_close("client left")

    # ------------------------------------------------------------ resume, parking, ending

    def resume(self, token: str, owner: str | None) -> SessionActor:
        """Find the session of a resume token. A session whose world died with its worker is ended instead.

        Raises `UnknownId`, `BadInput` for one that could not be released, or `Unavailable` while the server stops.
        """
        if self._is_stopping:
            raise _shutting_down()
        actor = self._by_token.get(ResumeToken(token))
        if actor is not None and actor.owner == owner:
            if actor.lost_reason is not None and actor.session.phase in (Phase.FAILED, Phase.CLOSING):
                actor.begin_close(LOST)
                raise lost(actor.lost_reason)
            if actor.session.phase is Phase.CLEANUP_FAILED:
                text = "the session is over and the worker did not release it; delete it by its id, or start a new one"
                raise BadInput(ErrorCode.BAD_STATE, text, field="resume_token")
            if actor.session.phase not in (Phase.CLOSING, Phase.CLOSED):
                return actor
            raise over(actor.end_reason, actor.lost_reason)
        raise self._endings.refusal(token, owner)

    def detach(self, actor: SessionActor, epoch: int) -> None:
        """Park a session whose socket is gone, or close it if sessions are not kept."""
        if not actor.detach(epoch) or actor.session_id not in self._actors:
            return
        if self._config.session.resume_s == 0:
            actor.begin_close("disconnected")
        else:
            self._make_room()
        self._timers_changed.set()

    def _make_room(self) -> None:
        """Give up a parked session if somebody waits for whom no place is being freed."""
        if self._admission.num_unclaimed < 0:
            self._evict_one()

    def _evictable(self) -> SessionActor | None:
        """Return the parked session that was used least recently."""
        parked = [
            actor
            for actor in self._actors.values()
            if actor.parked_at is not None
            and actor.holds_place
            and actor.session.phase in (Phase.ACTIVE, Phase.FAILED)
            and actor.session_id not in self._unclaimed
        ]
        return min(parked, key=lambda actor: actor.parked_at or 0.0, default=None)

    def _evict_one(self) -> bool:
        """Close a parked session to make room. Returns whether there was one."""
        actor = self._evictable()
        if actor is None:
            return False
        actor.begin_close(EVICTED)
        return True

    def place_kept(self) -> None:
        """A place that was promised is not freed: free another one for those who wait, or tell them."""
        self._make_room()
        self.refuse_unpromised()

    def _ended(self, actor: SessionActor) -> None:
        """Forget a session that was closed; called by the session itself."""
        log.info("session %s ended: %s", actor.session_id, actor.end_reason, extra=about(session_id=actor.session_id))
        self._actors.pop(actor.session_id, None)
        self._by_token.pop(actor.resume_token, None)
        self._by_watch_token.pop(actor.watch_token, None)
        ending = Ending(
            owner=actor.owner,
            reason=actor.end_reason or "closed",
            lost_reason=actor.lost_reason,
            resume_token=actor.resume_token,
        )
        self._endings.remember(actor.session_id, ending)
        self.refuse_unpromised()

    # ------------------------------------------------------------ time

    async def _run_timers(self) -> None:
        while True:
            self._timers_changed.clear()
            until = self.expire(self._clock())
            await wait_until(self._timers_changed, until=until, clock=self._clock)

    def expire(self, now: float) -> float | None:
        """Close what is over and return when to look again, None if nothing will expire."""
        claimed = [actor for actor in self.all() if actor.session_id not in self._unclaimed]
        return close_what_is_over(claimed, self._config.session, now)

    # ------------------------------------------------------------ worker

    def _capacity(self) -> int:
        info = self._worker.info
        return info.capacity_sessions if info is not None and self._worker.status is WorkerStatus.READY else 0

    def _worker_changed(self) -> None:
        status = self._worker.status
        self._worker_log.note()
        ready = status is WorkerStatus.READY
        for actor in tuple(self._actors.values()):
            if actor.holds_place and (not ready or actor.generation != self._worker.generation):
                actor.worker_lost(self._worker.failure or "the worker is gone")
        match status:
            case WorkerStatus.READY:
                self._admission.grant()
            case WorkerStatus.FAILED | WorkerStatus.STOPPED:
                reason = self._worker.failure or "the worker was stopped"
                self._admission.refuse_all(Unavailable(ErrorCode.WORKER_UNAVAILABLE, reason))
            case WorkerStatus.LOADING | WorkerStatus.RESTARTING:
                pass
            case _:
                assert_never(status)


def _shutting_down() -> Unavailable:
    return Unavailable(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
