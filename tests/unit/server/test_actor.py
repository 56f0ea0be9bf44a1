"""Operations of a session that meet bugs, or each other; in virtual time, with the whole server around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.config import RecordingSection
from server.encoding import ChunkEncoder
from server.errors import BadInput
from server.recording import SessionRecording
from server.session import Phase
from tests.support.contract_client import loop_serving
from tests.support.contract_worker import ContractWorker, Fate
from tests.support.server_worker import model_info
from tests.support.virtual_time import now, run_virtual, settle


def breaking_once(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Raise what nobody expects in the first call."""
    calls = 0

    async def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("a bug")
        return await method(*args, **options)

    return call


# ---------------------------------------------------------------- close


@pytest.mark.parametrize(
    ("owner", "method"),
    [(ContractWorker, "close_session"), (ChunkEncoder, "drain"), (SessionRecording, "close")],
    ids=["worker", "encoder", "recording"],
)
def test_a_bug_in_a_close_leaves_a_session_that_can_be_closed_again(
    owner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=1))
        async with loop_serving(worker, recording=RecordingSection(folder=str(tmp_path))) as server:
            client = await server.started()
            await client.chunks(1)
            monkeypatch.setattr(owner, method, breaking_once(getattr(owner, method)))
            client.send("session.close")
            assert (await client.expect("error"))["code"] == "cleanup_failed"
            (actor,) = server.table.all()
            assert actor.session.phase is Phase.CLEANUP_FAILED
            assert "KeyError: 'a bug'" in caplog.text
            assert actor.holds_place is (actor.session_id in worker.sessions), "what the worker let go is free"
            client.send("session.close")
            await client.expect("session.closed", reason="client")
            assert await client.over() == 1000
            assert server.table.all() == ()
            assert (server.table.num_resident, worker.sessions) == (0, {})
            await server.started()

    run_virtual(main())


def test_a_session_whose_memory_cannot_be_freed_is_gone_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with loop_serving() as server:
            client = await server.started()
            monkeypatch.setattr(ChunkEncoder, "close_in_pool", breaking_once(ChunkEncoder.close_in_pool))
            client.send("session.close")
            await client.expect("session.closed")
            await settle()
            assert server.table.all() == ()
            assert server.table.has_ended(client.ledger.session_id, None)
            assert "KeyError: 'a bug'" in caplog.text

    run_virtual(main())


# ---------------------------------------------------------------- sockets


def test_what_an_old_socket_took_is_not_counted_for_the_new_one() -> None:
    async def main() -> None:
        async with loop_serving() as server:
            client = await server.started()
            await client.chunks(1)
            (actor,) = server.table.all()
            (ready, *_) = actor.session.resume(last_chunk_index=-1, run=0, now=now()).chunks
            later = replace(ready.chunk, chunk_index=10**6)
            actor.chunk_sent(actor.session.epoch - 1, later)
            with pytest.raises(BadInput, match="the last chunk sent is"):
                actor.session.report_playback(
                    epoch=actor.session.epoch, run=0, chunk_index=10**6, buffered_ms=0.0, now=now()
                )

    run_virtual(main())


# ---------------------------------------------------------------- tombstones


def test_a_session_that_was_not_released_is_neither_resumed_nor_watched() -> None:
    async def main() -> None:
        worker = ContractWorker(model_info(width=2, height=2, capacity_sessions=1))
        async with loop_serving(worker) as server:
            owner = await server.started()
            await owner.chunks(1)
            actor = server.table.find(owner.ledger.session_id, None)
            worker.request_fates.append(Fate.UNKNOWN)
            owner.send("session.close")
            await owner.expect("session.state", state="cleanup_failed")
            back, spectator = server.client(owner.ledger), server.client()
            back.resume()
            error = await back.expect("error")
            assert (error["code"], error["field"], error["fatal"]) == ("bad_state", "resume_token", False)
            spectator.send("session.watch", protocol=1, watch_token=owner.ledger.watch_token)
            assert (await spectator.expect("error"))["code"] == "bad_state"
            assert (actor.session.epoch, actor.num_watchers) == (1, 0)
            await owner.leave()
            back.resume()
            await back.until(lambda: sum(it["type"] == "error" for it in back.messages) == 2)
            assert actor.session.phase is Phase.CLEANUP_FAILED
            await actor.begin_close("deleted")
            assert server.table.all() == ()
            await server.started()

    run_virtual(main())
