"""Order of a session's events: which are accepted, which wait, which floor they leave behind.

ids:   ... applied or dropped ...  | floor |  waiting (any order in, ascending out)  |  not used yet
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from server.errors import ErrorCode, EventRefused
from worldmodel.messages import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingEvent:
    """An accepted event that waits for a chunk boundary. `accepted_at` is the session's clock, seconds."""

    event_id: int
    prompt: str | None
    controls: tuple[Control, ...]
    accepted_at: float


class EventQueue:
    """Accept events once each and hand them out in ascending order. The floor outlives resets."""

    def __init__(self, *, max_pending: int, first_event_id: int) -> None:
        self._max_pending = max_pending
        self._floor = first_event_id - 1
        self._pending: dict[int, PendingEvent] = {}
        self._remembered: deque[int] = deque(maxlen=max_pending)

    @property
    def floor(self) -> int:
        """Largest id that can no longer be used."""
        return self._floor

    @property
    def pending_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._pending))

    def is_remembered(self, event_id: int) -> bool:
        return event_id in self._remembered

    def check_duplicate(self, event_id: int) -> None:
        """Refuse an id that was accepted before; clients may send events again after a resume, without effect."""
        if event_id in self._remembered or event_id in self._pending:
            raise EventRefused(
                ErrorCode.DUPLICATE, f"event {event_id} was accepted before", field="event_id", event_id=event_id
            )

    def accept(self, event: PendingEvent) -> None:
        """Queue an event. Raises `EventRefused`; then nothing has changed."""
        event_id = event.event_id
        self.check_duplicate(event_id)
        if event_id <= self._floor:
            raise EventRefused(
                ErrorCode.STALE,
                f"event {event_id} is not above {self._floor}, the last id in use",
                field="event_id",
                event_id=event_id,
            )
        if len(self._pending) >= self._max_pending:
            raise EventRefused(
                ErrorCode.QUEUE_FULL,
                f"{self._max_pending} events are waiting (session.max_pending_events)",
                event_id=event_id,
            )
        self._check_content(event)
        self._pending[event_id] = event
        self._remembered.append(event_id)

    def take(self) -> tuple[PendingEvent, ...]:
        """Remove and return all waiting events in ascending order; the floor rises to the last of them."""
        taken = tuple(self._pending[event_id] for event_id in sorted(self._pending))
        self._pending.clear()
        if taken:
            self._floor = max(self._floor, taken[-1].event_id)
        return taken

    def discard(self) -> tuple[int, ...]:
        """Drop all waiting events and return their ids; the floor rises, so none can come back."""
        return tuple(event.event_id for event in self.take())

    def _check_content(self, event: PendingEvent) -> None:
        if event.prompt is None and not event.controls:
            raise EventRefused(
                ErrorCode.EMPTY_EVENT,
                f"event {event.event_id} has neither a prompt nor controls",
                event_id=event.event_id,
            )
        tracks: set[str] = set()
        for index, control in enumerate(event.controls):
            if control.track in tracks:
                raise EventRefused(
                    ErrorCode.DUPLICATE_TRACK,
                    f"event {event.event_id} has two controls for track {control.track!r}",
                    field=f"controls[{index}].track",
                    event_id=event.event_id,
                )
            tracks.add(control.track)
