"""The Python client against a stand-in server: steering, pacing, receipts, resume, failures, files.

No real time passes: the clock is a fake one.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from clients.examples import write_mp4
from clients.python import (
    Applied,
    BadServerMessage,
    Chunk,
    ConnectFailed,
    EventDropped,
    LinkLost,
    Mp4Writer,
    Receipt,
    Refused,
    SessionFailed,
    SessionLost,
    WorldClient,
)
from clients.python.buffer import ChunkBuffer, VirtualViewer
from clients.python.link import world_url
from clients.python.mp4 import retime
from server.wire.messages import DropReason, ErrorMessage
from server.wire.messages import EventDropped as EventDroppedMessage
from tests.support.client_standin_server import FIRST_FRAMES, FPS, FRAMES, HEIGHT, WIDTH, StandinServer, standin_server

PROMPT = "a small town, day"


class FakeTime:
    """A clock that only moves when someone sleeps; sleeping takes no time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[StandinServer]:
    async with standin_server() as standin:
        yield standin


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def connect(server: StandinServer, time: FakeTime) -> Any:
    """Make a client of the stand-in; keyword arguments replace the defaults."""

    def make(**options: Any) -> WorldClient:
        defaults = {"prompt": PROMPT, "image": "day", "clock": time.clock, "sleep": time.sleep}
        return WorldClient(server.url, **(defaults | options))

    return make


async def take(world: WorldClient, count: int) -> list[Chunk]:
    taken: list[Chunk] = []
    if count:
        async for chunk in world.chunks():
            taken.append(chunk)
            if len(taken) == count:
                break
    return taken


def indices(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.run, chunk.chunk_index) for chunk in chunks]


# ---------------------------------------------------------------- starting


async def test_start_message_says_what_was_asked(server: StandinServer, connect: Any) -> None:
    async with connect(seed=7, size="64x48", format="jpeg", pacing="clock", event_base=40, token="t-1") as world:
        assert world.session.model == "standin"
        await world.hold()
    assert server.sent("session.start") == [
        {
            "type": "session.start",
            "protocol": 1,
            "prompt": PROMPT,
            "image": {"name": "day"},
            "seed": 7,
            "size": "64x48",
            "format": "jpeg",
            "pacing": "clock",
            "event_base": 40,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer t-1"
    assert server.sent("session.event")[0]["event_id"] == 40
    assert len(server.sent("session.close")) == 1


async def test_an_image_may_be_bytes_or_a_file(server: StandinServer, connect: Any, tmp_path: Path) -> None:
    (tmp_path / "start.png").write_bytes(b"\x89PNG")
    async with connect(image=b"\x89PNG"):
        pass
    async with connect(image=tmp_path / "start.png"):
        pass
    assert [start["image"] for start in server.sent("session.start")] == [{"base64": "iVBORw=="}] * 2


async def test_waiting_in_line_is_shown(server: StandinServer, connect: Any) -> None:
    server.behaviour.queue_positions = (2, 1)
    async with connect() as world:
        assert world.queue_position is None
        assert len(await take(world, 1)) == 1


async def test_a_refused_start_is_a_typed_error(server: StandinServer, connect: Any) -> None:
    server.behaviour.refuse_start = ErrorMessage(code="unknown_image", message="no image 'day'", field="image.name")
    with pytest.raises(Refused, match="unknown_image: no image 'day'") as caught:
        async with connect():
            pass
    assert (caught.value.code, caught.value.field, caught.value.retryable) == ("unknown_image", "image.name", False)


async def test_no_server_is_connect_failed() -> None:
    with pytest.raises(ConnectFailed, match=r"cannot connect to ws://127\.0\.0\.1:1"):
        async with WorldClient("ws://127.0.0.1:1", prompt=PROMPT, image="day"):
            pass


async def test_bad_arguments_are_refused_before_anything_is_sent(server: StandinServer, connect: Any) -> None:
    with pytest.raises(ValueError, match="size: String should match"):
        async with connect(size="big"):
            pass
    with pytest.raises(ValueError, match="format: "):
        async with connect(format="avi"):
            pass
    assert server.received == []


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("ws://h:8000", "ws://h:8000/v1/world"),
        ("http://h/", "ws://h/v1/world"),
        ("https://h/v1/world", "wss://h/v1/world"),
        ("wss://h/proxied/world?x=1", "wss://h/proxied/world?x=1"),
    ],
)
def test_addresses_are_completed(url: str, want: str) -> None:
    assert world_url(url) == want


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected ws://"):
        world_url("ftp://h")


