"""The session contract as a machine: any order of legal calls on the real `Session`, and a model beside it.

The model is written from the rules alone: ids, floors across resets, runs, epochs, receipts, what is sent again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.chunks import CommittedChunk
from server.errors import BadInput, CommitMismatch, ErrorCode, EventRefused
from server.session import Phase, Session, SessionRules
from server.wire.messages import Pacing, SessionState
from worldmodel.messages import (
    AppliedEvent,
    Control,
    MemoryStats,
    RequestId,
    SessionId,
    StageTimings,
    Tick,
    TickCommitted,
)

TIMINGS = StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0)
MEMORY = MemoryStats(sessions=1, total_pages=10, free_pages=0)
MAX_PENDING = 4
LEAD_CHUNKS = 1
FIRST_EVENT_ID = 5

RARELY = st.integers(0, 12)
"""A step that ends something is taken when this is 0; else most examples would be over before they began."""


def answer_to(tick: Tick) -> TickCommitted:
    return TickCommitted(
        request_id=tick.request_id,
        session_id=tick.session_id,
        chunk_index=tick.chunk_index,
        applied_event_ids=tick.event_ids,
        applied=tuple(AppliedEvent(event_id=event_id, latent_frame=1) for event_id in tick.event_ids),
        num_media_frames=12,
        pose=None,
        timings=TIMINGS,
        memory=MEMORY,
    )


LIES = {
    "session": lambda it: replace(it, session_id=SessionId("s-2")),
    "request": lambda it: replace(it, request_id=RequestId("s-1-9999")),
    "chunk": lambda it: replace(it, chunk_index=it.chunk_index + 1),
    "previous chunk": lambda it: replace(it, chunk_index=it.chunk_index - 1),
    "one more event": lambda it: replace(it, applied_event_ids=(*it.applied_event_ids, 10**6)),
    "foreign place": lambda it: replace(it, applied=(AppliedEvent(event_id=10**6, latent_frame=0),)),
}


@dataclass(frozen=True)
class Made:
    """A committed chunk in the model."""

    run: int
    index: int


class SessionContract(RuleBasedStateMachine):
    """What the session says is compared with the model after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.session: Session[str] = Session(
            session_id=SessionId("s-1"),
            prompt="town",
            seed=3,
            pacing=Pacing.PLAYBACK,
            fps=12,
            first_event_id=FIRST_EVENT_ID,
            rules=SessionRules(max_pending_events=MAX_PENDING, lead_chunks=LEAD_CHUNKS, retry_rolled_back_ticks=1),
        )
        self.now = 0.0
        # the model
        self.phase = Phase.ACTIVE
        self.floor = FIRST_EVENT_ID - 1
        self.pending: dict[int, str | None] = {}
        self.controls: dict[int, tuple[Control, ...]] = {}
        self.remembered: deque[int] = deque(maxlen=MAX_PENDING)
        self.in_flight: list[int] | None = None
        self.in_flight_run = 0
        self.num_attempts = 0
        self.in_flight_prompt: str | None = None
        self.prompt = "town"
        self.epoch = 0
        self.connected = False
        self.paused = False
        self.run_number = 0
        self.next_index = 0
        self.shown = -1
        self.sent = -1
        self.unready: list[CommittedChunk] = []
        self.unsent: list[Made] = []
        self.kept: deque[Made] = deque(maxlen=LEAD_CHUNKS + 2)
        self.accepted: list[int] = []
        self.answered: list[int] = []
        self.request_ids: set[str] = set()

    # ------------------------------------------------------------ events

    @rule(
        event_id=st.integers(0, 25),
        prompt=st.sampled_from([None, "night", "day"]),
        tracks=st.lists(st.sampled_from(["camera", "arm"]), max_size=2),
    )
    def accepts(self, event_id: int, prompt: str | None, tracks: list[str]) -> None:
        expected = self._refusal(event_id, prompt, tracks)
        controls = tuple(Control(track=track, schema="s", data=b"%d" % event_id) for track in tracks)
        if expected is not None:
            with pytest.raises(EventRefused) as caught:
                self.session.accept(event_id=event_id, prompt=prompt, controls=controls, now=self.now)
            assert (caught.value.code, caught.value.event_id) == (expected, event_id)
            return
        self.session.accept(event_id=event_id, prompt=prompt, controls=controls, now=self.now)
        self.pending[event_id] = prompt
        self.controls[event_id] = controls
        self.remembered.append(event_id)
        self.accepted.append(event_id)

    def _refusal(self, event_id: int, prompt: str | None, tracks: list[str]) -> ErrorCode | None:
        if event_id in self.remembered or event_id in self.pending:
            return ErrorCode.DUPLICATE
        if self.phase not in (Phase.ACTIVE, Phase.RESETTING):
            return ErrorCode.BAD_STATE
        if event_id <= self.floor:
            return ErrorCode.STALE
        if len(self.pending) >= MAX_PENDING:
            return ErrorCode.QUEUE_FULL
        if prompt is None and not tracks:
            return ErrorCode.EMPTY_EVENT
        return ErrorCode.DUPLICATE_TRACK if len(set(tracks)) < len(tracks) else None

    def _drop_pending(self) -> tuple[int, ...]:
        ids = tuple(sorted(self.pending))
        self.floor = max(self.floor, *ids) if ids else self.floor
        self.pending.clear()
        self.answered += ids
        return ids

    def _drop_in_flight(self) -> tuple[int, ...]:
        ids = tuple(self.in_flight or ())
        self.in_flight = None
        self.answered += ids
        return ids

    # ------------------------------------------------------------ ticks

    @rule(passed=st.floats(0.0, 2.0))
    def begins(self, passed: float) -> None:
        self.now += passed
        needed = self.next_index - 1 - LEAD_CHUNKS
        allowed = (
            self.phase is Phase.ACTIVE
            and self.in_flight is None
            and self.connected
            and not self.paused
            and needed <= self.shown
            and self.next_index - max(1, LEAD_CHUNKS) <= self.sent
        )
        tick = self.session.begin_tick(self.now)
        assert (tick is not None) == allowed
        if tick is None:
            return
        assert tick.chunk_index == self.next_index
        assert tick.event_ids == tuple(sorted(self.pending))
        assert [event.controls for event in tick.events] == [self.controls[event_id] for event_id in tick.event_ids]
        prompts = [self.pending[event_id] for event_id in sorted(self.pending)]
        given = [prompt for prompt in prompts if prompt is not None]
        self.in_flight_prompt = given[-1] if given else None
        assert tick.prompt == self.in_flight_prompt
        self._is_new(tick)
        self.in_flight, self.in_flight_run, self.num_attempts = sorted(self.pending), self.run_number, 1
        self.floor = max(self.floor, *self.pending) if self.pending else self.floor
        self.pending.clear()

    def _is_new(self, tick: Tick) -> None:
        assert tick.request_id not in self.request_ids
        self.request_ids.add(tick.request_id)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commits(self) -> None:
        tick = self.session.in_flight
        assert tick is not None
        chunk = self.session.commit(answer_to(tick))
        assert (chunk.run, chunk.chunk_index) == (self.in_flight_run, self.next_index)
        assert [receipt.event_id for receipt in chunk.applied] == self.in_flight
        self.answered += self.in_flight or []
        self.in_flight = None
        self.next_index += 1
        self.prompt = self.in_flight_prompt or self.prompt
        self.unready.append(chunk)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def is_lied_to(self) -> None:
        tick = self.session.in_flight
        assert tick is not None
        for lie in LIES.values():
            with pytest.raises(CommitMismatch):
                self.session.commit(lie(answer_to(tick)))
            assert self.session.in_flight is tick, "nothing of a lie is taken"

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def retries(self) -> None:
        before = self.session.in_flight
        assert before is not None
        retry = self.session.retry_tick()
        assert (retry is not None) == (self.phase is Phase.ACTIVE and self.num_attempts == 1)
        if retry is not None:
            self._is_new(retry)
            assert replace(retry, request_id=before.request_id) == before
            self.num_attempts += 1

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def refuses(self) -> None:
        ids = self.session.refuse_tick()
        assert ids == self._drop_in_flight()

    # ------------------------------------------------------------ media

    @precondition(lambda self: self.unready)
    @rule()
    def readies(self) -> None:
        chunk = self.unready.pop(0)
        name = f"{chunk.run}:{chunk.chunk_index}"
        self.session.chunk_ready(chunk, name, transfer_ms=0.0, encode_ms=0.0, now=self.now)
        made = Made(chunk.run, chunk.chunk_index)
        if chunk.run == self.run_number and self.phase not in (Phase.CLOSED, Phase.CLEANUP_FAILED):
            self.kept.append(made)
        if self.connected:
            self.unsent.append(made)

    @precondition(lambda self: self.unsent)
    @rule()
    def sends(self) -> None:
        made = self.unsent.pop(0)
        self.session.chunk_sent(epoch=self.epoch, run=made.run, chunk_index=made.index)
        if made.run == self.run_number:
            self.sent = max(self.sent, made.index)

    @rule(epoch=st.integers(-1, 1), run_offset=st.integers(-1, 1), chunk_index=st.integers(-1, 8))
    def reports(self, epoch: int, run_offset: int, chunk_index: int) -> None:
        epoch, run = max(0, self.epoch + epoch), max(0, self.run_number + run_offset)
        is_current = (epoch, run) == (self.epoch, self.run_number)
        impossible = epoch > self.epoch or run > self.run_number or (is_current and chunk_index > self.sent)
        report = partial(
            self.session.report_playback,
            epoch=epoch,
            run=run,
            chunk_index=chunk_index,
            buffered_ms=0.0,
            now=self.now,
        )
        if impossible:
            with pytest.raises(BadInput) as caught:
                report()
            assert caught.value.code is ErrorCode.BAD_PLAYBACK
            return
        report()
        if is_current:
            self.shown = max(self.shown, chunk_index)

    @rule()
    def watches_a_chunk(self) -> None:
        """Go one chunk further, all the way to the viewer, if that is possible."""
        while self.unready:
            self.readies()
        while self.unsent:
            self.sends()
        if self.connected and self.sent > self.shown:
            self.session.report_playback(
                epoch=self.epoch, run=self.run_number, chunk_index=self.sent, buffered_ms=0.0, now=self.now
            )
            self.shown = self.sent
        self.begins(passed=1.0)
        if self.in_flight is not None:
            self.commits()
            self.readies()
        if self.unsent:
            self.sends()

    # ------------------------------------------------------------ sockets

    @initialize()
    def connects(self) -> None:
        self.epoch = self.session.connect()
        assert self.epoch == 1
        self.connected = True

    @rule()
    def disconnects(self) -> None:
        assert not self.session.disconnect(self.epoch - 1), "an old epoch ends nothing"
        assert self.session.connected == self.connected
        assert self.session.disconnect(self.epoch) is self.connected
        self.connected = False
        self.unsent.clear()

    @precondition(lambda self: self.phase in (Phase.ACTIVE, Phase.FAILED, Phase.RESETTING))
    @rule(back=st.integers(0, 5))
    def resumes(self, back: int) -> None:
        """A socket comes, or takes over, with a client that has everything up to `last`."""
        last = max(-1, self.next_index - 1 - back)
        resend = self.session.resume(last_chunk_index=last, run=self.run_number, now=self.now)
        expected = [made for made in self.kept if made.index > last]
        assert [ready.encoded for ready in resend.chunks] == [f"{it.run}:{it.index}" for it in expected]
        unready = [chunk.chunk_index for chunk in self.unready if chunk.run == self.run_number]
        has = {made.index for made in expected} | set(unready)
        assert resend.num_lost_chunks == len(set(range(last + 1, self.next_index)) - has)
        self.epoch += 1
        assert self.session.connect() == self.epoch
        self.connected = True
        self.unsent = list(expected)
        self.sent, self.shown = last, max(self.shown, last)

    @rule()
    def resumes_with_the_impossible(self) -> None:
        for last, run in ((self.next_index, self.run_number), (-1, self.run_number + 1)):
            with pytest.raises(BadInput):
                self.session.resume(last_chunk_index=last, run=run, now=self.now)

    @rule(paused=st.booleans())
    def pauses(self, paused: bool) -> None:
        changed = self.session.pause() if paused else self.session.unpause()
        assert changed == (paused != self.paused)
        self.paused = paused

    # ------------------------------------------------------------ failure, reset, close

    @rule(dice=RARELY)
    def fails(self, dice: int) -> None:
        if dice and self.phase is Phase.ACTIVE:
            return
        ids = self.session.fail()
        if self.phase in (Phase.CLOSING, Phase.CLOSED, Phase.CLEANUP_FAILED):
            assert ids == self._drop_in_flight()
        else:
            assert ids == self._drop_in_flight() + self._drop_pending()
            self.phase = Phase.FAILED

    @rule(dice=RARELY)
    def begins_reset(self, dice: int) -> None:
        if dice and self.phase is Phase.ACTIVE:
            return
        if self.phase not in (Phase.ACTIVE, Phase.FAILED):
            with pytest.raises(BadInput):
                self.session.begin_reset()
            return
        assert self.session.begin_reset() == self._drop_pending()
        self.phase = Phase.RESETTING

    @precondition(lambda self: self.phase is Phase.RESETTING and self.in_flight is None)
    @rule(prompt=st.sampled_from(["", "night"]))
    def finishes_reset(self, prompt: str) -> None:
        self.session.finish_reset(prompt=prompt, seed=8)
        self.phase = Phase.ACTIVE
        self.run_number += 1
        self.next_index, self.shown, self.sent = 0, -1, -1
        self.prompt = prompt
        self.kept.clear()

    @rule(dice=RARELY)
    def begins_close(self, dice: int) -> None:
        if dice and self.phase not in (Phase.CLOSING, Phase.CLEANUP_FAILED):
            return
        assert self.session.begin_close() == self._drop_pending()
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.CLOSING
        assert self.session.begin_close() == (), "closing again changes nothing"

    @precondition(lambda self: self.phase is Phase.CLOSING and self.in_flight is None)
    @rule(cleaned_up=st.booleans())
    def finishes_close(self, cleaned_up: bool) -> None:
        self.session.finish_close(cleaned_up=cleaned_up)
        self.phase = Phase.CLOSED if cleaned_up else Phase.CLEANUP_FAILED
        self.kept.clear()

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_session_is_what_the_model_says(self) -> None:
        session = self.session
        assert session.phase is self.phase
        assert (session.epoch, session.connected, session.run) == (self.epoch, self.connected, self.run_number)
        assert session.next_chunk_index == self.next_index
        assert session.event_floor == self.floor
        assert session.pending_event_ids == tuple(sorted(self.pending))
        assert session.prompt == self.prompt
        if self.phase is not Phase.ACTIVE:
            assert session.state == self.phase.value
        elif not self.connected:
            assert session.state is SessionState.PARKED
        else:
            assert session.state is (SessionState.PAUSED if self.paused else SessionState.ACTIVE)

    @invariant()
    def every_accepted_event_is_answered_once(self) -> None:
        still_open = [*(self.in_flight or ()), *self.pending]
        assert sorted(self.answered + still_open) == sorted(self.accepted)

    def teardown(self) -> None:
        ids = (*self.session.fail(), *self.session.begin_close())
        assert sorted([*self.answered, *ids]) == sorted(self.accepted), "an end answers everything"


TestSessionContract = SessionContract.TestCase
TestSessionContract.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestSessionContractAtLength(SessionContract.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=120, deadline=None, derandomize=False)
