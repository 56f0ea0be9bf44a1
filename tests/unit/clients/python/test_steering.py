"""Steering with the Python client: controls, events, receipts, resets."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from clients.python import (
    Applied,
    EventDropped,
    Receipt,
    Refused,
)
from clients.python.world import TRAJECTORY_SCHEMA
from server.wire.messages import DropReason, ErrorMessage, EventQueued
from server.wire.messages import EventDropped as EventDroppedMessage
from tests.support.client_standin_server import StandinServer
from tests.support.python_client import indices, take


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
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await receipt
        assert not receipt.applied.done(), "who gives up waiting leaves the receipt as it is"
        server.behaviour.max_chunks = None
        server.wake()
        assert await receipt == Applied(event_id=0, run=0, chunk_index=2, latent_frame=0, wait_ms=1.0)
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


async def test_an_event_that_the_server_cannot_read_is_refused_and_not_waited_for(
    server: StandinServer, connect: Any
) -> None:
    server.behaviour.ignore = {"session.event"}
    async with connect() as world:
        unreadable = [asyncio.create_task(world.prompt(text)) for text in ("half a pair: \ud800", "later")]
        await server.until(lambda: len(server.sent("session.event")) == 2)
        await server.say(ErrorMessage(code="bad_json", message="half of a surrogate pair"))
        with pytest.raises(Refused, match="bad_json"):
            await unreadable[0]
        assert not unreadable[1].done()
        await server.say(EventQueued(event_id=1))
        assert (await unreadable[1]).event_id == 1


async def test_a_refused_path_leaves_the_keys_held(server: StandinServer, connect: Any) -> None:
    refusal = ErrorMessage(code="bad_control", message="refused", field="controls[0].data", event_id=0)
    server.behaviour.refuse_events = {number: refusal.model_copy(update={"event_id": number}) for number in (1, 2, 3)}
    async with connect() as world:
        await world.hold("w")
        with pytest.raises(Refused):
            await world.script([["q"]])
        with pytest.raises(Refused):
            await world.motion("velocity", translation=[0, 0, 9e9], rotation=[0, 0, 0, 1])
        with pytest.raises(Refused):
            await world.trajectory([])
        await world.tap("d")
        await world.script([["s"]])
        await world.tap("d")
    transitions = [event["controls"][0]["data"].get("transitions") for event in server.sent("session.event")]
    assert transitions[4] == [{"actions": ["w", "d"]}, {"actions": ["w"]}]
    assert transitions[6] == [{"actions": ["d"]}, {"actions": []}]


async def test_poses_and_motions_may_be_arrays(server: StandinServer, connect: Any) -> None:
    pose = np.eye(4, dtype=np.float32)
    async with connect() as world:
        await world.trajectory(np.stack([pose, pose]), intrinsics=np.ones((1, 4)), intrinsics_size=(832, 480))
        await world.trajectory([pose])
        await world.motion("velocity", translation=np.zeros(3), rotation=np.array([0, 0, 0, 1]))
    sent = [event["controls"][0]["data"] for event in server.sent("session.event")]
    assert sent[0] == {"poses": [pose.tolist()] * 2, "intrinsics": [[1.0] * 4], "intrinsics_size": [832, 480]}
    assert sent[1] == {"poses": [pose.tolist()]}
    assert (sent[2]["translation"], sent[2]["rotation"]) == ([0.0, 0.0, 0.0], [0, 0, 0, 1])


async def test_messages_that_json_or_the_limit_forbid_are_not_sent(server: StandinServer, connect: Any) -> None:
    async with connect() as world:
        with pytest.raises(
            ValueError, match=r"^controls\[0\]\.data\.translation\[1\]: expected a finite number, got nan"
        ):
            await world.motion("velocity", translation=[0, float("nan"), 0], rotation=[0, 0, 0, 1])
        with pytest.raises(ValueError, match=r"^controls\[0\]\.data\.poses\[0\]: expected .* got ndarray$"):
            await world.control(TRAJECTORY_SCHEMA, {"poses": [np.eye(4)]})
        with pytest.raises(ValueError, match=r"^controls\[0\]\.data\.poses\[0\]\[1\]: expected .* got nan"):
            await world.trajectory(np.array([[0.0, math.nan]]))
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
