"""The book of events that are not settled."""

from __future__ import annotations

import asyncio

import pytest

from clients.python import EventDropped
from clients.python.receipts import ReceiptBook
from server.wire.messages import AppliedEventHeader, ChunkHeader, DropReason


def chunk(run: int, *applied: int) -> ChunkHeader:
    events = [AppliedEventHeader(event_id=each, latent_frame=1, wait_ms=2.0) for each in applied]
    fields = {"session_id": "s", "epoch": 1, "num_frames": 1, "timescale": 12}
    return ChunkHeader(kind="media", run=run, chunk_index=4, applied=events, **fields)


async def test_a_chunk_of_the_next_run_settles_what_was_queued_in_an_earlier_one() -> None:
    book = ReceiptBook()
    _, of_old_run = book.open(0, 0, "old")
    unqueued, never_queued = book.open(1, 0, "sent when the link was lost")
    _, of_new_run = book.open(2, 1, "new")
    book.queued(0)
    book.queued(2)
    book.applied(chunk(0))
    assert not of_old_run.applied.done()
    book.applied(chunk(1))
    with pytest.raises(EventDropped) as dropped:
        await of_old_run
    assert (dropped.value.event_id, dropped.value.reason) == (0, DropReason.RESET)
    assert [future.done() for future in (unqueued, never_queued.applied, of_new_run.applied)] == [False] * 3
    assert book.unanswered() == ["sent when the link was lost"]
    book.applied(chunk(1, 2))
    assert (await of_new_run).run == 1
    await asyncio.sleep(0)
