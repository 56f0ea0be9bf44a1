"""Rules about frames as such, events, controls, pings."""

from __future__ import annotations

from typing import Any

from clients.conformance.check import (
    Check,
    Context,
    all_applied,
    applied_in,
    keys,
    queue_event,
    require_actions,
    send_event,
)
from clients.conformance.errors import NotApplicable, require
from clients.conformance.socket import Socket

FRAMES, EVENT = "The world protocol", "session.event"

MAX_QUEUE_CHECKED = 2000

_BAD_FRAMES: tuple[tuple[str | bytes, tuple[str, ...]], ...] = (
    ("{", ("bad_json",)),
    ("", ("bad_json",)),
    ("[" * 2000 + "]" * 2000, ("bad_json",)),
    ("[1]", ("bad_json", "bad_message")),
    ("7", ("bad_json", "bad_message")),
    ("{}", ("bad_message",)),
    ('{"type": "no.such.type"}', ("bad_message",)),
    ('{"type": 5}', ("bad_message",)),
    ('{"type": "ping", "t": NaN}', ("bad_json", "bad_message")),
    ('{"type": "ping", "t": Infinity}', ("bad_json", "bad_message")),
    ('{"type": "ping", "t": "now"}', ("bad_message",)),
    ('{"type": "ping"}', ("bad_message",)),
    ('{"type": "ping", "t": 1, "u": 2}', ("bad_message",)),
    (b"\x00\x01\x02", ("binary_not_allowed",)),
)


async def bad_frames_are_answered(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        for started in (False, True):
            if started:
                await socket.start()
            for frame, codes in _BAD_FRAMES:
                await socket.send_raw(frame)
                await socket.expect_error(*codes, fatal=False, retryable=False)
                await socket.alive()


async def pings_come_back(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        for t in (0, 81234.5, -3, 1e12):
            await socket.send("ping", t=t)
            await socket.expect("pong", t=t)


async def events_are_queued_and_applied(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start()
        await queue_event(socket, 3)
        await applied_in(socket, 3)
        await queue_event(socket, 4, prompt="another town")
        await applied_in(socket, 4)


async def controls_are_applied(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        require_actions(await socket.start())
        await queue_event(socket, 0, controls=[keys("w")])
        transitions = [{"actions": ["w", "l"], "client_ts_ms": 1.5}, {"actions": []}]
        control = {**keys(), "data": {"mode": "state", "transitions": transitions}}
        await queue_event(socket, 1, controls=[control], prompt="both together")
        await queue_event(socket, 2, controls=[{**keys(), "data": {"mode": "script", "frames": [["w"], []]}}])
        await all_applied(socket, 0, 1, 2)


async def ids_are_used_once(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start(event_base=10)
        await send_event(socket, 9)
        await socket.expect_error("stale", event_id=9, fatal=False)
        await queue_event(socket, 12)
        await send_event(socket, 12)
        await socket.expect_error("duplicate", event_id=12, fatal=False)
        await applied_in(socket, 12)
        await send_event(socket, 12)
        await socket.expect_error("duplicate", event_id=12, fatal=False)
        await send_event(socket, 11)
        await socket.expect_error("stale", event_id=11, fatal=False)
        await queue_event(socket, 13)


async def events_are_applied_in_order(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start()
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        for event_id in (7, 5, 6):
            await queue_event(socket, event_id)
        await socket.send("session.unpause")
        await applied_in(socket, 5, 6, 7)


async def wrong_events_are_refused(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start()
        await socket.send("session.event", event_id=0)
        await socket.expect_error("empty_event", event_id=0, fatal=False)
        for event_id in (True, 1.5, "1", -1, 2**53, None):
            await socket.send("session.event", event_id=event_id, prompt="x")
            error = await socket.expect_error("bad_message", fatal=False)
            require(error["field"] == "event_id", f"event_id {event_id!r}: field is {error['field']!r}")
        await socket.send("session.event", prompt="x")
        await socket.expect_error("bad_message", field="event_id")
        await queue_event(socket, 0)


async def wrong_controls_are_refused(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        require_actions(await socket.start())
        good = keys("w")
        wrong: tuple[dict[str, Any], ...] = (
            {**good, "data": {"mode": "state", "held": ["x"]}},
            {**good, "data": {"mode": "state", "held": "w"}},
            {**good, "data": {"mode": "no such mode"}},
            {**good, "data": {}},
            {**good, "schema": "no.such.schema"},
            {**good, "track": "no such track"},
        )
        for control in wrong:
            await send_event(socket, 0, controls=[control])
            error = await socket.expect_error("bad_control", event_id=0, fatal=False)
            field = error["field"] or ""
            require(field.startswith("controls[0]"), f"bad_control: field is {field!r}, expected one of controls[0]")
        await send_event(socket, 0, controls=[good, good])
        await socket.expect_error("duplicate_track", event_id=0, fatal=False)
        await queue_event(socket, 0, controls=[good])


async def the_queue_is_bounded(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        limits = (await socket.start())["limits"]
        limit = limits["max_pending_events"]
        if limit >= min(MAX_QUEUE_CHECKED, limits["max_events_per_second"]):
            raise NotApplicable(f"{limit} events cannot be sent at once within the server's other limits")
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        for event_id in range(limit):
            await queue_event(socket, event_id)
        await send_event(socket, limit)
        await socket.expect_error("queue_full", event_id=limit, retryable=True, fatal=False)
        await socket.send("session.unpause")
        await applied_in(socket, *range(limit))
        await queue_event(socket, limit)


CHECKS = (
    Check(
        name="frames.bad",
        section=FRAMES,
        rule="malformed and binary frames are answered, the session lives",
        run=bad_frames_are_answered,
    ),
    Check(name="ping", section="ping", rule="t comes back in pong", run=pings_come_back),
    Check(name="events", section=EVENT, rule="queued, then applied", run=events_are_queued_and_applied),
    Check(name="events.controls", section=EVENT, rule="camera keys in every form", run=controls_are_applied),
    Check(name="events.ids", section=EVENT, rule="duplicate, stale, event_base", run=ids_are_used_once),
    Check(name="events.order", section=EVENT, rule="applied in ascending order", run=events_are_applied_in_order),
    Check(name="events.refusals", section=EVENT, rule="wrong events are refused", run=wrong_events_are_refused),
    Check(
        name="controls.refusals",
        section=EVENT,
        rule="a wrong control is named by its field",
        run=wrong_controls_are_refused,
    ),
    Check(name="events.queue", section=EVENT, rule="queue_full above max_pending_events", run=the_queue_is_bounded),
)
