"""Interactions of the `omni` dialect over real sockets: applied, retried, refused and dropped."""

from __future__ import annotations

from tests.support.omni_client import camera, velocity
from tests.support.omni_server import connect, go, session_of, until_first_tick
from tests.support.server_scripted import Server
from worldmodel.errors import RequestRefused


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
    server.worker.hold()
    socket = await connect(server)
    await socket.send_start(num_frames=33)
    await socket.interact({"prompt": "rain"}, "early")
    await socket.send("session.ping")
    await socket.expect("session.pong")
    server.worker.release()
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
