"""Places that are promised, and what becomes of the promise; in virtual time, with the whole server around."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.actor import SessionActor
from server.config import LimitsSection, RecordingSection, ServerSection, SessionSection
from server.errors import ErrorCode, SessionFailed, Unavailable
from server.health import not_ready_reason
from server.session import Phase
from server.session_opener import CheckedImage, NewSession
from server.session_table import SessionTable
from server.uploads import RawImage, StartImage, decode_image
from server.wire.messages import Pacing, StreamFormat
from tests.support.contract_client import LoopClient, LoopServer, loop_serving
from tests.support.contract_worker import ContractWorker, Fate
from tests.support.server_client import png
from tests.support.server_worker import model_info
from tests.support.virtual_time import now, run_virtual, settle
from worldmodel.messages import CloseSession, ImageSize, SessionClosed


def request() -> NewSession:
    raw = RawImage(size=ImageSize(width=2, height=2), pixels=bytes(12))
    return NewSession(
        prompt="a town",
        seed=0,
        image=CheckedImage(StartImage(file=png(2, 2), raw=raw, sha256="")),
        format=StreamFormat.RGB24,
        pacing=Pacing.FREE,
        first_event_id=0,
    )


def small_worker(capacity: int) -> ContractWorker:
    return ContractWorker(model_info(width=2, height=2, capacity_sessions=capacity))


async def create(server: LoopServer) -> SessionActor:
    """Create a session as a client that can't queue does."""
    async with asyncio.timeout(60):
        return await server.table.create(request(), owner=None)


# ---------------------------------------------------------------- the end


def test_a_disk_that_hangs_takes_its_share_of_the_end_once_for_all_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.sleep(3000)

    async def main() -> None:
        section = ServerSection(shutdown_s=30.0)
        recording = RecordingSection(folder=str(tmp_path))
        async with loop_serving(small_worker(3), server=section, recording=recording) as server:
            for _ in range(3):
                await create(server)
            ends_at = now() + section.last_s
        assert now() == pytest.approx(ends_at)

    monkeypatch.setattr("server.recording.Recordings.append", hang)
    run_virtual(main())
    assert "the end of recordings, which is lost: 3" in caplog.text


# ---------------------------------------------------------------- openings that fail


def test_a_session_that_neither_opened_nor_closed_keeps_its_place_until_the_worker_lets_go() -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            worker.request_fates.extend([Fate.UNKNOWN] * 4)
            with pytest.raises(SessionFailed) as failed:
                await create(server)
            assert failed.value.code is ErrorCode.WORKER_UNAVAILABLE
            assert (server.table.num_tombstones, server.table.num_resident) == (1, 1)
            assert "did not release" in (not_ready_reason(server.context) or "")
            with pytest.raises(Unavailable, match="all 1 places"):
                await create(server)
            queued = server.client()
            queued.start()
            await queued.expect("session.queued", position=1)
            began_at = now()
            await queued.expect("session.started")
            assert now() - began_at == pytest.approx(1 + 2 + 4, abs=0.5)
            assert (server.table.num_tombstones, server.table.num_resident) == (0, 1)
            assert len(worker.sessions) == 1

    run_virtual(main())


def test_a_session_that_neither_opened_nor_closed_is_gone_with_its_worker() -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            worker.request_fates.extend([Fate.UNKNOWN] * 2)
            with pytest.raises(SessionFailed):
                await create(server)
            worker.dies()
            await settle()
            assert (server.table.num_tombstones, server.table.num_resident) == (0, 0)

    run_virtual(main())


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


def test_what_a_client_sends_while_it_waits_is_bounded() -> None:
    async def main() -> None:
        async with loop_serving(small_worker(1), session=SessionSection(max_pending_events=2)) as server:
            owner = await server.started()
            queued = server.client()
            queued.start()
            await queued.expect("session.queued", position=1)
            for event_id in range(3):
                queued.send("session.event", event_id=event_id, prompt="rain")
            assert (await queued.expect("error", code="queue_full"))["event_id"] == 2
            owner.send("session.close")
            await queued.expect("event.queued", event_id=1)

    run_virtual(main())


def test_what_a_client_sends_while_it_waits_is_no_longer_than_one_message() -> None:
    async def main() -> None:
        async with loop_serving(small_worker(1), limits=LimitsSection(max_message_bytes=1500)) as server:
            owner = await server.started()
            queued = server.client()
            queued.start()
            await queued.expect("session.queued", position=1)
            for event_id in range(3):
                queued.send("session.event", event_id=event_id, prompt="rain" * 150)
            refused = await queued.expect("error", code="queue_full")
            assert refused["event_id"] == 2
            assert "limits.max_message_bytes" in refused["message"]
            owner.send("session.close")
            await queued.expect("event.queued", event_id=1)

    run_virtual(main())


def test_a_session_is_not_given_up_before_its_client_has_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with loop_serving(small_worker(1)) as server:
            open_session, told = SessionTable._open, list[str]()

            async def open_and_be_rushed(*arguments: Any) -> SessionActor:
                monkeypatch.setattr(SessionTable, "_open", open_session)
                actor = await open_session(*arguments)
                try:
                    told.append(f"{(await create(server)).session_id} started")
                except Unavailable as error:
                    told.append(error.message)
                return actor

            monkeypatch.setattr(SessionTable, "_open", open_and_be_rushed)
            client = await server.started()
            assert told == ["all 1 places of the worker are taken"]
            await client.chunks(2)
            await client.leave()
            assert (await create(server)).session.phase is Phase.ACTIVE, "left alone it makes room"

    run_virtual(main())


