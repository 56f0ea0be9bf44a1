"""The session contract as tables, and random use of it against a simple model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


def new_session(
    *,
    pacing: Pacing = Pacing.PLAYBACK,
    lead_chunks: int = 1,
    retries: int = 0,
    max_pending: int = 8,
    connect: bool = True,
    max_chunks: int | None = None,
) -> Session[str]:
    session: Session[str] = Session(
        session_id=SessionId("s-1"),
        prompt="town",
        seed=3,
        pacing=pacing,
        fps=12,
        first_event_id=0,
        rules=SessionRules(max_pending_events=max_pending, lead_chunks=lead_chunks, retry_rolled_back_ticks=retries),
        max_chunks=max_chunks,
    )
    if connect:
        session.connect()
    return session


def answer(tick: Tick) -> TickCommitted:
    return TickCommitted(
        request_id=tick.request_id,
        session_id=tick.session_id,
        chunk_index=tick.chunk_index,
        applied_event_ids=tick.event_ids,
        applied=tuple(AppliedEvent(event_id=event_id, latent_frame=2) for event_id in tick.event_ids),
        num_media_frames=12,
        pose=None,
        timings=TIMINGS,
        memory=MEMORY,
    )


def begin(session: Session[str], now: float = 0.0) -> Tick:
    tick = session.begin_tick(now)
    assert tick is not None
    return tick


def make_ready(session: Session[str], chunk: CommittedChunk, now: float = 0.0) -> None:
    session.chunk_ready(chunk, f"{chunk.run}:{chunk.chunk_index}", transfer_ms=0.0, encode_ms=0.0, now=now)


def deliver(session: Session[str], now: float = 0.0) -> CommittedChunk:
    """Run one chunk all the way to the viewer."""
    chunk = session.commit(answer(begin(session, now)))
    make_ready(session, chunk, now)
    session.chunk_sent(epoch=session.epoch, run=chunk.run, chunk_index=chunk.chunk_index)
    session.report_playback(epoch=session.epoch, run=chunk.run, chunk_index=chunk.chunk_index, buffered_ms=0.0, now=now)
    return chunk


def accept(session: Session[str], event_id: int, *, prompt: str | None = None, now: float = 0.0) -> None:
    controls = () if prompt is not None else (Control(track="camera", schema="s", data=b"%d" % event_id),)
    session.accept(event_id=event_id, prompt=prompt, controls=controls, now=now)


# ---------------------------------------------------------------- ticks


def test_a_tick_holds_everything_accepted_so_far_in_order() -> None:
    session = new_session()
    accept(session, 4, prompt="night", now=1.0)
    accept(session, 2, prompt="day", now=1.5)
    accept(session, 3, now=1.75)
    tick = begin(session, now=2.0)
    assert tick.event_ids == (2, 3, 4)
    assert tick.prompt == "night", "the prompt of the highest id wins"
    assert [event.age_ms for event in tick.events] == [500.0, 250.0, 1000.0]
    assert tick.events[1].controls == (Control(track="camera", schema="s", data=b"3"),)
    assert tick.chunk_index == 0
    assert session.prompt == "town", "not in force before the commit"
    assert session.commit(answer(tick)).chunk_index == 0
    assert session.prompt == "night"


def test_a_tick_without_prompt_events_keeps_the_prompt() -> None:
    session = new_session()
    accept(session, 0)
    assert begin(session).prompt is None


def test_one_tick_at_a_time() -> None:
    session = new_session()
    begin(session)
    assert session.begin_tick(1.0) is None
    assert session.opens_at(1.0) is None


def test_chunks_are_contiguous_and_request_ids_unique() -> None:
    session = new_session()
    chunks = [deliver(session) for _ in range(5)]
    assert [chunk.chunk_index for chunk in chunks] == [0, 1, 2, 3, 4]
    assert len({chunk.request_id for chunk in chunks}) == 5


def test_a_run_ends_at_its_length_and_the_next_has_as_many_chunks_again() -> None:
    session = new_session(pacing=Pacing.FREE, max_chunks=2)
    assert [deliver(session).chunk_index for _ in range(2)] == [0, 1]
    assert session.opens_at(0.0) is None
    assert session.begin_tick(0.0) is None
    session.begin_reset()
    session.finish_reset(prompt="", seed=0)
    assert deliver(session).chunk_index == 0


def test_events_are_receipted_with_their_latent_frame_and_wait() -> None:
    session = new_session()
    accept(session, 1, now=1.0)
    accept(session, 2, prompt="night", now=1.0)
    tick = begin(session, now=1.25)
    placed = replace(answer(tick), applied=(AppliedEvent(event_id=1, latent_frame=2),))
    receipts = session.commit(placed).applied
    assert [(it.event_id, it.latent_frame, it.wait_ms) for it in receipts] == [(1, 2, 250.0), (2, 0, 250.0)]


@pytest.mark.parametrize(
    "change",
    [
        lambda it: replace(it, session_id=SessionId("s-2")),
        lambda it: replace(it, request_id=RequestId("s-1-77")),
        lambda it: replace(it, chunk_index=1),
        lambda it: replace(it, applied_event_ids=()),
        lambda it: replace(it, applied_event_ids=(1, 2, 3)),
        lambda it: replace(it, applied_event_ids=(2, 1)),
        lambda it: replace(it, applied=(AppliedEvent(event_id=9, latent_frame=0),)),
    ],
    ids=["session", "request", "chunk", "no events", "more events", "order", "foreign event placed"],
)
def test_nothing_is_committed_unless_the_answer_equals_the_tick(
    change: Callable[[TickCommitted], TickCommitted],
) -> None:
    session = new_session()
    accept(session, 1, prompt="night")
    accept(session, 2)
    tick = begin(session)
    with pytest.raises(CommitMismatch):
        session.commit(change(answer(tick)))
    assert session.next_chunk_index == 0
    assert session.prompt == "town"
    assert session.in_flight is tick
    assert session.fail() == (1, 2)


def test_queue_time_counts_from_when_the_tick_could_have_started() -> None:
    session = new_session()
    assert session.opens_at(10.0) == 10.0
    assert session.opens_at(10.2) == 10.2
    assert session.commit(answer(begin(session, now=10.5))).queue_ms == pytest.approx(500.0)


# ---------------------------------------------------------------- who may tick


def test_no_tick_while_parked_paused_or_ahead_of_the_viewer() -> None:
    session = new_session(connect=False)
    assert session.state is SessionState.PARKED
    assert session.begin_tick(0.0) is None
    session.connect()
    session.pause()
    assert session.state is SessionState.PAUSED
    assert session.begin_tick(0.0) is None
    accept(session, 0)
    session.unpause()
    assert begin(session).event_ids == (0,), "pause keeps events queued"


def test_pausing_twice_changes_nothing() -> None:
    session = new_session()
    assert [session.pause(), session.pause(), session.unpause(), session.unpause()] == [True, False, True, False]


def test_deadline_before_the_first_chunk_is_since_when_it_waits() -> None:
    session = new_session()
    session.opens_at(7.0)
    assert session.deadline() == 7.0


# ---------------------------------------------------------------- playback reports


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({"epoch": 2, "run": 0, "chunk_index": 0}, "epoch"),
        ({"epoch": 1, "run": 1, "chunk_index": 0}, "run"),
        ({"epoch": 1, "run": 0, "chunk_index": 1}, "chunk_index"),
    ],
)
def test_reports_of_the_impossible_are_errors(report: dict[str, int], field: str) -> None:
    session = new_session()
    deliver(session)
    with pytest.raises(BadInput) as caught:
        session.report_playback(**report, buffered_ms=0.0, now=0.0)
    assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_PLAYBACK, field)


def test_reports_of_old_epochs_and_runs_are_ignored() -> None:
    session = new_session()
    for _ in range(2):
        session.chunk_sent(epoch=1, run=0, chunk_index=deliver(session).chunk_index)
    session.disconnect(1)
    session.connect()
    session.begin_reset()
    session.finish_reset(prompt="", seed=3)
    session.report_playback(epoch=1, run=1, chunk_index=9, buffered_ms=0.0, now=0.0)
    session.report_playback(epoch=2, run=0, chunk_index=9, buffered_ms=0.0, now=0.0)
    session.report_playback(epoch=2, run=1, chunk_index=-1, buffered_ms=0.0, now=0.0)


# ---------------------------------------------------------------- failure


def test_failure_drops_everything_and_refuses_events() -> None:
    session = new_session()
    accept(session, 1)
    begin(session)
    accept(session, 2)
    assert session.fail() == (1, 2)
    assert session.state is SessionState.FAILED
    assert session.begin_tick(0.0) is None
    with pytest.raises(EventRefused) as caught:
        accept(session, 3)
    assert caught.value.code is ErrorCode.BAD_STATE
    with pytest.raises(EventRefused) as caught:
        accept(session, 2)
    assert caught.value.code is ErrorCode.DUPLICATE


@pytest.mark.parametrize("retries", [0, 1])
def test_a_tick_is_retried_as_often_as_configured(retries: int) -> None:
    session = new_session(retries=retries)
    accept(session, 1)
    tick = begin(session)
    for _ in range(retries):
        retry = session.retry_tick()
        assert retry is not None
        assert retry.request_id != tick.request_id
        assert replace(retry, request_id=tick.request_id) == tick
        tick = retry
    assert session.retry_tick() is None
    if retries:
        assert session.commit(answer(tick)).chunk_index == 0


def test_refused_events_are_given_up_and_the_session_goes_on() -> None:
    session = new_session()
    accept(session, 1)
    begin(session)
    assert session.refuse_tick() == (1,)
    tick = begin(session)
    assert (tick.chunk_index, tick.event_ids) == (0, ())


# ---------------------------------------------------------------- reset and close


def test_reset_begins_a_run_and_keeps_the_floor() -> None:
    session = new_session()
    deliver(session)
    accept(session, 5)
    assert session.begin_reset() == (5,)
    assert session.state is SessionState.RESETTING
    with pytest.raises(EventRefused) as caught:
        accept(session, 4)
    assert caught.value.code is ErrorCode.STALE
    accept(session, 6)
    session.finish_reset(prompt="night", seed=9)
    assert (session.run, session.next_chunk_index, session.prompt, session.seed) == (1, 0, "night", 9)
    tick = begin(session)
    assert (tick.chunk_index, tick.event_ids) == (0, (6,)), "what came during the reset belongs to the new run"


def test_a_new_run_is_paced_from_its_beginning() -> None:
    session = new_session()
    for _ in range(5):
        deliver(session)
    session.begin_reset()
    session.finish_reset(prompt="", seed=1)
    for index in range(2):
        chunk = session.commit(answer(begin(session)))
        make_ready(session, chunk)
        session.chunk_sent(epoch=1, run=1, chunk_index=index)
    assert session.begin_tick(0.0) is None, "the viewer has seen nothing of this run"


def test_what_an_old_socket_took_is_not_what_the_new_one_has() -> None:
    session = new_session()
    chunk = session.commit(answer(begin(session)))
    make_ready(session, chunk)
    session.begin_reset()
    session.finish_reset(prompt="", seed=1)
    chunk = session.commit(answer(begin(session)))
    make_ready(session, chunk)
    session.disconnect(1)
    session.connect()
    session.chunk_sent(epoch=1, run=1, chunk_index=0)
    with pytest.raises(BadInput):
        session.report_playback(epoch=2, run=1, chunk_index=0, buffered_ms=0.0, now=0.0)
    assert session.resume(last_chunk_index=0, run=None, now=0.0).num_lost_chunks == 0


def test_a_tick_in_flight_when_a_reset_begins_commits_to_the_old_run() -> None:
    session = new_session()
    tick = begin(session)
    session.begin_reset()
    assert session.begin_tick(0.0) is None
    chunk = session.commit(answer(tick))
    assert (chunk.run, chunk.chunk_index) == (0, 0)
    session.finish_reset(prompt="", seed=1)
    make_ready(session, chunk)
    assert session.resume(last_chunk_index=-1, run=1, now=0.0).chunks == (), "old runs are not kept"


def test_a_failed_reset_is_a_failure() -> None:
    session = new_session()
    session.begin_reset()
    accept(session, 1)
    assert session.fail() == (1,)
    assert session.state is SessionState.FAILED
    session.begin_reset()
    session.finish_reset(prompt="", seed=1)
    assert session.state is SessionState.ACTIVE


@pytest.mark.parametrize("phase", [Phase.RESETTING, Phase.CLOSING, Phase.CLOSED, Phase.CLEANUP_FAILED])
def test_reset_is_for_active_and_failed_sessions(phase: Phase) -> None:
    session = new_session()
    session.phase = phase
    with pytest.raises(BadInput) as caught:
        session.begin_reset()
    assert caught.value.code is ErrorCode.BAD_STATE
    assert session.phase is phase


def test_close_drops_events_and_a_failed_cleanup_can_be_tried_again() -> None:
    session = new_session()
    accept(session, 1)
    assert session.begin_close() == (1,)
    session.finish_close(cleaned_up=False)
    assert session.state is SessionState.CLEANUP_FAILED
    session.begin_close()
    session.finish_close(cleaned_up=True)
    assert session.state is SessionState.CLOSED
    assert session.begin_close() == ()
    assert session.state is SessionState.CLOSED


# ---------------------------------------------------------------- epochs and resume


def test_epochs_count_connections_and_old_ones_are_ignored() -> None:
    session = new_session(connect=False)
    assert [session.connect(), session.connect()] == [1, 2]
    assert not session.disconnect(1)
    assert session.connected
    assert session.disconnect(2)
    assert not session.disconnect(2)
    session.chunk_sent(epoch=1, run=0, chunk_index=5)
    assert session.resume(last_chunk_index=-1, run=None, now=0.0).chunks == ()


@pytest.mark.parametrize(
    ("last_chunk_index", "resent", "num_lost"),
    [(5, [], 0), (4, [5], 0), (2, [3, 4, 5], 0), (1, [3, 4, 5], 1), (-1, [3, 4, 5], 3)],
)
def test_resume_sends_what_is_kept_after_the_last_chunk(
    last_chunk_index: int, resent: list[int], num_lost: int
) -> None:
    session = new_session(lead_chunks=1)
    for _ in range(6):
        deliver(session)
    session.disconnect(1)
    resend = session.resume(last_chunk_index=last_chunk_index, run=None, now=0.0)
    assert [ready.chunk.chunk_index for ready in resend.chunks] == resent
    assert [ready.encoded for ready in resend.chunks] == [f"0:{index}" for index in resent]
    assert resend.num_lost_chunks == num_lost


def test_resume_beyond_what_was_made_is_an_error() -> None:
    session = new_session()
    deliver(session)
    for last_chunk_index, run, field in ((1, None, "last_chunk_index"), (0, 1, "run")):
        with pytest.raises(BadInput) as caught:
            session.resume(last_chunk_index=last_chunk_index, run=run, now=0.0)
        assert caught.value.field == field


@pytest.mark.parametrize("run", [0, None])
def test_resume_after_a_reset_that_the_client_did_not_see_starts_with_the_new_run(run: int | None) -> None:
    session = new_session()
    for _ in range(3):
        deliver(session)
    session.begin_reset()
    session.finish_reset(prompt="", seed=1)
    make_ready(session, session.commit(answer(begin(session))))
    session.disconnect(1)
    resend = session.resume(last_chunk_index=2, run=run, now=0.0)
    assert [ready.encoded for ready in resend.chunks] == ["1:0"]


# ---------------------------------------------------------------- random use


class SessionMachine(RuleBasedStateMachine):
    """Any order of legal calls: every accepted event is answered exactly once more, chunks are contiguous per run."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session(pacing=Pacing.FREE, lead_chunks=2, retries=1, max_pending=4)
        self.now = 0.0
        self.accepted: set[int] = set()
        self.answered: list[int] = []
        self.committed: list[tuple[int, int]] = []
        self.unready: list[CommittedChunk] = []
        self.unsent: list[CommittedChunk] = []

    @rule(event_id=st.integers(0, 30))
    def accepts(self, event_id: int) -> None:
        floor = self.session.event_floor
        try:
            accept(self.session, event_id, now=self.now)
        except EventRefused:
            return
        assert event_id > floor
        assert event_id not in self.accepted
        self.accepted.add(event_id)

    @rule()
    def begins(self) -> None:
        self.now += 1
        tick = self.session.begin_tick(self.now)
        if tick is not None:
            assert list(tick.event_ids) == sorted(tick.event_ids)

    @precondition(lambda self: self.session.in_flight is not None)
    @rule()
    def commits(self) -> None:
        tick = self.session.in_flight
        assert tick is not None
        chunk = self.session.commit(answer(tick))
        self.answered += [receipt.event_id for receipt in chunk.applied]
        self.committed.append((chunk.run, chunk.chunk_index))
        self.unready.append(chunk)

    @precondition(lambda self: self.session.in_flight is not None)
    @rule()
    def retries(self) -> None:
        before = self.session.in_flight
        assert before is not None
        retry = self.session.retry_tick()
        assert retry is None or retry.event_ids == before.event_ids

    @precondition(lambda self: self.unready)
    @rule()
    def readies(self) -> None:
        chunk = self.unready.pop(0)
        make_ready(self.session, chunk, self.now)
        self.unsent.append(chunk)

    @precondition(lambda self: self.unsent)
    @rule()
    def sends(self) -> None:
        chunk = self.unsent.pop(0)
        self.session.chunk_sent(epoch=self.session.epoch, run=chunk.run, chunk_index=chunk.chunk_index)

    @rule()
    def reconnects(self) -> None:
        self.session.disconnect(self.session.epoch)
        # Nobody can have a chunk that is still being encoded.
        last = self.session.next_chunk_index - 1 - sum(chunk.run == self.session.run for chunk in self.unready)
        self.session.resume(last_chunk_index=last, run=self.session.run, now=self.now)
        self.session.connect()
        self.unsent.clear()

    @rule()
    def fails(self) -> None:
        self.answered += self.session.fail()

    @precondition(lambda self: self.session.phase in (Phase.ACTIVE, Phase.FAILED))
    @rule()
    def begins_reset(self) -> None:
        self.answered += self.session.begin_reset()

    @precondition(lambda self: self.session.phase is Phase.RESETTING and self.session.in_flight is None)
    @rule()
    def finishes_reset(self) -> None:
        self.session.finish_reset(prompt="", seed=0)

    @invariant()
    def events_are_answered_once(self) -> None:
        tick = self.session.in_flight
        in_flight = set() if tick is None else set(tick.event_ids)
        assert len(self.answered) == len(set(self.answered))
        assert set(self.answered) | in_flight | set(self.session.pending_event_ids) == self.accepted

    @invariant()
    def chunks_are_contiguous(self) -> None:
        for run in {run for run, _ in self.committed}:
            indices = [index for its_run, index in self.committed if its_run == run]
            assert indices == list(range(len(indices)))

    @invariant()
    def unsent_chunks_are_bounded(self) -> None:
        waiting = [chunk for chunk in self.unready + self.unsent if chunk.run == self.session.run]
        assert len(waiting) <= 3


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
