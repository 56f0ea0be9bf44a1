"""Places that are promised, and what becomes of the promise; in virtual time, with the whole server around."""

from __future__ import annotations

import asyncio

import pytest

from server.actor import SessionActor, StartImage
from server.errors import ErrorCode, Unavailable
from server.session import Phase
from server.session_table import NewSession
from server.uploads import RawImage
from server.wire.messages import Pacing, StreamFormat
from tests.support.contract_client import LoopServer, loop_serving
from tests.support.contract_worker import ContractWorker, Fate
from tests.support.server_worker import model_info
from tests.support.virtual_time import run_virtual, settle
from worldmodel.messages import ImageSize

REQUEST = NewSession(
    prompt="a town",
    seed=0,
    image=StartImage(file=b"", raw=RawImage(size=ImageSize(width=2, height=2), pixels=bytes(12)), sha256=""),
    format=StreamFormat.RGB24,
    pacing=Pacing.FREE,
    first_event_id=0,
)


def small_worker(capacity: int) -> ContractWorker:
    return ContractWorker(model_info(width=2, height=2, capacity_sessions=capacity))


async def create(server: LoopServer) -> SessionActor:
    """Create a session as a client that can't queue does."""
    async with asyncio.timeout(60):
        return await server.table.create(REQUEST, owner=None)


# ---------------------------------------------------------------- promises


def test_who_cannot_queue_is_refused_when_the_place_is_not_released() -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            parked = await create(server)
            worker.request_fates.append(Fate.UNKNOWN)
            with pytest.raises(Unavailable, match="all 1 places") as refused:
                await create(server)
            assert refused.value.code is ErrorCode.CAPACITY
            assert server.table.num_waiting == 0
            assert parked.session.phase is Phase.CLEANUP_FAILED

    run_virtual(main())


def test_the_next_parked_session_makes_room_when_the_first_is_not_released() -> None:
    async def main() -> None:
        worker = small_worker(2)
        async with loop_serving(worker) as server:
            stuck = await create(server)
            await asyncio.sleep(1)
            other = await create(server)
            worker.request_fates.append(Fate.UNKNOWN)
            created = await create(server)
            assert {actor.session_id for actor in server.table.all()} == {stuck.session_id, created.session_id}
            assert (stuck.session.phase, other.session.phase) == (Phase.CLEANUP_FAILED, Phase.CLOSED)

    run_virtual(main())


def test_who_cannot_queue_is_refused_when_the_place_goes_to_one_who_came_first() -> None:
    async def main() -> None:
        async with loop_serving(small_worker(1)) as server:
            opening = asyncio.create_task(create(server))
            await settle()
            queued = server.client()
            queued.start()
            await queued.expect("session.queued", position=1)
            assert not opening.done()
            parked = await opening
            with pytest.raises(Unavailable, match="all 1 places"):
                await create(server)
            await queued.expect("session.started")
            assert parked.session.phase is Phase.CLOSED

    run_virtual(main())
