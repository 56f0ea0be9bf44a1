"""The `omni` dialect over real sockets: the message sequences of vLLM-Omni's realtime video interface."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from server.config import LimitsSection, OmniSection, ServerSection, SessionSection
from server.worker import CommittedTick
from tests.support.omni_client import OmniSocket, camera, velocity
from tests.support.server_client import png
from tests.support.server_scripted import Server, serving
from tests.support.server_worker import ScriptedWorker, WorkerSession, model_info
from worldmodel.errors import RequestRefused, TickRolledBack
from worldmodel.messages import ModelInfo, SessionId, Tick


class GatedWorker(ScriptedWorker):
    """A scripted worker whose ticks alone can be held, so that sessions still open and close."""

    def __init__(self, info: ModelInfo | None = None) -> None:
        super().__init__(info)
        self.gate = asyncio.Event()
        self.gate.set()

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        self.num_ticks_in_flight += 1
        try:
            await self.gate.wait()
        finally:
            self.num_ticks_in_flight -= 1
        return await super().tick(message, payload)


@pytest.fixture
async def gated() -> AsyncIterator[Server]:
    """Give a server whose first tick waits for `go`."""
    worker = GatedWorker()
    worker.gate.clear()
    async with serving(worker) as it:
        yield it


def go(server: Server) -> None:
    assert isinstance(server.worker, GatedWorker)
    server.worker.gate.set()


async def until_first_tick(server: Server) -> None:
    await server.until(lambda: server.worker.num_ticks_in_flight == 1)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as it:
        yield it


async def connect(server: Server, **options: Any) -> OmniSocket:
    return await server.stack.enter_async_context(await OmniSocket.open(server.url, **options))


def session_of(server: Server, started: dict[str, Any]) -> WorkerSession:
    return server.worker.sessions[SessionId(started["request_id"])]


# ---------------------------------------------------------------- the plain sequences


async def test_start_chunks_done(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(num_frames=33, seed=7, model="robbyant/lingbot-world-v2-14b-causal-fast-diffusers")
    assert started["format"] == "m4s"
    assert started["config"] == {
        "model": "robbyant/lingbot-world-v2-14b-causal-fast-diffusers",
        "prompt": "a town",
        "width": 32,
        "height": 32,
        "fps": 12,
        "num_frames": 33,
        "seed": 7,
    }
    done = await socket.expect("session.done")
    request_id = started["request_id"]
    assert done == {
        "type": "session.done",
        "request_id": request_id,
        "chunks": 3,
        "stopped": False,
        "dropped_event_ids": [],
    }
    assert await socket.closed() == 1000
    metadata = [chunk.metadata for chunk in socket.chunks]
    assert [it["transport_chunk_index"] for it in metadata] == [0, 1, 2]
    assert [it["generation_chunk_index"] for it in metadata] == [0, 1, 2]
    assert [it["num_frames"] for it in metadata] == [9, 12, 12]
    assert {(it["kind"], it["request_id"]) for it in metadata} == {("media", request_id)}
    assert socket.decode() == 33
    await server.until(lambda: not server.worker.sessions)
    assert len(server.worker.served) == 3, "a chunk was made that nobody sees"


async def test_every_prefix_plays_and_the_init_segment_comes_first(server: Server) -> None:
    socket = await connect(server)
    await socket.start(num_frames=33)
    for num_frames in (9, 21, 33):
        await socket.media()
        assert socket.decode() == num_frames
    assert socket.chunks[0].payload[4:8] == b"ftyp"
    assert socket.chunks[1].payload[4:8] == b"moof"


async def test_ping_is_answered_before_and_after_the_start(server: Server) -> None:
    socket = await connect(server)
    await socket.send("session.ping")
    await socket.expect("session.pong")
    await socket.start()
    await socket.send("session.ping")
    await socket.expect("session.pong")


async def test_stop_ends_a_video_without_length(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start()
    assert "num_frames" not in started["config"]
    await socket.media()
    await socket.send("session.stop")
    done = await socket.expect("session.done", stopped=True)
    assert done["chunks"] == len(socket.chunks) >= 1
    assert await socket.closed() == 1000
    await server.until(lambda: not server.worker.sessions)


async def test_a_lost_socket_ends_its_session() -> None:
    async with serving(session=SessionSection(resume_s=60.0)) as server:
        socket = await connect(server)
        await socket.start()
        socket.connection.transport.abort()
        await server.until(lambda: not server.worker.sessions)
        assert server.context.table.num_resident == 0


async def test_seconds_are_rounded_up_to_whole_chunks(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(seconds="2")
    assert started["config"]["num_frames"] == 33
    assert (await socket.expect("session.done"))["chunks"] == 3


async def test_parameters_in_sampling_params_count(server: Server) -> None:
    socket = await connect(server)
    sampling = {"num_frames": 9, "seed": 5, "pyramid": [1, 1, 1], "flow_shift": 5.0}
    config = (await socket.start(sampling_params=sampling))["config"]
    assert (config["num_frames"], config["seed"]) == (9, 5)
    assert (await socket.expect("session.done"))["chunks"] == 1


async def test_an_upload_is_a_file_id(server: Server) -> None:
    upload = server.context.uploads.add(png(), owner=None)
    socket = await connect(server)
    await socket.start(image_reference={"file_id": upload}, num_frames=9)
    await socket.expect("session.done")


# ---------------------------------------------------------------- interactions


async def test_prompt_and_camera_in_one_interaction(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start()
    event = {"prompt": "rain", **camera(velocity(0.0, 0.0, 0.05))}
    await socket.interact(event, "both", transition_chunks=2)
    queued = await socket.expect("session.interaction.queued")
    assert queued == {
        "type": "session.interaction.queued",
        "request_id": started["request_id"],
        "event_id": "both",
    }
    server.clock.now += 100
    server.context.table.scheduler.wake()
    while not any("both" in chunk.started for chunk in socket.chunks):
        server.clock.now += 1
        await socket.media()
    (tick,) = [tick for tick in session_of(server, started).ticks if tick.events]
    assert tick.prompt == "rain"
    assert [(control.track, control.schema) for control in tick.events[0].controls] == [
        ("prompt", "lingbot.prompt_transition.v1"),
        ("camera", "lingbot.camera_motion.v1"),
    ]


async def test_events_are_followed_from_start_to_end(gated: Server) -> None:
    socket = await connect(gated)
    await socket.start(num_frames=9 + 12 * 4)
    await until_first_tick(gated)
    await socket.interact({"prompt": "rain"}, "rain", transition_chunks=2)
    await socket.interact(camera(velocity(0.0, 0.0, 0.05)), "go")
    await socket.expect("session.interaction.queued", event_id="rain")
    await socket.expect("session.interaction.queued", event_id="go")
    go(gated)
    await socket.expect("session.done")
    rows = [[it.metadata[f"{word}_event_ids"] for word in ("started", "active", "completed")] for it in socket.chunks]
    assert rows == [
        [[], [], []],
        [["rain", "go"], ["rain", "go"], []],
        [[], ["go"], ["rain"]],
        [[], ["go"], []],
        [[], ["go"], []],
    ]


async def test_keys_by_script_and_by_interaction(gated: Server) -> None:
    socket = await connect(gated)
    script = [[["w"], ["w"], []], [["a"], [], []]]
    started = await socket.start(num_frames=33, extra_params={"camera_action_script": script, "flow_shift": 5.0})
    await until_first_tick(gated)
    session = session_of(gated, started)
    await socket.interact(camera({"data": {"actions": ["w", "j"]}}), "keys")
    await socket.expect("session.interaction.queued")
    go(gated)
    assert (await socket.media()).started == []
    assert (await socket.media()).started == ["keys"]
    first, second = session.ticks[:2]
    assert first.events[0].controls[0].data == b'{"mode":"script","frames":[["w"],["w"],[],["a"],[],[]]}'
    assert second.events[0].controls[0].data == b'{"mode":"state","transitions":[{"actions":["w","j"]}]}'


async def test_an_interaction_before_video_start_waits_for_it(server: Server) -> None:
    socket = await connect(server)
    await socket.send_start(num_frames=33)
    await socket.interact({"prompt": "rain"}, "early")
    await socket.expect("video.start")
    await socket.expect("session.interaction.queued", event_id="early")
    await socket.expect("session.done")
    assert [chunk.started for chunk in socket.chunks].count(["early"]) == 1


async def test_an_event_without_id_gets_one(gated: Server) -> None:
    socket = await connect(gated)
    await socket.start(num_frames=21)
    await socket.interact({"prompt": "rain"})
    event_id = (await socket.expect("session.interaction.queued"))["event_id"]
    go(gated)
    await socket.chunk_that_starts(event_id)


async def test_a_retry_is_answered_and_applied_once_and_another_content_is_refused(gated: Server) -> None:
    socket = await connect(gated)
    started = await socket.start(num_frames=21)
    session = session_of(gated, started)
    for _ in range(2):
        await socket.interact({"prompt": "rain"}, "same")
        await socket.expect("session.interaction.queued", event_id="same")
    await socket.interact({"prompt": "snow"}, "same")
    error = await socket.error(code="event_id_conflict", event_id="same")
    assert error["request_id"] == started["request_id"]
    go(gated)
    await socket.expect("session.done")
    assert [event.event_id for tick in session.ticks for event in tick.events] == [0]


async def test_an_event_during_the_last_chunk_is_named_as_dropped(gated: Server) -> None:
    socket = await connect(gated)
    started = await socket.start(num_frames=9)
    session = session_of(gated, started)
    await until_first_tick(gated)
    await socket.interact({"prompt": "rain"}, "late")
    await socket.expect("session.interaction.queued", event_id="late")
    go(gated)
    done = await socket.expect("session.done")
    assert (done["stopped"], done["dropped_event_ids"]) == (False, ["late"])
    assert [tick.events for tick in session.ticks] == [()]


async def test_an_event_that_the_model_refuses_fails_alone_and_its_id_is_free_again(gated: Server) -> None:
    socket = await connect(gated)
    await socket.start()
    await until_first_tick(gated)
    await socket.interact({"prompt": "rain"}, "e")
    await socket.expect("session.interaction.queued")
    gated.worker.tick_failures.extend([None, RequestRefused("no rain here", code="bad_control")])
    go(gated)
    await socket.error(code="bad_control")
    assert (await socket.error(code="interaction_failed", event_id="e"))["message"] == "no rain here"
    await socket.interact({"prompt": "snow"}, "e")
    await socket.expect("session.interaction.queued", event_id="e")
    await socket.send("session.stop")
    assert (await socket.expect("session.done"))["stopped"] is True


# ---------------------------------------------------------------- places


async def test_a_second_client_is_told_its_position_and_gets_its_turn() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start(num_frames=9)
        assert await second.expect("session.queued") == {"type": "session.queued", "position": 1, "queued": 1}
        await second.send("session.ping")
        await second.expect("session.pong")
        await first.send("session.stop")
        await first.expect("session.done")
        await second.expect("video.start")
        await second.expect("session.done")


async def test_a_second_client_is_refused_where_nobody_waits() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, omni=OmniSection(queue_when_full=False)) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.error(code="capacity")
        assert await second.closed() == 1013


async def test_a_waiting_client_that_stops_is_done() -> None:
    async with serving(ScriptedWorker(model_info(capacity_sessions=1))) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.expect("session.queued")
        await second.interact({"prompt": "rain"}, "early")
        await second.send("session.stop")
        done = await second.expect("session.done")
        assert (done["chunks"], done["stopped"], done["dropped_event_ids"]) == (0, True, ["early"])
        assert await second.closed() == 1000
        assert server.context.table.num_waiting == 0


async def test_a_token_is_needed_where_the_server_asks_for_one() -> None:
    async with serving(server=ServerSection(tokens=("secret",))) as server:
        stranger = await connect(server)
        await stranger.error(code="unauthorized")
        assert await stranger.closed() == 1008
        friend = await connect(server, additional_headers={"Authorization": "Bearer secret"})
        await friend.start(num_frames=9)


# ---------------------------------------------------------------- pacing


async def test_playback_positions_let_chunks_start(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(streaming_buffer_seconds=1.25)
    assert started["config"]["streaming_buffer_seconds"] == 1.25
    session = session_of(server, started)
    await socket.media()
    await socket.media()
    await socket.send("session.ping")
    await socket.expect("session.pong")
    assert len(session.ticks) == 2
    await socket.send("session.playback", position_seconds=0)
    await socket.media()
    await socket.send("session.playback", position_seconds=0.74)
    await socket.send("session.ping")
    await socket.expect("session.pong")
    assert len(session.ticks) == 3, "chunk 1 begins at 0.75 s"
    await socket.send("session.playback", position_seconds=0.75)
    await socket.media()
    # Beyond what was sent counts as the last chunk sent; backwards counts as where the playhead was.
    await socket.send("session.playback", position_seconds=1e9)
    for _ in range(2):
        await socket.media()
    await socket.send("session.playback", position_seconds=0.1)
    await socket.send("session.ping")
    await socket.expect("session.pong")
    assert len(session.ticks) == 6


async def test_a_pace_of_media_time_is_the_servers_clock(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(num_frames=45, extra_params={"pace_to_media_time": True})
    session = session_of(server, started)
    await socket.media()
    await socket.media()
    await socket.media()
    assert len(session.ticks) == 3
    server.clock.now += 2
    server.context.table.scheduler.wake()
    await socket.expect("session.done")


# ---------------------------------------------------------------- what goes wrong


BAD_STARTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("model", {"model": "some/other-model"}),
    ("format", {"format": "webm"}),
    ("size", {"size": "832x480"}),
    ("fps", {"fps": 24}),
    ("num_frames", {"num_frames": 10}),
    ("image_reference", {"image_reference": None}),
    ("image_reference.image_url", {"image_reference": {"image_url": "data:image/png;base64,!"}}),
    ("image_reference.image_url", {"image_reference": {"image_url": "data:image/png;base64,AAAA"}}),
    ("image_reference.file_id", {"image_reference": {"file_id": "u-nothing"}}),
    ("extra_params.camera_action_script[0]", {"extra_params": {"camera_action_script": [[["w"]]]}}),
    ("seed", {"seed": float("nan")}),
]
BAD_COMMANDS: list[tuple[str, Any]] = [
    ("data.rotation", {"data": {"rotation": [0, 0, 0, 0]}}),
    ("data.rotation[1]", {"data": {"rotation": [0, float("nan"), 0, 1]}}),
    ("data.translation[2]", {"data": {"translation": [0, 0, float("inf")]}, "mode": "velocity"}),
    ("data.translation[0]", {"data": {"translation": [True, 0, 0]}}),
    ("data.actions[0]", {"data": {"actions": ["q"]}}),
    ("mode", {"mode": "jump", "data": {"translation": [0, 0, 1]}}),
    ("data", {"mode": "target"}),
]


async def test_nothing_wrong_ends_a_session_and_everything_wrong_is_named(server: Server) -> None:
    socket = await connect(server)
    await socket.interact({"prompt": "rain"}, "early")
    assert (await socket.error(code="not_started"))["event_id"] == "early"
    await socket.send("session.stop")
    await socket.error(code="not_started")
    await socket.connection.send(b"\x00\x01")
    await socket.error(code="binary_not_allowed")
    for field, fields in BAD_STARTS:
        await socket.send_start(**fields)
        error = await socket.error()
        assert error["field"] == field, error
        assert field in error["message"] or error["code"] in ("bad_image", "unknown_upload")
    assert not server.worker.sessions, "something was opened before everything was checked"
    started = await socket.start(num_frames=None)
    session = session_of(server, started)
    await socket.connection.send("{")
    assert (await socket.error(code="bad_json"))["request_id"] == started["request_id"]
    await socket.connection.send(b"\x00\x01")
    await socket.error(code="binary_not_allowed")
    await socket.send("session.dance")
    await socket.error(code="bad_message", field="type")
    await socket.send_start()
    await socket.error(code="already_started")
    await socket.send("session.playback", position_seconds=float("inf"))
    await socket.error(field="position_seconds")
    for field, command in BAD_COMMANDS:
        await socket.interact({"prompt": "rain", **camera(command)}, "bad")
        error = await socket.error(event_id="bad")
        assert error["field"] == f"interaction.event.multi_modal_data.camera.{field}", error
    await socket.interact({"prompt": "rain"}, "bad")
    await socket.expect("session.interaction.queued", event_id="bad")
    await socket.send("session.stop")
    await socket.expect("session.done")
    assert [tick.prompt for tick in session.ticks if tick.prompt] in ([], ["rain"])


async def test_a_full_queue_refuses_and_loses_nothing() -> None:
    worker = GatedWorker()
    worker.gate.clear()
    async with serving(worker, session=SessionSection(max_pending_events=2)) as server:
        socket = await connect(server)
        started = await socket.start(num_frames=21)
        session = session_of(server, started)
        await until_first_tick(server)
        for event_id in ("a", "b"):
            await socket.interact({"prompt": event_id}, event_id)
            await socket.expect("session.interaction.queued", event_id=event_id)
        await socket.interact({"prompt": "c"}, "c")
        await socket.error(code="queue_full", event_id="c")
        go(server)
        assert (await socket.chunk_that_starts("a")).started == ["a", "b"]
        assert (await socket.expect("session.done"))["dropped_event_ids"] == []
        assert session.ticks[1].prompt == "b"


async def test_what_waits_for_a_start_is_bounded() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, session=SessionSection(max_pending_events=2)) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.expect("session.queued")
        for event_id in "abc":
            await second.interact({"prompt": event_id}, event_id)
        await second.error(code="queue_full", event_id="c")
        await first.send("session.stop")
        await second.expect("session.interaction.queued", event_id="b")


async def test_what_waits_for_a_start_is_no_longer_than_one_message() -> None:
    worker = ScriptedWorker(model_info(capacity_sessions=1))
    async with serving(worker, limits=LimitsSection(max_message_bytes=2000)) as server:
        first, second = await connect(server), await connect(server)
        await first.start()
        await second.send_start()
        await second.expect("session.queued")
        for event_id in "abc":
            await second.interact({"prompt": event_id * 700}, event_id)
        await second.error(code="queue_full", event_id="c")
        await first.send("session.stop")
        await second.expect("session.interaction.queued", event_id="b")


async def test_events_a_second_are_bounded() -> None:
    limits = LimitsSection(max_events_per_second=2.0)
    async with serving(limits=limits) as server:
        socket = await connect(server)
        await socket.start()
        for event_id in "abc":
            await socket.interact({"prompt": event_id}, event_id)
        await socket.error(code="rate_limited", event_id="c")
        server.clock.now += 1
        await socket.interact({"prompt": "c"}, "c")
        await socket.expect("session.interaction.queued", event_id="c")


async def test_a_start_that_breaks_is_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.dialects.omni.plan_start", None)
    socket = await connect(server)
    await socket.send_start()
    await socket.error(code="internal")
    assert await socket.closed() == 1011


async def test_a_socket_that_begins_nothing_is_closed() -> None:
    async with serving(session=SessionSection(start_timeout_s=0.05)) as server:
        socket = await connect(server)
        await socket.error(code="start_timeout")
        assert await socket.closed() == 1008


async def test_a_failed_chunk_ends_the_video_with_an_error(server: Server) -> None:
    socket = await connect(server)
    server.worker.tick_failures.extend([None, TickRolledBack("out of memory", code="oom")])
    started = await socket.start(num_frames=33)
    # The error may overtake the chunk before, which is still being encoded.
    error = await socket.error(code="tick_failed")
    assert error["request_id"] == started["request_id"]
    assert await socket.closed() == 1011
    assert "session.done" not in {message["type"] for message in socket.messages}
    await server.until(lambda: not server.worker.sessions)


async def test_queued_events_of_a_failed_chunk_are_told(gated: Server) -> None:
    socket = await connect(gated)
    await socket.start(num_frames=33)
    await until_first_tick(gated)
    await socket.interact({"prompt": "rain"}, "e")
    await socket.expect("session.interaction.queued")
    gated.worker.tick_failures.append(TickRolledBack("out of memory", code="oom"))
    go(gated)
    await socket.error(code="tick_failed")
    await socket.error(code="interaction_failed", event_id="e")
    assert await socket.closed() == 1011


async def test_a_worker_that_dies_ends_the_video(server: Server) -> None:
    socket = await connect(server)
    await socket.start()
    await socket.media()
    server.worker.dies()
    await socket.error(code="worker_unavailable")
    assert await socket.closed() == 1012
    server.worker.is_back()
    await server.until(lambda: server.context.table.num_resident == 0)


async def test_a_worker_that_will_not_let_go_is_an_error_and_not_silence(server: Server) -> None:
    socket = await connect(server)
    await socket.start()
    server.worker.close_failures.append(RequestRefused("busy", code="busy"))
    await socket.send("session.stop")
    await socket.error(code="cleanup_failed")
    assert await socket.closed() == 1011
    await server.until(lambda: not server.worker.sessions)


async def test_shutting_down_says_so_and_names_what_was_dropped() -> None:
    worker = GatedWorker()
    worker.gate.clear()
    async with serving(worker) as server:
        socket = await connect(server)
        await socket.start()
        await socket.interact({"prompt": "rain"}, "e")
        await socket.expect("session.interaction.queued")
        server.context.say_goodbye()
        await socket.error(code="shutting_down")
        done = await socket.expect("session.done")
        assert (done["stopped"], done["dropped_event_ids"]) == (True, ["e"])
        assert await socket.closed() == 1012
        go(server)


async def test_clients_that_vanish_at_any_moment_leave_nothing() -> None:
    rng = random.Random(7)
    async with serving(ScriptedWorker(model_info(capacity_sessions=2))) as server:
        for _ in range(8):
            crowd = [await OmniSocket.open(server.url) for _ in range(3)]
            for socket in crowd:
                await socket.send_start(**rng.choice([{}, {"num_frames": 21}, {"streaming_buffer_seconds": 1.25}]))
                await socket.interact({"prompt": "rain"}, "e")
            for socket in crowd[: rng.randrange(3)]:
                await socket.receive()
            rng.shuffle(crowd)
            for socket in crowd:
                if rng.random() < 0.3:
                    await socket.send("session.stop")
                socket.connection.transport.abort()
            for socket in crowd:
                await socket.connection.wait_closed()
        table = server.context.table
        await server.until(lambda: not (table.all() or table.num_resident or table.num_waiting))
        assert not server.worker.sessions
        last = await connect(server)
        await last.start(num_frames=21)
        assert (await last.expect("session.done"))["chunks"] == 2
