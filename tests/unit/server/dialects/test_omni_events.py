"""Event ids of the `omni` dialect, and from which chunk to which an event is at work, against a slow twin."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from server.dialects.omni_events import REMEMBERED_PER_PENDING, ChunkEvents, Known, OmniEvents, Span

PROMPT, CAMERA = "prompt", "camera"


def events(max_pending: int = 2) -> OmniEvents:
    return OmniEvents(max_pending=max_pending)


def chunk(
    *, started: tuple[str, ...] = (), active: tuple[str, ...] = (), completed: tuple[str, ...] = ()
) -> ChunkEvents:
    return ChunkEvents(started=started, active=active, completed=completed)


def test_an_id_is_new_then_a_retry_or_a_conflict() -> None:
    it = events()
    assert it.look_up("a", 1) is Known.NEW
    it.queue(0, "a", 1, [Span(track=CAMERA, num_chunks=1)])
    assert it.look_up("a", 1) is Known.RETRY
    assert it.look_up("a", 2) is Known.CONFLICT


def test_a_dropped_id_can_be_used_again_and_an_applied_one_can_not() -> None:
    it = events()
    it.queue(0, "a", 1, [Span(track=CAMERA, num_chunks=1)])
    it.queue(1, "b", 1, [Span(track=CAMERA, num_chunks=1)])
    assert it.drop(0) == "a"
    assert it.drop(0) is None
    it.chunk([1])
    assert it.drop(1) is None
    assert it.look_up("a", 2) is Known.NEW
    assert it.look_up("b", 2) is Known.CONFLICT


def test_only_the_last_ids_are_remembered() -> None:
    it = events(max_pending=1)
    for number, event_id in enumerate("abcde"):
        it.queue(number, event_id, number, [Span(track=CAMERA, num_chunks=1)])
    known = [it.look_up(event_id, number) for number, event_id in enumerate("abcde")]
    assert known == [Known.NEW, *[Known.RETRY] * REMEMBERED_PER_PENDING]


def test_a_target_is_at_work_for_its_chunks_and_a_velocity_until_replaced() -> None:
    it = events()
    it.queue(0, "target", 0, [Span(track=CAMERA, num_chunks=2)])
    assert it.chunk([0]) == chunk(started=("target",), active=("target",))
    assert it.chunk([]) == chunk(completed=("target",))
    it.queue(1, "velocity", 0, [Span(track=CAMERA, num_chunks=None)])
    assert it.chunk([1]) == chunk(started=("velocity",), active=("velocity",))
    assert it.chunk([]) == chunk(active=("velocity",))
    it.queue(2, "next", 0, [Span(track=CAMERA, num_chunks=1)])
    assert it.chunk([2]) == chunk(started=("next",), completed=("velocity", "next"))
    assert it.chunk([]) == chunk()


def test_an_event_on_two_tracks_is_complete_when_both_are() -> None:
    it = events()
    it.queue(0, "both", 0, [Span(track=PROMPT, num_chunks=3), Span(track=CAMERA, num_chunks=None)])
    it.queue(1, "camera", 0, [Span(track=CAMERA, num_chunks=None)])
    assert it.chunk([0]) == chunk(started=("both",), active=("both",))
    assert it.chunk([1]) == chunk(started=("camera",), active=("both", "camera"))
    assert it.chunk([]) == chunk(active=("camera",), completed=("both",))


def test_numbers_without_a_client_are_passed_over() -> None:
    assert events().chunk([7]) == chunk()


SPANS = st.lists(
    st.builds(Span, track=st.sampled_from([PROMPT, CAMERA]), num_chunks=st.none() | st.integers(1, 3)),
    min_size=1,
    max_size=2,
    unique_by=lambda span: span.track,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(SPANS, max_size=3), max_size=8))
def test_every_event_starts_once_and_is_active_until_it_is_completed(chunks: list[list[list[Span]]]) -> None:
    """The twin works it out from the whole story: the chunk in which each part of each event ends."""
    story = [(index, spans) for index, batch in enumerate(chunks) for spans in batch]
    ends: list[float] = []
    for number, (index, spans) in enumerate(story):
        ends_of = []
        for span in spans:
            end = float("inf") if span.num_chunks is None else index + span.num_chunks - 1
            later = [at for at, other in story[number + 1 :] if any(it.track == span.track for it in other)]
            ends_of.append(min([end, *later]))
        ends.append(max(ends_of))
    it = events(max_pending=25)
    number = 0
    for index, batch in enumerate(chunks):
        numbers = list(range(number, number + len(batch)))
        for spans in batch:
            it.queue(number, str(number), None, spans)
            number += 1
        seen = it.chunk(numbers)
        known = range(number)
        assert seen.started == tuple(map(str, numbers))
        assert set(seen.active) == {str(n) for n in known if ends[n] > index}
        assert set(seen.completed) == {str(n) for n in known if ends[n] == index}
        assert len(set(seen.completed)) == len(seen.completed)
