"""The events of one `omni` session: which ids were used, and from which chunk to which an event is at work. No I/O.

queue ──> apply in a chunk: started ──> active, chunk by chunk ──> completed     reached, or another took its place
  └─────> drop
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

REMEMBERED_PER_PENDING = 4
"""Event ids that are known, as a multiple of those that may wait."""

EVENT_ID_CONFLICT = "event_id_conflict"
INTERACTION_FAILED = "interaction_failed"
"""Words of vLLM-Omni for an id that was used for something else, and for a queued event that came to nothing."""


class Known(Enum):
    """What an id is to a session."""

    NEW = auto()
    RETRY = auto()
    CONFLICT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long an event is at work on a track: so many chunks, or until another replaces it (None)."""

    track: str
    num_chunks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEvents:
    """Ids for one chunk's metadata."""

    started: tuple[str, ...]
    active: tuple[str, ...]
    completed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    event_id: str
    spans: tuple[Span, ...]


@dataclass(slots=True)
class _AtWork:
    event_id: str
    chunks_left: int | None


class OmniEvents:
    """Maps a session's event numbers to its client's ids and follows events through chunks.

    An id sent again with the same content is a retry, with other content a conflict. Where `max_pending` events may
    wait, `REMEMBERED_PER_PENDING` times as many ids are known.
    """

    def __init__(self, *, max_pending: int) -> None:
        self._max_remembered = REMEMBERED_PER_PENDING * max_pending
        self._contents: OrderedDict[str, object] = OrderedDict()
        self._queued: dict[int, _Queued] = {}
        self._at_work: dict[str, _AtWork] = {}

    def look_up(self, event_id: str, content: object) -> Known:
        """Compare an id and its content with what was queued before."""
        if event_id not in self._contents:
            return Known.NEW
        return Known.RETRY if self._contents[event_id] == content else Known.CONFLICT

    def queue(self, number: int, event_id: str, content: object, spans: Iterable[Span]) -> None:
        """Note a queued event."""
        self._contents[event_id] = content
        self._queued[number] = _Queued(event_id=event_id, spans=tuple(spans))
        while len(self._contents) > self._max_remembered:
            self._contents.popitem(last=False)

    def drop(self, number: int) -> str | None:
        """Forget an event that will not be applied, so that its id can be used again; returns the id, if it has one."""
        queued = self._queued.pop(number, None)
        if queued is None:
            return None
        self._contents.pop(queued.event_id, None)
        return queued.event_id

    def chunk(self, numbers: Iterable[int]) -> ChunkEvents:
        """Apply events in the order given and go on by one chunk."""
        started: list[str] = []
        ended: list[str] = []
        for number in numbers:
            queued = self._queued.pop(number, None)
            if queued is None:
                continue
            started.append(queued.event_id)
            for span in queued.spans:
                if (replaced := self._at_work.get(span.track)) is not None:
                    ended.append(replaced.event_id)
                self._at_work[span.track] = _AtWork(queued.event_id, span.num_chunks)
        for track, at_work in tuple(self._at_work.items()):
            if at_work.chunks_left is not None:
                at_work.chunks_left -= 1
                if at_work.chunks_left == 0:
                    del self._at_work[track]
                    ended.append(at_work.event_id)
        active = tuple(dict.fromkeys(at_work.event_id for at_work in self._at_work.values()))
        completed = tuple(event_id for event_id in dict.fromkeys(ended) if event_id not in active)
        return ChunkEvents(started=tuple(started), active=active, completed=completed)
