"""Who hears what of a session: its owner, and spectators."""

from __future__ import annotations

import pytest

from server.audience import Audience
from server.chunks import ReadyChunk
from server.errors import ErrorCode, ServerError, Unavailable
from server.media.formats import EncodedChunk
from server.metrics import Metrics
from server.wire.messages import (
    DropReason,
    ErrorMessage,
    EventDropped,
    ServerMessage,
    SessionClosedMessage,
    SessionState,
    SessionStateMessage,
)
from tests.support.spectators import ready_chunk

ACTIVE = SessionStateMessage(session_id="s", state=SessionState.ACTIVE, epoch=3, run=1)


class Ear:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[ServerMessage] = []
        self.chunks: list[int] = []
        self.closed: list[tuple[int, str, bool]] = []

    def send(self, message: ServerMessage) -> None:
        self.messages.append(message)

    def send_chunk(self, ready: ReadyChunk[EncodedChunk]) -> None:
        self.chunks.append(ready.chunk.chunk_index)

    def close(self, code: int, reason: str, *, discard: bool = False) -> None:
        self.closed.append((code, reason, discard))


@pytest.fixture
def audience() -> Audience:
    return Audience(Metrics(), max_missed_messages=4, max_watchers=2)


def test_spectators_hear_states_without_the_owners_epoch(audience: Audience) -> None:
    owner, spectator = Ear(), Ear()
    audience.owner = owner
    audience.add_watcher(spectator)
    audience.send_state(ACTIVE)
    assert owner.messages == [ACTIVE]
    assert spectator.messages == [ACTIVE.model_copy(update={"epoch": 0})]


def test_errors_and_answers_are_the_owners(audience: Audience) -> None:
    owner, spectator = Ear(), Ear()
    audience.owner = owner
    audience.add_watcher(spectator)
    audience.send_error(ServerError(ErrorCode.TICK_FAILED, "no"))
    audience.send_dropped((4,), DropReason.RESET)
    audience.close_owner(1008, "taken over")
    assert [type(message) for message in owner.messages] == [ErrorMessage, EventDropped]
    assert owner.closed == [(1008, "taken over", False)]
    assert spectator.messages == []
    assert spectator.closed == []


def test_answers_wait_for_the_next_socket(audience: Audience) -> None:
    audience.send_dropped((1, 2, 3, 4, 5), DropReason.CLOSED)
    owner = Ear()
    audience.owner = owner
    audience.send_missed()
    audience.send_missed()
    assert [message.event_id for message in owner.messages if isinstance(message, EventDropped)] == [2, 3, 4, 5]


def test_chunks_go_to_everybody_who_is_there(audience: Audience) -> None:
    owner, first, second = Ear(), Ear(), Ear()
    audience.add_watcher(first)
    audience.send_chunk(ready_chunk(0))
    audience.owner = owner
    audience.add_watcher(second)
    audience.send_chunk(ready_chunk(1))
    audience.remove_watcher(first)
    audience.remove_watcher(first)
    audience.send_chunk(ready_chunk(2))
    assert (owner.chunks, first.chunks, second.chunks) == ([1, 2], [0, 1], [1, 2])


def test_there_is_room_for_so_many_spectators(audience: Audience) -> None:
    first = Ear()
    audience.add_watcher(first)
    audience.add_watcher(Ear())
    with pytest.raises(Unavailable, match="2 spectators") as refused:
        audience.add_watcher(Ear())
    assert refused.value.code is ErrorCode.TOO_MANY_WATCHERS
    audience.remove_watcher(first)
    audience.add_watcher(Ear())
    assert audience.num_watchers == 2


def test_the_end_reaches_everybody_once(audience: Audience) -> None:
    owner, spectator = Ear(), Ear()
    audience.owner = owner
    audience.add_watcher(spectator)
    last_words = SessionClosedMessage(session_id="s", reason="client")
    for _ in range(2):
        audience.end(1000, last_words=last_words, reason="client", discard=False)
    for ear in (owner, spectator):
        assert ear.messages == [last_words]
        assert ear.closed == [(1000, "client", False)]
    assert audience.is_empty