# ---------------------------------------------------------------- steering


async def test_steering_sends_full_snapshots(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        await world.hold("w")
        await world.tap("d", "w")
        await world.hold()
        await world.script([["w"], []])
        await world.motion("velocity", translation=[0, 0, 0.1], rotation=[0, 0, 0, 1])
        await world.trajectory([[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]], intrinsics=[[1, 1, 0, 0]])
        await world.prompt("night")
    events = server.sent("session.event")
    assert [event["event_id"] for event in events] == list(range(7))
    assert [event["controls"][0]["data"] for event in events[:5]] == [
        {"mode": "state", "held": ["w"]},
        {"mode": "state", "transitions": [{"actions": ["w", "d"]}, {"actions": ["w"]}]},
        {"mode": "state", "held": []},
        {"mode": "script", "frames": [["w"], []]},
        {"mode": "velocity", "translation": [0, 0, 0.1], "rotation": [0, 0, 0, 1], "transition_chunks": 1},
    ]
    assert set(events[5]["controls"][0]["data"]) == {"poses", "intrinsics"}
    assert {control["track"] for event in events[:6] for control in event["controls"]} == {"camera"}
    assert events[6] == {"type": "session.event", "event_id": 6, "prompt": "night"}


async def test_a_receipt_tells_where_its_event_acts(server: StandinServer, connect: Any) -> None:
    server.behaviour.max_chunks = 2
    async with connect() as world:
        await take(world, 2)
        receipt = await world.hold("w")
        assert isinstance(receipt, Receipt)
        assert not receipt.applied.done()
        server.behaviour.max_chunks = None
        server.wake()
        assert await receipt.applied == Applied(event_id=0, run=0, chunk_index=2, latent_frame=0, wait_ms=1.0)
        (chunk,) = await take(world, 1)
    assert [event.event_id for event in chunk.header.applied] == [0]


async def test_a_refused_event_raises_and_the_next_one_works(server: StandinServer, connect: Any) -> None:
    server.behaviour.refuse_events = {
        0: ErrorMessage(code="bad_control", message="held[0]: got 'q'", field="controls[0].data.held[0]", event_id=0)
    }
    async with connect() as world:
        with pytest.raises(Refused, match="bad_control") as caught:
            await world.hold("q")
        assert (caught.value.event_id, caught.value.field) == (0, "controls[0].data.held[0]")
        await world.tap("d")
    assert server.sent("session.event")[1]["controls"][0]["data"]["transitions"][1] == {"actions": []}


async def test_messages_that_json_or_the_limit_forbid_are_not_sent(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        with pytest.raises(ValueError, match="JSON compliant"):
            await world.motion("velocity", translation=[float("nan"), 0, 0], rotation=[0, 0, 0, 1])
        with pytest.raises(ValueError, match="the server takes 100000"):
            await world.prompt("x" * 100_001)
    assert server.sent("session.event") == []


async def test_dropped_events_raise_with_the_reason(server: StandinServer, connect: Any) -> None:
    server.behaviour.max_chunks = 0
    async with connect() as world:
        receipt = await world.hold("w")
        await server.say(EventDroppedMessage(event_id=receipt.event_id, reason=DropReason.FAILED))
        with pytest.raises(EventDropped, match="dropped: failed") as caught:
            await receipt.applied
        unseen = await world.hold("s")
    assert caught.value.reason is DropReason.FAILED
    with pytest.raises(EventDropped, match="dropped: closed"):
        await unseen.applied


async def test_reset_begins_a_new_run_and_drops_what_waited(server: StandinServer, connect: Any) -> None:
    server.behaviour.max_chunks = 2
    async with connect() as world:
        await take(world, 2)
        receipt = await world.hold("w")
        await world.reset(prompt="snow", image="snow", seed=3)
        assert world.run == 1
        with pytest.raises(EventDropped, match="dropped: reset"):
            await receipt.applied
        await world.tap("d")
        assert indices(await take(world, 2)) == [(1, 0), (1, 1)]
    assert server.sent("session.reset") == [
        {"type": "session.reset", "prompt": "snow", "image": {"name": "snow"}, "seed": 3}
    ]
    transitions = server.sent("session.event")[1]["controls"][0]["data"]["transitions"]
    assert transitions == [{"actions": ["d"]}, {"actions": []}]


async def test_a_chunk_of_the_old_run_may_come_after_the_reset(server: StandinServer, connect: Any) -> None:
    server.behaviour.max_chunks = 2
    server.behaviour.late_chunks = 1
    async with connect() as world:
        await take(world, 2)
        await world.reset()
        assert indices(await take(world, 3)) == [(0, 2), (1, 0), (1, 1)]


async def test_pause_stops_and_unpause_goes_on(server: StandinServer, connect: Any) -> None:
    async with connect(report_playback=False) as world:
        chunks = await take(world, 2)
        await world.pause()
        await world.report_shown(chunks[1])
        await world.hold("w")  # answered, so the report has arrived
        assert server.world.made == 2
        await world.unpause()
        assert indices(await take(world, 1)) == [(0, 2)]


# ---------------------------------------------------------------- watching


async def test_playback_is_reported_at_media_rate(server: StandinServer, connect: Any, time: FakeTime) -> None:
    async with connect() as world:
        chunks = await take(world, 5)
        await server.until(lambda: len(server.sent("playback")) == 5)
    assert indices(chunks) == [(0, index) for index in range(5)]
    reports = server.sent("playback")
    assert [(report["epoch"], report["run"], report["chunk_index"]) for report in reports] == [
        (1, 0, index) for index in range(5)
    ]
    assert time.now_s - 100.0 == pytest.approx((FIRST_FRAMES + 3 * FRAMES) / FPS)
    assert all(report["buffered_ms"] >= 1000 * FRAMES / FPS - 1e-6 for report in reports)


async def test_without_reports_there_are_two_chunks_until_the_caller_reports(
    server: StandinServer, connect: Any
) -> None:
    async with connect(report_playback=False) as world:
        chunks = await take(world, 2)
        await world.hold("w")  # answered, so everything that was sent has arrived
        assert server.world.made == 2
        await world.report_shown(chunks[0], buffered_s=0.5)
        assert indices(await take(world, 1)) == [(0, 2)]
    assert [report["buffered_ms"] for report in server.sent("playback")] == [500.0]


async def test_a_client_that_takes_nothing_stops_the_reader_but_not_the_answers(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 12
    async with connect(pacing="free", max_buffered_chunks=2) as world:
        await server.until(lambda: server.world.made == 12)
        receipt = await world.hold("w")
        assert indices(await take(world, 12)) == [(0, index) for index in range(12)]
    with pytest.raises(EventDropped):
        await receipt.applied


@pytest.mark.parametrize("format", ["fmp4", "h264", "jpeg"])
async def test_chunks_decode_to_pictures(server: StandinServer, connect: Any, format: str) -> None:
    async with connect(format=format) as world:
        chunks = await take(world, 3)
    assert [chunk.frames().shape for chunk in chunks] == [(n, HEIGHT, WIDTH, 3) for n in (FIRST_FRAMES, FRAMES, FRAMES)]
    assert all(chunk.frames().dtype == np.uint8 for chunk in chunks)
    with pytest.raises(ValueError, match="use frames"):
        chunks[0].latents()


async def test_video_colours_are_bt709(server: StandinServer, connect: Any) -> None:
    """The stand-in's first picture has a known mean colour: Y about 126, Cb 128 + 50 sin 0, Cr 128 + 50 cos 0."""
    y, cb, cr = (126 - 16) / 219, 0.0, 50 / 224
    want = 255 * np.array([y + 1.5748 * cr, y - 0.1873 * cb - 0.4681 * cr, y + 1.8556 * cb])
    for format in ("fmp4", "jpeg"):
        async with connect(format=format) as world:
            (chunk,) = await take(world, 1)
        middle = chunk.frames()[0].reshape(-1, 3).mean(axis=0)
        assert np.abs(middle - want).max() < 12, format


async def test_raw_pictures_need_no_decoder(server: StandinServer, connect: Any) -> None:
    async with connect(format="rgb24") as world:
        (chunk,) = await take(world, 1)
    assert chunk.frames().shape == (FIRST_FRAMES, HEIGHT, WIDTH, 3)
    assert chunk.frames().tobytes() == chunk.payload


async def test_a_payload_that_is_no_video_is_a_bad_server_message(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        (chunk,) = await take(world, 1)
    for payload in (b"", chunk.payload[:200]):
        broken = Chunk(
            header=chunk.header, payload=payload, format=chunk.format, fps=FPS, received_s=0.0, init=chunk.init
        )
        with pytest.raises(BadServerMessage, match="chunk 0"):
            broken.frames()


# ---------------------------------------------------------------- links and failures


async def test_a_lost_link_is_resumed_without_a_gap(server: StandinServer, connect: Any, time: FakeTime) -> None:
    server.behaviour.cut_before_chunks = {3}
    async with connect() as world:
        chunks = await take(world, 6)
        assert world.session.epoch == 2
        assert [chunk.frames().shape[0] for chunk in chunks] == [FIRST_FRAMES] + [FRAMES] * 5
    assert indices(chunks) == [(0, index) for index in range(6)]
    assert server.sent("session.start")[1] == {
        "type": "session.start",
        "protocol": 1,
        "resume_token": "token-0",
        "last_chunk_index": 2,
    }
    assert time.slept_s.count(0.25) == 1
    assert chunks[3].header.epoch == 2


async def test_an_event_lost_with_the_link_is_sent_again_under_its_id(server: StandinServer, connect: Any) -> None:
    server.behaviour.swallow_events = 1
    async with connect() as world:
        receipt = await world.hold("w")
        await take(world, 4)
        assert (await receipt.applied).event_id == 0
    assert [event["event_id"] for event in server.sent("session.event")] == [0, 0]


async def test_an_event_that_had_arrived_before_the_link_broke_counts_as_queued(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 0
    server.behaviour.swallow_events = 1
    async with connect() as world:
        await server.until(lambda: bool(server.worlds))
        server.world.accepted.add(0)
        receipt = await world.hold("w")
        assert not receipt.applied.done()


async def test_a_request_under_way_fails_with_the_link(server: StandinServer, connect: Any) -> None:
    server.behaviour.ignore = {"session.reset"}
    async with connect() as world:
        reset = asyncio.create_task(world.reset())
        await server.until(lambda: bool(server.sent("session.reset")))
        await server.cut()
        with pytest.raises(LinkLost, match="before the answer"):
            await reset
        assert len(await take(world, 3)) == 3


@pytest.mark.parametrize(
    ("code", "text"), [(1008, "the session is over"), (1012, "the session is over"), (None, "in 0 tries")]
)
async def test_ends_that_cannot_be_resumed_raise_session_lost(
    server: StandinServer, connect: Any, code: int | None, text: str
) -> None:
    server.behaviour.max_chunks = 2
    async with connect(resume_delays_s=()) as world:
        await take(world, 2)
        receipt = await world.hold("w")
        await server.cut(code)
        with pytest.raises(SessionLost, match=text) as caught:
            await take(world, 100)
        assert caught.value.close_code == (code or 1006)
        with pytest.raises(EventDropped, match="the session was lost"):
            await receipt.applied
        with pytest.raises(SessionLost):
            await world.hold("w")


@pytest.mark.parametrize(
    ("code", "message"), [("resume_gap", "chunk 3 is gone"), ("session_lost", "the world is gone")]
)
async def test_a_refused_resume_raises_session_lost(
    server: StandinServer, connect: Any, code: str, message: str
) -> None:
    server.behaviour.refuse_resume = ErrorMessage(code=code, message=message)
    server.behaviour.cut_before_chunks = {3}
    async with connect() as world:
        with pytest.raises(SessionLost, match=f"{code}: {message}"):
            await take(world, 5)


async def test_chunks_that_the_server_no_longer_keeps_are_missing_and_the_world_goes_on(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.cut_before_chunks = {3}
    server.behaviour.lose_chunks = 2
    async with connect(pacing="free") as world:
        assert [chunk.chunk_index for chunk in await take(world, 6)] == [0, 1, 2, 5, 6, 7]
        server.behaviour.skip_chunk = server.world.made
        with pytest.raises(BadServerMessage, match="expected chunk"):
            await take(world, 100)


async def test_a_dead_worker_ends_the_session_without_a_resume_and_says_why(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.max_chunks = 2
    async with connect() as world:
        await take(world, 2)
        await server.fail("worker_unavailable")
        await server.say(ErrorMessage(code="worker_unavailable", message="the worker was killed", fatal=True))
        await server.cut(1012)
        with pytest.raises(SessionFailed):
            await take(world, 1)
        with pytest.raises(SessionLost, match="the session is over: the worker was killed") as caught:
            await take(world, 1)
        assert caught.value.close_code == 1012
    assert [message for message in server.sent("session.start") if "resume_token" in message] == []


async def test_a_failed_session_raises_after_its_chunks_and_can_be_reset(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        await server.until(lambda: server.world.made == 2)
        await server.fail("chunk 2 could not be made")
        with pytest.raises(SessionFailed, match="chunk 2 could not be made"):
            await take(world, 3)
        await world.reset()
        assert indices(await take(world, 2)) == [(1, 0), (1, 1)]


async def test_a_refused_request_is_a_typed_error(server: StandinServer, connect: Any) -> None:
    server.behaviour.ignore = {"session.pause"}
    async with connect() as world:
        pause = asyncio.create_task(world.pause())
        await server.until(lambda: bool(server.sent("session.pause")))
        await server.say(ErrorMessage(code="bad_state", message="not now"))
        with pytest.raises(Refused, match="bad_state: not now"):
            await pause


async def test_a_missing_chunk_is_a_broken_protocol(server: StandinServer, connect: Any) -> None:
    server.behaviour.skip_chunk = 1
    async with connect(pacing="free") as world:
        with pytest.raises(BadServerMessage, match="expected chunk 1 of run 0, got chunk 2 of run 0"):
            await take(world, 5)


async def test_chunks_end_when_the_session_is_closed(connect: Any) -> None:
    async with connect() as world:
        await take(world, 2)
        await world.close()
        assert len([chunk async for chunk in world.chunks()]) <= 3
        await world.close()


# ---------------------------------------------------------------- files


async def test_an_mp4_holds_all_frames_also_across_a_resume(
    server: StandinServer, connect: Any, tmp_path: Path
) -> None:
    server.behaviour.cut_before_chunks = {2}
    async with connect() as world:
        assert await world.save_mp4(tmp_path / "walk.mp4", num_chunks=4) == 4
        assert world.session.epoch == 2
    with av.open(tmp_path / "walk.mp4") as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert times == pytest.approx([index / FPS for index in range(FIRST_FRAMES + 3 * FRAMES)])


async def test_the_example_writes_what_it_says(
    server: StandinServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await write_mp4.main(server.url, str(tmp_path / "walk.mp4"))
    assert "8 chunks" in capsys.readouterr().out
    with av.open(tmp_path / "walk.mp4") as container:
        assert sum(1 for _ in container.decode(video=0)) == FIRST_FRAMES + 7 * FRAMES


async def test_other_formats_are_not_written_to_mp4(connect: Any, tmp_path: Path) -> None:
    async with connect(format="jpeg") as world:
        with pytest.raises(ValueError, match="expected chunks of format fmp4, got jpeg"):
            await world.save_mp4(tmp_path / "walk.mp4", num_chunks=1)


async def test_chunks_of_two_sessions_do_not_share_a_file(connect: Any, tmp_path: Path) -> None:
    async with connect() as world:
        (chunk,) = await take(world, 1)
    other = Chunk(
        header=chunk.header, payload=chunk.payload, format=chunk.format, fps=FPS, received_s=0.0, init=b"other"
    )
    with Mp4Writer(tmp_path / "two.mp4") as writer:
        writer.add(chunk)
        with pytest.raises(ValueError, match="another init segment"):
            writer.add(other)
        with pytest.raises(BadServerMessage, match="MP4 box moof"):
            retime(b"", decode_time=0, sequence_number=1)


# ---------------------------------------------------------------- parts


def test_a_viewer_waits_for_late_chunks_and_never_overlaps() -> None:
    viewer = VirtualViewer()
    assert [viewer.show(now_s, 1.0) for now_s in (10.0, 10.1, 10.2, 14.0)] == [10.0, 11.0, 12.0, 14.0]
    assert viewer.left_s(14.25) == pytest.approx(0.75)
    assert viewer.left_s(99.0) == 0.0


async def test_the_buffer_is_bounded_unless_someone_awaits_an_answer() -> None:
    buffer = ChunkBuffer(limit=1)
    buffer.put(RuntimeError("first"))
    waiting = asyncio.create_task(buffer.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    with buffer.unbounded():
        await waiting
    with pytest.raises(RuntimeError, match="first"):
        await buffer.take()
    await buffer.room()
    buffer.end()
    assert await buffer.take() is None


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, clients.python; heavy = {'websockets', 'pydantic', 'av', 'numpy', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy; from clients.python import WorldClient; late = {'av', 'torch'} & set(sys.modules);"
        "assert not late, late"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import clients.python

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        clients.python.Nothing  # noqa: B018
