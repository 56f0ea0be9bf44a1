"""What became of each event: queued, then applied or dropped. No I/O; futures of the running loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass

from clients.python.errors import EventDropped, Refused, WorldClientError
from server.wire.messages import ChunkHeader, DropReason, ErrorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Where an event took effect: it acts from `latent_frame` (0-based) of the chunk on."""

    event_id: int
    run: int
    chunk_index: int
    latent_frame: int
    wait_ms: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Receipt:
    """One accepted event. `applied` resolves when the chunk that shows it has arrived, or raises `EventDropped`.

    `await receipt` waits for it, and giving up waiting leaves it as it is. Chunks must be taken meanwhile: who takes
    none stops the world, and the event with it.
    """

    event_id: int
    applied: asyncio.Future[Applied]

    def __await__(self) -> Generator[None, None, Applied]:
        return asyncio.shield(self.applied).__await__()


@dataclass(slots=True, eq=False)
class _Open:
    """An event that is not settled. `text` is kept until the server has queued it, to be sent again after a resume."""

    run: int
    text: str | None
    queued: asyncio.Future[None]
    applied: asyncio.Future[Applied]


class ReceiptBook:
    """All events of a session that are not settled yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def open(self, event_id: int, run: int, text: str) -> tuple[asyncio.Future[None], Receipt]:
        """Enter an event; the future resolves when the server has queued it, or raises `Refused`."""
        loop = asyncio.get_running_loop()
        queued: asyncio.Future[None] = loop.create_future()
        applied: asyncio.Future[Applied] = loop.create_future()
        for future in (queued, applied):
            future.add_done_callback(_mark_retrieved)
        self._open[event_id] = _Open(run=run, text=text, queued=queued, applied=applied)
        return queued, Receipt(event_id=event_id, applied=applied)

    def unanswered(self) -> list[str]:
        """Return the messages of events that were not queued yet, in ascending order of their ids."""
        return [entry.text for _, entry in sorted(self._open.items()) if entry.text is not None]

    def queued(self, event_id: int) -> None:
        entry = self._open.get(event_id)
        if entry is not None:
            entry.text = None
            _settle(entry.queued, lambda: entry.queued.set_result(None))

    def refused(self, error: ErrorMessage) -> bool:
        """Settle the event that an error is about; `duplicate` means that it had arrived. False if it is not ours."""
        if error.event_id is None or error.event_id not in self._open:
            return False
        if error.code == "duplicate":
            self.queued(error.event_id)
        else:
            self._fail(error.event_id, Refused(error))
        return True

    def refused_unread(self, error: ErrorMessage) -> bool:
        """Settle the event that the server could not read, not even its id. Answers come in the order of the events."""
        unanswered = [event_id for event_id, entry in self._open.items() if entry.text is not None]
        if unanswered:
            self._fail(min(unanswered), Refused(error))
        return bool(unanswered)

    def applied(self, header: ChunkHeader) -> None:
        """Settle the events of a chunk, and those of earlier runs whose drop was never heard."""
        if header.chunk_index is None:
            return
        for event in header.applied:
            self.queued(event.event_id)
            entry = self._open.pop(event.event_id, None)
            if entry is not None and not entry.applied.done():
                entry.applied.set_result(
                    Applied(
                        event_id=event.event_id,
                        run=header.run,
                        chunk_index=header.chunk_index,
                        latent_frame=event.latent_frame,
                        wait_ms=event.wait_ms,
                    )
                )
        for event_id, entry in list(self._open.items()):
            if entry.run < header.run and entry.text is None:
                self.dropped(event_id, DropReason.RESET)

    def dropped(self, event_id: int, reason: DropReason | None) -> None:
        if event_id in self._open:
            self._fail(event_id, EventDropped(event_id, reason))

    def drop_all(self, reason: DropReason | None, *, queued_only: bool = False) -> None:
        """Settle every event; with `queued_only` those not queued stay, to be sent again."""
        for event_id, entry in list(self._open.items()):
            if entry.text is None or not queued_only:
                self.dropped(event_id, reason)

    def _fail(self, event_id: int, error: WorldClientError) -> None:
        entry = self._open.pop(event_id)
        _settle(entry.queued, lambda: entry.queued.set_exception(error))
        _settle(entry.applied, lambda: entry.applied.set_exception(error))


def _settle(future: asyncio.Future[None] | asyncio.Future[Applied], act: Callable[[], None]) -> None:
    """Act unless the future is done, for example cancelled by whoever waited for it."""
    if not future.done():
        act()


def _mark_retrieved(future: asyncio.Future[None] | asyncio.Future[Applied]) -> None:
    """Read the exception, so that a receipt nobody looks at is not reported as an unhandled error."""
    if not future.cancelled():
        future.exception()
