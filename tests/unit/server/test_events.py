"""Order and acceptance of events: written-out cases, and random use against a list that does the obvious."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ErrorCode, EventRefused
from server.events import EventQueue, PendingEvent
from worldmodel.messages import Control


def control(track: str = "camera") -> Control:
    return Control(track=track, schema="s", data=b"{}")


def event(event_id: int, *, prompt: str | None = "p", controls: tuple[Control, ...] = ()) -> PendingEvent:
    return PendingEvent(event_id=event_id, prompt=prompt, controls=controls, accepted_at=0.0)


def refusal(queue: EventQueue, refused: PendingEvent) -> EventRefused:
    with pytest.raises(EventRefused) as caught:
        queue.accept(refused)
    assert caught.value.event_id == refused.event_id
    return caught.value


def test_events_are_taken_in_ascending_order() -> None:
    queue = EventQueue(max_pending=8, first_event_id=0)
    for event_id in (5, 2, 9):
        queue.accept(event(event_id))
    assert [taken.event_id for taken in queue.take()] == [2, 5, 9]
    assert queue.floor == 9
    assert queue.take() == ()


def test_the_first_event_id_is_the_smallest_that_is_taken() -> None:
    queue = EventQueue(max_pending=8, first_event_id=100)
    assert refusal(queue, event(99)).code is ErrorCode.STALE
    queue.accept(event(100))


@pytest.mark.parametrize(
    ("event_id", "code"),
    [
        (4, ErrorCode.DUPLICATE),  # waits
        (3, ErrorCode.DUPLICATE),  # was taken, and is remembered
        (2, ErrorCode.STALE),  # never seen, below what was taken
    ],
)
def test_ids_that_were_used_or_passed_over_are_refused(event_id: int, code: ErrorCode) -> None:
    queue = EventQueue(max_pending=8, first_event_id=0)
    queue.accept(event(3))
    queue.take()
    queue.accept(event(4))
    assert refusal(queue, event(event_id)).code is code
    assert queue.pending_ids == (4,)


def test_the_last_id_in_use_is_stale_even_once_it_is_forgotten() -> None:
    queue = EventQueue(max_pending=2, first_event_id=0)
    for event_id in (9, 3):
        queue.accept(event(event_id))
    queue.take()
    queue.accept(event(10))
    assert (queue.floor, queue.is_remembered(9)) == (9, False)
    assert refusal(queue, event(9)).code is ErrorCode.STALE


def test_duplicate_is_found_before_anything_else_is_checked() -> None:
    queue = EventQueue(max_pending=1, first_event_id=0)
    queue.accept(event(3))
    assert refusal(queue, event(3, prompt=None)).code is ErrorCode.DUPLICATE
    assert refusal(queue, event(4, prompt=None)).code is ErrorCode.QUEUE_FULL


def test_forgotten_ids_are_stale() -> None:
    queue = EventQueue(max_pending=2, first_event_id=0)
    for event_id in range(3):
        queue.accept(event(event_id))
        queue.take()
    assert refusal(queue, event(0)).code is ErrorCode.STALE
    assert refusal(queue, event(1)).code is ErrorCode.DUPLICATE


def test_discarding_raises_the_floor() -> None:
    queue = EventQueue(max_pending=8, first_event_id=0)
    queue.accept(event(7))
    assert queue.discard() == (7,)
    assert refusal(queue, event(6)).code is ErrorCode.STALE
    queue.accept(event(8))


def test_an_event_says_something_and_no_track_twice() -> None:
    queue = EventQueue(max_pending=8, first_event_id=0)
    assert refusal(queue, event(0, prompt=None)).code is ErrorCode.EMPTY_EVENT
    twice = event(0, prompt=None, controls=(control(), control("arm"), control()))
    refused = refusal(queue, twice)
    assert (refused.code, refused.field) == (ErrorCode.DUPLICATE_TRACK, "controls[2].track")
    queue.accept(event(0, prompt=None, controls=(control(), control("arm"))))


def test_an_empty_prompt_is_a_prompt() -> None:
    queue = EventQueue(max_pending=8, first_event_id=0)
    queue.accept(event(0, prompt=""))
    assert queue.pending_ids == (0,)


@given(
    steps=st.lists(st.one_of(st.integers(0, 12), st.sampled_from(["take", "discard"])), max_size=40),
    max_pending=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_id_leaves_the_queue_once_and_in_order(steps: list[int | str], max_pending: int) -> None:
    queue = EventQueue(max_pending=max_pending, first_event_id=0)
    pending: list[int] = []
    accepted: list[int] = []
    left: list[int] = []
    for step in steps:
        if isinstance(step, str):
            taken = [it.event_id for it in queue.take()] if step == "take" else list(queue.discard())
            assert taken == sorted(pending)
            left += taken
            pending = []
            continue
        if step in pending or step in accepted[-max_pending:]:
            assert refusal(queue, event(step)).code is ErrorCode.DUPLICATE
        elif left and step <= max(left):
            assert refusal(queue, event(step)).code is ErrorCode.STALE
        elif len(pending) >= max_pending:
            assert refusal(queue, event(step)).code is ErrorCode.QUEUE_FULL
        else:
            queue.accept(event(step))
            pending.append(step)
            accepted.append(step)
    assert left == sorted(set(left))
