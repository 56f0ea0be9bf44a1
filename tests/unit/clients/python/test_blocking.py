"""The blocking form: the same worlds, from a thread that has no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import av
import pytest

from clients.python import (
    Applied,
    ConnectFailed,
    EventDropped,
    Refused,
    SessionLost,
    Spectator,
    WatchedWorld,
    World,
    WorldClient,
    connect,
)
from clients.python.loop_thread import LoopThread
from server.wire.messages import ErrorMessage
from tests.support.client_standin_server import FIRST_FRAMES, FRAMES, HEIGHT, WIDTH, StandinServer
from tests.support.python_client import PROMPT, FakeTime

T = TypeVar("T")


@pytest.fixture
def drive(server: StandinServer, time: FakeTime) -> Callable[..., Any]:
    """Run a function with a world in a thread, since the server lives in the loop of the test."""

    async def run(act: Callable[[World], T], **options: Any) -> T:
        def whole() -> T:
            defaults = {"prompt": PROMPT, "image": "day", "clock": time.clock, "sleep": time.sleep}
            with connect(server.url, **(defaults | options)) as world:
                return act(world)

        return await asyncio.to_thread(whole)

    return run


def worlds_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "world"]


async def test_a_world_is_steered_and_its_chunks_are_taken(server: StandinServer, drive: Callable[..., Any]) -> None:
    def act(world: World) -> tuple[list[int], Applied]:
        receipt = world.hold("w")
        taken = []
        for chunk in world.chunks():
            taken.append(chunk.chunk_index)
            if len(taken) == 5:
                break
        assert receipt.is_settled
        return taken, receipt.wait()

    taken, applied = await drive(act)
    assert taken == list(range(5))
    assert applied.event_id == 0
    assert server.sent("playback"), "a viewer reports by default"
    assert len(server.sent("session.close")) == 1
    assert not worlds_threads()


async def test_every_way_of_steering_is_there(server: StandinServer, drive: Callable[..., Any]) -> None:
    pose = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

    def act(world: World) -> list[int]:
        receipts = [
            world.hold("w"),
            world.tap("d"),
            world.script([["w"], []]),
            world.trajectory([pose]),
            world.motion("target", translation=[0, 0, 1], rotation=[0, 0, 0, 1], transition_chunks=2),
            world.prompt("night"),
            world.send_event(prompt="day"),
            world.control("lingbot.camera_actions.v1", {"mode": "state", "held": ["s"]}),
        ]
        world.pause()
        world.unpause()
        world.reset(seed=4)
        assert world.run == 1
        return [receipt.event_id for receipt in receipts]

    assert await drive(act) == list(range(8))
    assert [len(server.sent(f"session.{kind}")) for kind in ("event", "pause", "unpause", "reset")] == [8, 1, 1, 1]


def test_the_blocking_form_has_every_call_of_the_other() -> None:
    def calls(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    # Who waits in the line can't ask for its place at the same time.
    assert calls(WorldClient) - calls(World) == {"queue_position"}
    assert calls(Spectator) <= calls(WatchedWorld)


async def test_frames_and_a_recording(server: StandinServer, drive: Callable[..., Any], tmp_path: Path) -> None:
    def act(world: World) -> tuple[int, ...]:
        with world.recording(tmp_path / "walk.mp4") as writer:
            for number, frame in enumerate(world.frames()):
                if number == FIRST_FRAMES:
                    assert (frame.chunk.chunk_index, frame.index) == (1, 0)
                    break
            assert writer.num_chunks == 2
        assert world.save_mp4(tmp_path / "more.mp4", num_chunks=1) == 1
        return frame.image.shape

    assert await drive(act) == (HEIGHT, WIDTH, 3)
    with av.open(tmp_path / "walk.mp4") as container:
        assert sum(1 for _ in container.decode(video=0)) == FIRST_FRAMES + FRAMES


async def test_a_lost_link_is_resumed(server: StandinServer, drive: Callable[..., Any]) -> None:
    server.behaviour.cut_before_chunks = {2}

    def act(world: World) -> tuple[list[int], int]:
        taken = [chunk.chunk_index for chunk, _ in zip(world.chunks(), range(4), strict=False)]
        return taken, world.session.epoch

    assert await drive(act) == ([0, 1, 2, 3], 2)


async def test_waiting_has_a_limit(server: StandinServer, drive: Callable[..., Any]) -> None:
    server.behaviour.max_chunks = 0

    def act(world: World) -> None:
        receipt = world.hold("w")
        assert not receipt.is_settled
        with pytest.raises(TimeoutError):
            receipt.wait(timeout_s=0)
        with pytest.raises(TimeoutError):
            world.next_chunk(timeout_s=0)
        world.reset()
        with pytest.raises(EventDropped, match="dropped: reset"):
            receipt.wait()

    await drive(act)


async def test_what_cannot_start_raises_and_leaves_no_thread(server: StandinServer, drive: Callable[..., Any]) -> None:
    server.behaviour.refuse_start = ErrorMessage(code="unknown_image", message="no image 'day'", field="image.name")
    with pytest.raises(Refused, match="unknown_image"):
        await drive(lambda world: None)
    with pytest.raises(ConnectFailed):
        await asyncio.to_thread(connect, "ws://127.0.0.1:1", prompt=PROMPT, image="day")
    assert not worlds_threads()


async def test_a_closed_world_says_so(drive: Callable[..., Any]) -> None:
    def act(world: World) -> None:
        world.next_chunk()
        world.close()
        world.close()
        with pytest.raises(SessionLost, match="the connection was closed"):
            world.hold("w")
        assert world.next_chunk() is None
        assert list(world.chunks()) == []

    await drive(act)


def test_an_interrupt_cancels_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("test")
    begun, cancelled = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupt(future: Future[None]) -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.run(wait_for_ever())
    assert cancelled.wait(60)
    thread.stop()
    thread.stop()
    assert not thread.is_running
