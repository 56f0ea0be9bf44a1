"""What a reset keeps and what it begins anew, as the worker sees it; in virtual time, with the whole server around."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from server.session import Phase
from tests.support.contract_client import loop_serving
from tests.support.contract_worker import ContractWorker, Fate
from tests.support.server_client import image_field, png
from tests.support.virtual_time import run_virtual, settle
from worldmodel.messages import OpenSession, ResetSession, SessionOpened, SessionReset


@dataclass
class WatchedWorker(ContractWorker):
    """Remembers (kind, prompt, seed, width of the image or None) of everything that begins a run."""

    begun: list[tuple[str, str, int, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened:
        assert message.image is not None
        assert len(image) == message.image.width * message.image.height * 3
        self.begun.append(("open", message.prompt, message.seed, message.image.width))
        return await super().open_session(message, image)

    async def reset_session(self, message: ResetSession, image: bytes | None) -> SessionReset:
        width = None if message.image is None else message.image.width
        assert len(image or b"") == (0 if message.image is None else message.image.width * message.image.height * 3)
        self.begun.append(("reset", message.prompt, message.seed, width))
        return await super().reset_session(message, image)


def test_a_reset_clears_the_prompt_and_keeps_seed_and_image_unless_they_are_given() -> None:
    async def main() -> None:
        worker = WatchedWorker()
        async with loop_serving(worker) as server:
            client = await server.started(prompt="a town", seed=7, image=image_field(png(4, 4)))
            client.send("session.reset")
            await client.expect("session.state", state="active", run=1)
            client.send("session.reset", prompt="night", seed=8, image=image_field(png(6, 4)))
            await client.expect("session.state", state="active", run=2)
            client.send("session.reset")
            await client.expect("session.state", state="active", run=3)
            assert worker.begun == [
                ("open", "a town", 7, 4),
                ("reset", "", 7, None),
                ("reset", "night", 8, 6),
                ("reset", "", 8, None),
            ]

    run_virtual(main())


def test_a_run_that_begins_from_nothing_gets_the_last_image() -> None:
    async def main() -> None:
        worker = WatchedWorker()
        async with loop_serving(worker) as server:
            client = await server.started(prompt="", seed=1, image=image_field(png(4, 4)))
            client.send("session.reset", image=image_field(png(6, 4)))
            await client.expect("session.state", state="active", run=1)
            worker.tick_fates.append(Fate.UNKNOWN)
            await client.expect("session.state", state="failed")
            client.send("session.reset")
            await client.expect("session.state", state="active", run=2)
            assert worker.begun[-1] == ("open", "", 1, 6)

    run_virtual(main())


@pytest.mark.parametrize("release", [Fate.DONE, Fate.UNKNOWN])
def test_state_of_which_nothing_is_known_is_closed_and_opened_and_never_reset(release: Fate) -> None:
    """Whether or not it was released when the reset before had failed."""

    async def main() -> None:
        worker = WatchedWorker()
        async with loop_serving(worker) as server:
            client = await server.started()
            worker.request_fates.extend([Fate.UNKNOWN, release])
            client.send("session.reset")
            await client.expect("session.state", state="failed")
            await asyncio.sleep(1.0)
            (actor,) = server.table.all()
            assert actor.holds_place == (release is Fate.UNKNOWN)
            client.send("session.reset")
            await client.expect("session.state", state="active", run=1)
            assert [kind for kind, *_ in worker.begun] == ["open", "reset", "open"]
            client.send("session.reset")
            await client.expect("session.state", state="active", run=2)
            assert worker.begun[-1][0] == "reset", "what is known again is reset again"
            assert worker.violations == []

    run_virtual(main())


def test_the_events_of_a_chunk_whose_pictures_die_with_the_worker_are_answered_before_the_socket_is_closed() -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker(tick_s=0.1, media_s=1.0)) as server:
            client = await server.started()
            await client.chunks(1)
            client.send("session.pause")
            await client.expect("session.state", state="paused")
            await asyncio.sleep(5)
            (actor,) = server.table.all()
            num_chunks = actor.session.next_chunk_index
            event_id = client.event()
            client.send("session.unpause")
            await asyncio.sleep(0.15)
            assert actor.session.next_chunk_index == num_chunks + 1, "committed, and its pictures are on their way"
            server.worker.dies()
            assert await client.over() == 1012
            assert (await client.expect("event.dropped", event_id=event_id))["reason"] == "failed"

    run_virtual(main())


@pytest.mark.parametrize(("fate", "phase"), [(Fate.ROLLED_BACK, Phase.FAILED), (Fate.REFUSED, Phase.ACTIVE)])
def test_the_events_of_a_tick_that_came_to_nothing_are_answered(fate: Fate, phase: Phase) -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker()) as server:
            client = await server.started()
            await client.chunks(1)
            client.send("session.pause")
            await client.expect("session.state", state="paused")
            await asyncio.sleep(1)
            server.worker.tick_fates.append(fate)
            event_id = client.event()
            client.send("session.unpause")
            assert (await client.expect("event.dropped", event_id=event_id))["reason"] == "failed"
            (actor,) = server.table.all()
            assert actor.session.phase is phase

    run_virtual(main())


def test_the_events_of_a_tick_that_fails_while_a_reset_waits_for_it_are_answered() -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker()) as server:
            client = await server.started()
            client.send("session.pause")
            await client.expect("session.state", state="paused")
            await asyncio.sleep(1)
            server.worker.tick_fates.append(Fate.ROLLED_BACK)
            event_id = client.event()
            client.send("session.unpause")
            (actor,) = server.table.all()
            await client.until(lambda: actor.session.in_flight is not None)
            client.send("session.reset")
            assert (await client.expect("event.dropped", event_id=event_id))["reason"] == "failed"
            await client.expect("session.state", state="active", run=1)

    run_virtual(main())


def test_events_that_wait_when_a_reset_comes_are_dropped_for_it() -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker()) as server:
            client = await server.started()
            await client.chunks(1)
            client.send("session.pause")
            await client.expect("session.state", state="paused")
            event_id = client.event()
            await client.expect("event.queued", event_id=event_id)
            client.send("session.reset")
            assert (await client.expect("event.dropped", event_id=event_id))["reason"] == "reset"

    run_virtual(main())


def test_a_close_that_is_asked_for_again_is_the_same_close() -> None:
    async def main() -> None:
        async with loop_serving(ContractWorker()) as server:
            client = await server.started()
            (actor,) = server.table.all()
            closing = actor.begin_close("deleted")
            await settle(1)
            assert actor.begin_close("again") is closing
            await closing
            assert actor.begin_close("and again") is closing
            assert (await client.expect("session.closed"))["reason"] == "deleted"

    run_virtual(main())
