"""The robot session's state machine: order, step ids, phases. Tables first, then random verbs against a plain model."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.errors import BadInput, CommitMismatch, ErrorCode, ServerError, SessionFailed, Unavailable
from server.robot_session import MAX_WAITING_CALLS, Observation, RobotCall, RobotPhase, RobotSession
from worldmodel.messages import MemoryStats, SessionId, StageTimings, Tick, TickCommitted

ACTIONS = np.zeros((24, 8), np.float32)
SEEN = Observation(prompt="go", arrays=(), payload=(memoryview(b"x"),))


def committed(tick: Tick) -> TickCommitted:
    return TickCommitted(
        request_id=tick.request_id,
        session_id=tick.session_id,
        chunk_index=tick.chunk_index,
        applied_event_ids=(),
        applied=(),
        num_media_frames=0,
        pose=None,
        timings=StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0),
        memory=MemoryStats(sessions=1, total_pages=1, free_pages=1),
    )


def make(*, retries: int = 0) -> RobotSession:
    return RobotSession(session_id=SessionId("s"), retry_rolled_back_ticks=retries)


def opened(**options: int) -> RobotSession:
    session = make(**options)
    session.begin_opening()
    session.opened()
    return session


def accept(session: RobotSession, step_id: int | None = None, *, now: float = 0.0) -> RobotCall:
    return session.accept(SEEN, step_id=step_id, run=None, now=now)


def compute(session: RobotSession) -> RobotCall:
    tick = session.begin_tick(1.0)
    assert tick is not None
    session.commit(committed(tick))
    return session.answered(ACTIONS, {})


def refusal(session: RobotSession, step_id: int | None = None) -> ServerError:
    with pytest.raises(ServerError) as caught:
        accept(session, step_id)
    return caught.value


# ---------------------------------------------------------------- calls


def test_calls_are_computed_in_their_order() -> None:
    session = opened()
    calls = [accept(session, now=float(number)) for number in range(3)]
    assert session.deadline() == 0.0
    assert [compute(session) for _ in calls] == calls
    assert session.next_chunk_index == 3
    assert session.deadline() == float("inf")


def test_one_call_at_a_time() -> None:
    session = opened()
    accept(session)
    accept(session)
    assert session.opens_at(5.0) == 5.0
    tick = session.begin_tick(5.0)
    assert tick is not None
    assert session.opens_at(6.0) is None
    assert session.begin_tick(6.0) is None
    session.commit(committed(tick))
    assert session.opens_at(6.0) is None, "the answer has not been read"
    session.answered(ACTIONS, {})
    assert session.opens_at(6.0) == 6.0


def test_nothing_is_computed_before_the_worker_has_the_session() -> None:
    session = make()
    assert not session.needs_opening
    accept(session)
    assert session.needs_opening
    assert session.first_prompt == "go"
    assert session.opens_at(0.0) is None
    session.begin_opening()
    assert not session.needs_opening
    session.opened()
    assert session.opens_at(0.0) == 0.0


def test_an_opening_that_fails_drops_what_waits() -> None:
    session = make()
    calls = [accept(session), accept(session)]
    session.begin_opening()
    assert session.opening_failed() == calls
    assert session.phase is RobotPhase.EMPTY
    accept(session)
    assert session.needs_opening


def test_too_many_calls_are_refused() -> None:
    session = opened()
    for _ in range(MAX_WAITING_CALLS):
        accept(session)
    assert isinstance(refusal(session), Unavailable)
    session.begin_tick(0.0)
    accept(session)


def test_a_withdrawn_call_is_not_computed_and_one_under_way_is() -> None:
    session = opened()
    first, second, third = (accept(session) for _ in range(3))
    session.begin_tick(0.0)
    assert not session.withdraw(first)
    assert session.withdraw(second)
    assert not session.withdraw(second)
    assert session.in_flight is first
    session.refuse_tick()
    assert compute(session) is third


def test_the_worker_must_answer_the_tick_it_was_given() -> None:
    session = opened()
    accept(session)
    tick = session.begin_tick(0.0)
    assert tick is not None
    right = committed(tick)
    for wrong in (
        replace(right, chunk_index=1),
        replace(right, session_id=SessionId("t")),
        replace(right, request_id=session.new_request_id()),
        replace(right, applied_event_ids=(1,)),
    ):
        with pytest.raises(CommitMismatch):
            session.commit(wrong)
        assert session.next_chunk_index == 0
    session.commit(right)
    assert session.next_chunk_index == 1


def test_a_tick_is_tried_again_as_often_as_allowed_each_time() -> None:
    session = opened(retries=1)
    for _ in range(2):
        accept(session)
        tick = session.begin_tick(0.0)
        retry = session.retry_tick()
        assert tick is not None
        assert retry is not None
        assert retry.request_id != tick.request_id
        assert replace(retry, request_id=tick.request_id) == tick
        assert session.retry_tick() is None
        session.commit(committed(retry))
        session.answered(ACTIONS, {})
    never = opened()
    accept(never)
    never.begin_tick(0.0)
    assert never.retry_tick() is None


# ---------------------------------------------------------------- step ids


def test_a_step_id_names_its_call_while_it_waits_is_computed_and_was_answered() -> None:
    session = opened()
    call = accept(session, 7)
    assert accept(session, 7) is call
    session.begin_tick(0.0)
    assert accept(session, 7) is call
    assert session.num_waiting == 0
    session.refuse_tick()
    again = accept(session, 7)
    assert again is not call
    compute(session)
    assert accept(session, 7) is again
    assert again.answer is not None
    assert again.observation.payload == (), "pictures of the past are not kept"
    assert session.last_step_id == 7


@pytest.mark.parametrize("where", ["waiting", "in flight", "answered"])
def test_an_older_step_id_is_stale(where: str) -> None:
    session = opened()
    accept(session, 7)
    if where != "waiting":
        session.begin_tick(0.0)
    if where == "answered":
        tick_free = session.refuse_tick()
        assert tick_free.step_id == 7
        accept(session, 7)
        compute(session)
    error = refusal(session, 6)
    assert (error.code, error.field) == (ErrorCode.STALE, "step_id")
    accept(session, 8)


def test_calls_without_a_step_id_do_not_change_the_floor() -> None:
    session = opened()
    accept(session, 7)
    compute(session)
    accept(session)
    compute(session)
    assert refusal(session, 7).code is ErrorCode.STALE, "its answer is no longer kept"
    accept(session, 8)


def test_a_new_run_begins_its_step_ids_anew() -> None:
    session = opened()
    accept(session, 7)
    compute(session)
    session.begin_reset()
    session.finish_reset(holds_state=True)
    assert (session.run, session.next_chunk_index, session.last_step_id) == (1, 0, None)
    call = accept(session, 0)
    assert call.answer is None
    with pytest.raises(BadInput, match="run 0, and the session is in run 1"):
        session.accept(SEEN, step_id=1, run=0, now=0.0)


# ---------------------------------------------------------------- failure, reset, close


def test_a_failed_session_waits_for_a_reset() -> None:
    session = opened()
    calls = [accept(session), accept(session)]
    session.begin_tick(0.0)
    assert session.fail(SessionFailed(ErrorCode.TICK_FAILED, "it broke")) == calls
    error = refusal(session)
    assert error.code is ErrorCode.BAD_STATE
    assert "it broke" in error.message
    assert session.begin_reset() == []
    accept(session)
    session.finish_reset(holds_state=False)
    assert session.needs_opening


def test_a_reset_drops_what_waits_and_what_is_computed() -> None:
    session = opened()
    calls = [accept(session), accept(session)]
    session.begin_tick(0.0)
    assert session.begin_reset() == calls
    assert session.in_flight is None
    later = accept(session)
    assert session.opens_at(0.0) is None
    session.finish_reset(holds_state=True)
    assert compute(session) is later


def test_an_opening_that_ends_during_a_reset_changes_nothing() -> None:
    session = make()
    accept(session)
    session.begin_opening()
    session.begin_reset()
    session.opened()
    assert session.phase is RobotPhase.RESETTING
    assert session.opening_failed() == []


@pytest.mark.parametrize("cleaned_up", [True, False])
def test_a_closed_session_takes_nothing(cleaned_up: bool) -> None:
    session = opened()
    call = accept(session)
    assert session.begin_close() == [call]
    for _ in range(2):
        assert refusal(session).code is ErrorCode.BAD_STATE
        with pytest.raises(BadInput):
            session.begin_reset()
        session.finish_close(cleaned_up=cleaned_up)
    assert session.phase is (RobotPhase.CLOSED if cleaned_up else RobotPhase.CLEANUP_FAILED)
    session.begin_close()
    assert session.phase is (RobotPhase.CLOSED if cleaned_up else RobotPhase.CLOSING)


def test_a_failure_of_a_session_that_is_closing_is_no_news() -> None:
    session = opened()
    session.begin_close()
    session.fail(SessionFailed(ErrorCode.TICK_FAILED, "late"))
    assert session.phase is RobotPhase.CLOSING


# ---------------------------------------------------------------- random verbs


class RandomVerbs(RuleBasedStateMachine):
    """Every accepted call ends exactly once: answered, refused, withdrawn or dropped; answers come in order."""

    def __init__(self) -> None:
        super().__init__()
        self.session = make(retries=1)
        self.open_calls: deque[RobotCall] = deque()
        self.num_committed = 0
        self.tick: Tick | None = None

    @rule(step_id=st.none() | st.integers(0, 20))
    def ask(self, step_id: int | None) -> None:
        try:
            call = accept(self.session, step_id)
        except ServerError:
            return
        if call.answer is None and call not in self.open_calls:
            self.open_calls.append(call)

    @precondition(lambda self: self.session.needs_opening)
    @rule(works=st.booleans())
    def open(self, works: bool) -> None:
        self.session.begin_opening()
        if works:
            self.session.opened()
            self.num_committed = 0
        else:
            self.dropped(self.session.opening_failed())

    @rule()
    def begin(self) -> None:
        expected = self.open_calls[0] if self.open_calls else None
        tick = self.session.begin_tick(1.0)
        if tick is not None:
            self.tick = tick
            assert self.session.in_flight is expected
            assert tick.chunk_index == self.num_committed

    @precondition(lambda self: self.session.in_flight is not None and self.tick is not None)
    @rule(retry=st.booleans())
    def answer(self, retry: bool) -> None:
        if retry:
            self.tick = self.session.retry_tick() or self.tick
        assert self.tick is not None
        self.session.commit(committed(self.tick))
        self.num_committed += 1
        assert self.session.answered(ACTIONS, {}) is self.open_calls.popleft()
        self.tick = None

    @precondition(lambda self: self.session.in_flight is not None)
    @rule()
    def refuse(self) -> None:
        assert self.session.refuse_tick() is self.open_calls.popleft()

    @precondition(lambda self: self.open_calls)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(list(self.open_calls)))
        assert self.session.withdraw(call) == (call is not self.session.in_flight)
        if call is not self.session.in_flight:
            self.open_calls.remove(call)

    @rule()
    def fail(self) -> None:
        self.dropped(self.session.fail(SessionFailed(ErrorCode.TICK_FAILED, "no")))

    @rule(holds_state=st.booleans())
    def reset(self, holds_state: bool) -> None:
        run = self.session.run
        self.dropped(self.session.begin_reset())
        self.session.finish_reset(holds_state=holds_state)
        assert self.session.run == run + 1
        self.num_committed = 0

    def dropped(self, calls: list[RobotCall]) -> None:
        assert calls == list(self.open_calls)
        self.open_calls.clear()

    @invariant()
    def counts_agree(self) -> None:
        session = self.session
        assert len(self.open_calls) == session.num_waiting + (session.in_flight is not None)
        assert session.is_busy == bool(self.open_calls)
        assert session.next_chunk_index == self.num_committed or session.phase is RobotPhase.EMPTY
        ids = [call.step_id for call in self.open_calls if call.step_id is not None]
        assert ids == sorted(set(ids))


RandomVerbs.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_random_verbs = RandomVerbs.TestCase
