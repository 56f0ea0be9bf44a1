"""One session as a state machine without I/O: no socket, no worker, no clock of its own.

    begin_tick ──> commit ──> chunk_ready ──> chunk_sent          one chunk, in this order
        │              └─ CommitMismatch ─┐
        └─ retry_tick / refuse_tick / fail

    active ──begin_reset──> resetting ──finish_reset──> active    (also from failed)
       └──fail──> failed            └──fail──> failed
    active | failed ──begin_close──> closing ──finish_close──> closed | cleanup_failed ──begin_close──> closing

`paused` and `parked` (no socket) are ways of being active. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic

from server.chunks import CommittedChunk, EncodedT, EventReceipt, KeptChunks, ReadyChunk, Resend
from server.errors import BadInput, CommitMismatch, ErrorCode, EventRefused
from server.events import EventQueue, PendingEvent
from server.pacing import PacingGate
from server.wire.messages import Pacing, SessionState
from worldmodel.messages import Control, ControlEvent, RequestId, SessionId, Tick, TickCommitted


class Phase(StrEnum):
    """Life of a session, without what its socket and its user do to it."""

    ACTIVE = "active"
    FAILED = "failed"
    RESETTING = "resetting"
    CLOSING = "closing"
    CLOSED = "closed"
    CLEANUP_FAILED = "cleanup_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """What the configuration says about every session."""

    max_pending_events: int
    lead_chunks: int
    retry_rolled_back_ticks: int

    @property
    def num_kept_chunks(self) -> int:
        return self.lead_chunks + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    tick: Tick
    run: int
    events: tuple[PendingEvent, ...]
    started_at: float
    queue_ms: float
    num_attempts: int


class Session(Generic[EncodedT]):
    """The session contract (events, ticks, commits, epochs, runs). All methods return at once.

    A run has at most `max_chunks` chunks; None: no limit. `start_image` is the name of the offered image that the run
    began with; None for one of the client's own.
    """

    def __init__(
        self,
        *,
        session_id: SessionId,
        prompt: str,
        seed: int,
        pacing: Pacing,
        fps: int,
        first_event_id: int,
        rules: SessionRules,
        max_chunks: int | None = None,
        start_image: str | None = None,
    ) -> None:
        self.session_id = session_id
        self.prompt = prompt
        self.seed = seed
        self.start_image = start_image
        self.phase = Phase.ACTIVE
        self.epoch = 0
        self.run = 0
        self.next_chunk_index = 0
        self.connected = False
        self.paused = False
        self._rules = rules
        self._max_chunks = max_chunks
        self._events = EventQueue(max_pending=rules.max_pending_events, first_event_id=first_event_id)
        self._gate = PacingGate(mode=pacing, lead_chunks=rules.lead_chunks, fps=fps)
        self._in_flight: _InFlight | None = None
        self._unanswered: dict[tuple[int, int], tuple[int, ...]] = {}
        """Event ids of committed chunks, by run and index, that no chunk header and no drop has answered yet."""
        self._kept: KeptChunks[EncodedT] = KeptChunks(rules.num_kept_chunks)
        self._num_requests = 0
        self._runnable_since: float | None = None
        self._last_sent_run = 0

    # ------------------------------------------------------------ what can be seen

    @property
    def state(self) -> SessionState:
        """The state as clients see it."""
        if self.phase is not Phase.ACTIVE:
            return SessionState(self.phase.value)
        if not self.connected:
            return SessionState.PARKED
        return SessionState.PAUSED if self.paused else SessionState.ACTIVE

    @property
    def pacing(self) -> Pacing:
        return self._gate.mode

    @property
    def in_flight(self) -> Tick | None:
        return None if self._in_flight is None else self._in_flight.tick

    @property
    def event_floor(self) -> int:
        return self._events.floor

    @property
    def pending_event_ids(self) -> tuple[int, ...]:
        return self._events.pending_ids

    # ------------------------------------------------------------ sockets

    def connect(self) -> int:
        """Begin an epoch and return its number; the one before is over."""
        self.epoch += 1
        self.connected = True
        return self.epoch

    def disconnect(self, epoch: int) -> bool:
        """Note a lost socket. Returns False if a newer socket has taken over."""
        if epoch != self.epoch or not self.connected:
            return False
        self.connected = False
        self._runnable_since = None
        return True

    def resume(self, *, last_chunk_index: int, run: int | None, now: float) -> Resend[EncodedT]:
        """Return the chunks after `last_chunk_index` of the client's `run` (None: the run last sent to it).

        Raises `BadInput` for a chunk that was never made; call it before `connect`.
        """
        client_run = self._last_sent_run if run is None else run
        if client_run > self.run:
            raise BadInput(ErrorCode.BAD_MESSAGE, f"run {client_run} was not begun: the run is {self.run}", field="run")
        last = last_chunk_index if client_run == self.run else -1
        if last >= self.next_chunk_index:
            raise BadInput(
                ErrorCode.BAD_MESSAGE,
                f"last_chunk_index {last} was never made: the last chunk of run {self.run} is "
                f"{self.next_chunk_index - 1}",
                field="last_chunk_index",
            )
        self._gate.resume(last, now)
        return self._kept.after(last)

    # ------------------------------------------------------------ events and reports

    def accept(self, *, event_id: int, prompt: str | None, controls: tuple[Control, ...], now: float) -> None:
        """Queue an event for the next chunk boundary. Raises `EventRefused`; then nothing has changed."""
        self._events.check_duplicate(event_id)
        if self.phase not in (Phase.ACTIVE, Phase.RESETTING):
            raise EventRefused(
                ErrorCode.BAD_STATE, f"no events are taken while the session is {self.phase}", event_id=event_id
            )
        self._events.accept(PendingEvent(event_id=event_id, prompt=prompt, controls=controls, accepted_at=now))

    def report_playback(self, *, epoch: int, run: int, chunk_index: int, buffered_ms: float, now: float) -> None:
        """Note what the viewer has seen. Old epochs and runs are ignored. Raises `BadInput` for the impossible."""
        if epoch > self.epoch:
            raise BadInput(ErrorCode.BAD_PLAYBACK, f"epoch {epoch}: the current one is {self.epoch}", field="epoch")
        if run > self.run:
            raise BadInput(ErrorCode.BAD_PLAYBACK, f"run {run}: the current one is {self.run}", field="run")
        if epoch < self.epoch or run < self.run:
            return
        if chunk_index > self._gate.sent:
            raise BadInput(
                ErrorCode.BAD_PLAYBACK,
                f"chunk_index {chunk_index}: the last chunk sent is {self._gate.sent}",
                field="chunk_index",
            )
        self._gate.chunk_shown(chunk_index, buffered_ms, now)

    def pause(self) -> bool:
        """Stop ticks; events stay queued. Returns whether that changed anything."""
        changed = not self.paused
        self.paused = True
        self._runnable_since = None
        return changed

    def unpause(self) -> bool:
        changed = self.paused
        self.paused = False
        return changed

    # ------------------------------------------------------------ ticks

    def opens_at(self, now: float) -> float | None:
        """Return when the next tick may start: `now` or earlier if it may, None if that depends on someone."""
        if self.phase is not Phase.ACTIVE or self._in_flight or self.paused or not self.connected:
            return None
        if self._max_chunks is not None and self.next_chunk_index >= self._max_chunks:
            return None
        opens_at = self._gate.opens_at(self.next_chunk_index, now)
        if opens_at is not None and opens_at <= now and self._runnable_since is None:
            self._runnable_since = now
        return opens_at

    def deadline(self) -> float:
        """Return when the viewer runs dry; before the first chunk, since when it has been waiting."""
        deadline = self._gate.deadline()
        if deadline is not None:
            return deadline
        return 0.0 if self._runnable_since is None else self._runnable_since

    def begin_tick(self, now: float) -> Tick | None:
        """Build the next tick from everything accepted so far, or return None if none may start now."""
        opens_at = self.opens_at(now)
        if opens_at is None or opens_at > now:
            return None
        events = self._events.take()
        prompts = [event.prompt for event in events if event.prompt is not None]
        tick = Tick(
            request_id=self._next_request_id(),
            session_id=self.session_id,
            chunk_index=self.next_chunk_index,
            prompt=prompts[-1] if prompts else None,
            events=tuple(
                ControlEvent(
                    event_id=event.event_id, controls=event.controls, age_ms=max(0.0, now - event.accepted_at) * 1000
                )
                for event in events
            ),
        )
        since = now if self._runnable_since is None else self._runnable_since
        self._in_flight = _InFlight(
            tick=tick,
            run=self.run,
            events=events,
            started_at=now,
            queue_ms=max(0.0, now - since) * 1000,
            num_attempts=1,
        )
        self._runnable_since = None
        return tick

    def commit(self, answer: TickCommitted) -> CommittedChunk:
        """Make the chunk in flight part of the session. Raises `CommitMismatch` unless the answer equals the tick."""
        in_flight = self._require_in_flight()
        tick = in_flight.tick
        expected = (tick.session_id, tick.request_id, tick.chunk_index, tick.event_ids)
        got = (answer.session_id, answer.request_id, answer.chunk_index, answer.applied_event_ids)
        if got != expected:
            raise CommitMismatch(f"expected session, request, chunk and events {expected}, got {got}")
        frames = {applied.event_id: applied.latent_frame for applied in answer.applied}
        if not frames.keys() <= set(tick.event_ids):
            raise CommitMismatch(f"events {sorted(frames)} were placed, but the tick had {tick.event_ids}")
        self._in_flight = None
        self.next_chunk_index += 1
        if tick.prompt is not None:
            self.prompt = tick.prompt
        if tick.event_ids:
            self._unanswered[in_flight.run, tick.chunk_index] = tick.event_ids
        return CommittedChunk(
            run=in_flight.run,
            chunk_index=tick.chunk_index,
            request_id=tick.request_id,
            # An event that the model did not place, such as a prompt alone, acts from the chunk's start.
            applied=tuple(
                EventReceipt(event_id=event.event_id, latent_frame=frames.get(event.event_id, 0), wait_ms=event.age_ms)
                for event in tick.events
            ),
            num_media_frames=answer.num_media_frames,
            pose=answer.pose,
            timings=answer.timings,
            queue_ms=in_flight.queue_ms,
        )

    def retry_tick(self) -> Tick | None:
        """Return the tick in flight under a new request id, or None if it was retried enough or nobody wants it."""
        in_flight = self._require_in_flight()
        if self.phase is not Phase.ACTIVE or in_flight.num_attempts > self._rules.retry_rolled_back_ticks:
            return None
        old = in_flight.tick
        tick = Tick(
            request_id=self._next_request_id(),
            session_id=old.session_id,
            chunk_index=old.chunk_index,
            prompt=old.prompt,
            events=old.events,
        )
        self._in_flight = _InFlight(
            tick=tick,
            run=in_flight.run,
            events=in_flight.events,
            started_at=in_flight.started_at,
            queue_ms=in_flight.queue_ms,
            num_attempts=in_flight.num_attempts + 1,
        )
        return tick

    def refuse_tick(self) -> tuple[int, ...]:
        """Give up the tick in flight because the model refused its events; returns their ids."""
        in_flight = self._require_in_flight()
        self._in_flight = None
        return in_flight.tick.event_ids

    def chunk_ready(
        self, chunk: CommittedChunk, encoded: EncodedT, *, transfer_ms: float, encode_ms: float, now: float
    ) -> ReadyChunk[EncodedT]:
        """Keep an encoded chunk for resume and return it for sending. Chunks become ready in order."""
        ready = ReadyChunk(chunk=chunk, encoded=encoded, transfer_ms=transfer_ms, encode_ms=encode_ms)
        if chunk.run == self.run:
            self._kept.add(ready)
            self._gate.chunk_ready(chunk.chunk_index, chunk.num_media_frames, now)
        return ready

    def chunk_sent(self, *, epoch: int, run: int, chunk_index: int) -> None:
        """Note that a socket took the chunk. Old epochs and runs are ignored."""
        if epoch != self.epoch:
            return
        self._last_sent_run = max(self._last_sent_run, run)
        if run == self.run:
            self._gate.chunk_sent(chunk_index)

    # ------------------------------------------------------------ failure, reset, close

    def answer_events(self, chunk: CommittedChunk) -> tuple[int, ...]:
        """Return the ids of a committed chunk's events, once: they are answered by its header, or dropped with it."""
        return self._unanswered.pop((chunk.run, chunk.chunk_index), ())

    def answer_all_events(self) -> tuple[int, ...]:
        """Return the ids of all committed events that are not answered yet, for a socket that gets no further chunk."""
        unanswered, self._unanswered = self._unanswered, {}
        return tuple(event_id for event_ids in unanswered.values() for event_id in event_ids)

    def fail(self) -> tuple[int, ...]:
        """Enter `failed` and return the ids of all events that will never be applied."""
        if self.phase in (Phase.CLOSING, Phase.CLOSED, Phase.CLEANUP_FAILED):
            return self.abandon_tick()
        self.phase = Phase.FAILED
        return self.abandon_tick() + self._events.discard()

    def abandon_tick(self) -> tuple[int, ...]:
        """Forget the tick in flight, if any, and return the ids of its events."""
        in_flight, self._in_flight = self._in_flight, None
        return () if in_flight is None else in_flight.tick.event_ids

    def begin_reset(self) -> tuple[int, ...]:
        """Enter `resetting`; returns the ids of discarded events. A tick in flight may still commit to the old run."""
        if self.phase not in (Phase.ACTIVE, Phase.FAILED):
            raise BadInput(ErrorCode.BAD_STATE, f"can't reset while the session is {self.phase}")
        self.phase = Phase.RESETTING
        return self._events.discard()

    def finish_reset(self, *, prompt: str, seed: int) -> None:
        """Begin the next run at chunk 0."""
        assert self.phase is Phase.RESETTING
        assert self._in_flight is None
        self.phase = Phase.ACTIVE
        self.run += 1
        self.next_chunk_index = 0
        self.prompt = prompt
        self.seed = seed
        self._kept.clear()
        self._gate.restart()
        self._runnable_since = None

    def begin_close(self) -> tuple[int, ...]:
        """Enter `closing`; returns the ids of discarded events. A tick in flight may still commit."""
        if self.phase not in (Phase.CLOSING, Phase.CLOSED):
            self.phase = Phase.CLOSING
        return self._events.discard()

    def finish_close(self, *, cleaned_up: bool) -> None:
        """Enter `closed`, or `cleanup_failed` if the worker would not let go."""
        assert self.phase is Phase.CLOSING
        self.phase = Phase.CLOSED if cleaned_up else Phase.CLEANUP_FAILED
        self._kept.clear()

    # ------------------------------------------------------------ inside

    def _next_request_id(self) -> RequestId:
        self._num_requests += 1
        return RequestId(f"{self.session_id}-{self._num_requests}")

    def new_request_id(self) -> RequestId:
        """Return an id for a request that is no tick (open, reset, close); unique like all of them."""
        return self._next_request_id()

    def _require_in_flight(self) -> _InFlight:
        assert self._in_flight is not None, f"no tick is in flight in session {self.session_id}"
        return self._in_flight
