"""Time limits of requests, in virtual time over a real socket: what is missing is named, what came stops its clock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import closing

import pytest

from server.worker_link import Media, Notice, WorkerLink
from tests.support.virtual_time import now, run_virtual, settle
from worldmodel.errors import WorkerUnavailable
from worldmodel.framing import send_frame
from worldmodel.messages import (
    ChunkMedia,
    MediaFormat,
    MediaPart,
    MemoryStats,
    RequestId,
    SessionId,
    StageTimings,
    Tick,
    TickCommitted,
)

TICK_S = 10.0
SESSION = SessionId("s-1")


def tick(index: int) -> Tick:
    return Tick(request_id=RequestId(f"r-{index}"), session_id=SESSION, chunk_index=index)


class Linked:
    """A link whose worker is this end of the socket, and the reasons it was lost for."""

    def __init__(self, link: WorkerLink, worker: socket.socket, lost: list[str]) -> None:
        self.link, self.worker, self.lost = link, worker, lost

    def tick(self, index: int) -> asyncio.Future[Media]:
        return self.link.request(tick(index), timeout_s=TICK_S)[1]

    async def commit(self, index: int) -> None:
        committed = TickCommitted(
            request_id=tick(index).request_id,
            session_id=SESSION,
            chunk_index=index,
            applied_event_ids=(),
            applied=(),
            num_media_frames=1,
            pose=None,
            timings=StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0),
            memory=MemoryStats(sessions=1, total_pages=10, free_pages=9),
        )
        send_frame(self.worker, committed)
        await settle()

    async def media(self, index: int) -> None:
        part = MediaPart(format=MediaFormat.RGB24, shape=(1, 2, 4, 3), num_bytes=24)
        chunk = ChunkMedia(
            request_id=tick(index).request_id,
            session_id=SESSION,
            chunk_index=index,
            num_media_frames=1,
            parts=(part,),
            transfer_ms=0.1,
        )
        send_frame(self.worker, chunk, [memoryview(bytes(24))])
        await settle()


def linked(scenario: Callable[[Linked], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        lost: list[str] = []
        notices: list[Notice] = []
        with closing(theirs):
            link = WorkerLink(on_notice=notices.append, on_memory=lambda memory: None, on_lost=lost.append)
            await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
            await scenario(Linked(link, theirs, lost))
            link.fail("the test is over")
            await settle()

    run_virtual(run())


def test_media_that_does_not_come_costs_the_link_and_names_the_tick() -> None:
    async def scenario(worker: Linked) -> None:
        media = worker.tick(0)
        await asyncio.sleep(TICK_S - 1)
        committed_at_s = now()
        await worker.commit(0)
        with pytest.raises(WorkerUnavailable, match=r"no media to Tick r-0 of session s-1 within 10 s"):
            await media
        assert now() == committed_at_s + TICK_S, "the time of the media runs from the commit"
        assert worker.lost == ["the worker gave no media to a request (Tick) within 10 s"]
        with pytest.raises(WorkerUnavailable, match=r"no media to a request \(Tick\)"):
            worker.tick(1)

    linked(scenario)


def test_media_that_comes_in_time_stops_its_clock_and_that_of_no_other() -> None:
    async def scenario(worker: Linked) -> None:
        first, second = worker.tick(0), worker.tick(1)
        await worker.commit(0)
        await asyncio.sleep(4)
        await worker.commit(1)
        second_at_s = now()
        await asyncio.sleep(4)
        await worker.media(0)
        assert (await first)[0].chunk_index == 0
        with pytest.raises(WorkerUnavailable, match="no media to Tick r-1"):
            await second
        assert now() == second_at_s + TICK_S
        assert len(worker.lost) == 1

    linked(scenario)


def test_a_tick_that_is_answered_in_time_is_never_given_up() -> None:
    async def scenario(worker: Linked) -> None:
        for index in range(3):
            media = worker.tick(index)
            await asyncio.sleep(TICK_S - 1)
            await worker.commit(index)
            await asyncio.sleep(TICK_S - 1)
            await worker.media(index)
            assert (await media)[0].chunk_index == index
        await asyncio.sleep(10 * TICK_S)
        assert worker.lost == []

    linked(scenario)


def test_an_answer_that_does_not_come_is_named_to_who_asked_and_fails_what_waits_behind_it() -> None:
    async def scenario(worker: Linked) -> None:
        started_s = now()
        asked, behind = [worker.tick(index) for index in range(2)]
        with pytest.raises(WorkerUnavailable, match=r"no answer to Tick r-0 of session s-1 within 10 s"):
            await asked
        with pytest.raises(WorkerUnavailable, match=r"^the worker gave no answer to a request \(Tick\) within 10 s$"):
            await behind
        assert worker.lost == ["the worker gave no answer to a request (Tick) within 10 s"]
        assert now() == started_s + TICK_S

    linked(scenario)