def test_pixels_are_not_kept_while_their_session_waits() -> None:
    """Only the file is; the worker gets the same pixels as without the wait."""

    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            owner, waiting = await server.started(), request()
            creating = asyncio.create_task(server.table.create(waiting, owner=None, on_position=lambda *_: None))
            await settle()
            assert (server.table.num_waiting, waiting.image.is_decoded) == (1, False)
            owner.send("session.close")
            await creating
            at_once = request()
            assert at_once.image.is_decoded
            assert worker.images[-1] == decode_image(at_once.image.file, limits=LimitsSection(), field="image").pixels
            assert not waiting.image.is_decoded

    run_virtual(main())


def test_pixels_that_need_not_wait_are_decoded_once() -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            await server.table.create(request(), owner=None)
            assert list(worker.images) == [bytes(12)]

    run_virtual(main())


def test_nobody_is_given_up_while_a_place_is_on_its_way() -> None:
    async def main() -> None:
        async with loop_serving(small_worker(2)) as server:
            leaving, parking = await server.started(), await server.started()
            parked = server.table.find(parking.ledger.session_id, None)
            queued = server.client()
            queued.start()
            await queued.expect("session.queued", position=1)
            leaving.send("session.close")
            await leaving.expect("session.state", state="closing")
            await parking.leave()
            await queued.expect("session.started")
            assert parked.session.phase is Phase.ACTIVE

    run_virtual(main())


def test_who_comes_back_while_its_session_is_being_given_up_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, may_close = small_worker(1), asyncio.Event()
    close = worker.close_session

    async def close_later(message: CloseSession) -> SessionClosed:
        await may_close.wait()
        return await close(message)

    async def main() -> None:
        async with loop_serving(worker) as server:
            parking = await server.started()
            parked = server.table.find(parking.ledger.session_id, None)
            await parking.leave()
            newcomer = server.client()
            newcomer.start()
            await newcomer.expect("session.queued", position=1)
            again = server.client(parking.ledger)
            again.resume()
            error = await again.expect("error")
            assert (error["code"], error["field"]) == ("session_evicted", "resume_token")
            assert parked.session.phase is Phase.CLOSING
            may_close.set()
            await newcomer.expect("session.started")

    monkeypatch.setattr(worker, "close_session", close_later)
    run_virtual(main())


# ---------------------------------------------------------------- room


@pytest.mark.parametrize(
    ("fates", "phase"),
    [
        ([Fate.DONE], Phase.CLOSED),
        ([Fate.REFUSED], Phase.FAILED),
        ([Fate.UNKNOWN, Fate.UNKNOWN], Phase.CLOSED),
    ],
    ids=["reset", "failed", "failed and not released"],
)
def test_a_session_that_lost_its_socket_during_a_reset_makes_room_after_it(fates: list[Fate], phase: Phase) -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            owner = await server.started()
            actor = server.table.find(owner.ledger.session_id, None)
            queued = server.client()
            queued.start()
            await queued.expect("session.queued", position=1)
            worker.request_fates.extend(fates)
            owner.send("session.reset")
            await owner.expect("session.state", state="resetting")
            await owner.leave()
            assert actor.session.phase is Phase.RESETTING
            left_at = now()
            await queued.expect("session.started")
            assert now() - left_at < 1.0, "it did not wait for the resume time"
            assert server.table.num_resident == 1
            assert actor.session.phase is phase, "it is given up only if that makes room"

    run_virtual(main())


async def failed_without_a_place(server: LoopServer) -> LoopClient:
    """Return the client of a session that failed, and whose place another may have."""
    client = await server.started()
    server.worker.request_fates.append(Fate.REFUSED)
    client.send("session.reset")
    await client.expect("session.state", state="failed")
    actor = server.table.find(client.ledger.session_id, None)
    await asyncio.sleep(1)
    assert not actor.holds_place
    return client


def test_the_reset_of_a_failed_session_has_a_parked_one_given_up() -> None:
    async def main() -> None:
        async with loop_serving(small_worker(1)) as server:
            client = await failed_without_a_place(server)
            parked = await create(server)
            client.send("session.reset")
            await client.expect("session.state", state="active", run=1)
            assert parked.session.phase is Phase.CLOSED
            assert server.table.num_resident == 1

    run_virtual(main())


def test_the_reset_of_a_failed_session_is_refused_when_nobody_can_be_given_up() -> None:
    async def main() -> None:
        async with loop_serving(small_worker(1)) as server:
            client = await failed_without_a_place(server)
            other = await server.started()
            client.send("session.reset")
            assert (await client.expect("error", code="capacity"))["fatal"]
            await other.chunks(1)

    run_virtual(main())


def test_the_reset_of_a_failed_session_is_refused_when_the_parked_one_is_not_released() -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            client = await failed_without_a_place(server)
            parked = await create(server)
            worker.request_fates.append(Fate.UNKNOWN)
            client.send("session.reset")
            await client.expect("error", code="capacity")
            assert parked.session.phase is Phase.CLEANUP_FAILED

    run_virtual(main())


def test_a_close_does_not_wait_for_the_place_that_a_reset_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        worker = small_worker(1)
        async with loop_serving(worker) as server:
            client = await failed_without_a_place(server)
            await create(server)
            closes = asyncio.Event()
            close_session = worker.close_session

            async def slow_close(message: CloseSession) -> SessionClosed:
                await closes.wait()
                return await close_session(message)

            monkeypatch.setattr(worker, "close_session", slow_close)
            client.send("session.reset")
            await settle()
            assert server.table.num_waiting == 1
            client.send("session.close")
            await client.expect("session.closed", reason="client")
            assert await client.over() == 1000
            assert server.table.num_waiting == 0
            closes.set()
            await settle()
            await asyncio.sleep(1)
            assert (server.table.num_resident, server.table.all()) == (0, ())

    run_virtual(main())
