"""The page's modules one by one, inside the browser that runs them."""

from __future__ import annotations

from typing import Any

import pytest

from server.config import LimitsSection
from server.dialects.world_messages import parse_client_message
from server.wire.messages import PROTOCOL_VERSION
from tests.support.browser_chromium import WatchedPage
from worldmodel.lingbot.controls import parse_control

pytestmark = pytest.mark.browser


def run(modules: WatchedPage, module: str, body: str, argument: object = None) -> Any:
    """Run a function body with `m`, a module of the page, and `argument`."""
    source = f"async (argument) => {{ const m = await import('/static/{module}'); {body} }}"
    return modules.page.evaluate(source, argument)


def test_every_message_of_the_page_is_one_that_the_server_takes(modules: WatchedPage) -> None:
    messages = run(
        modules,
        "protocol.js",
        """return [
          m.startMessage({prompt: 'p', image: {name: 'day'}, format: 'fmp4'}),
          m.startMessage({prompt: 'p', image: {upload_id: 'u'}, format: 'h264', seed: 3}),
          m.watchMessage('token'),
          m.resumeMessage('token', -1),
          m.controlMessage(0, [{actions: ['w', 'l'], client_ts_ms: 12.5}]),
          m.promptMessage(1, 'p'),
          m.resetMessage({}), m.resetMessage({prompt: 'p', image: {name: 'day'}}),
          m.pauseMessage(), m.unpauseMessage(), m.closeMessage(), m.pingMessage(1.5),
          m.playbackMessage({epoch: 0, run: 0, chunkIndex: 3, bufferedMs: -0.2}),
        ].map((message) => JSON.stringify(message))""",
    )
    parsed = [parse_client_message(message, LimitsSection()) for message in messages]
    control = parsed[4].controls[0]
    assert b'"w","l"' in parse_control(control.track, control.schema_, control.data)
    assert run(modules, "protocol.js", "return m.PROTOCOL_VERSION") == PROTOCOL_VERSION


def test_a_binary_frame_is_taken_apart(modules: WatchedPage) -> None:
    header = run(
        modules,
        "protocol.js",
        """const head = new TextEncoder().encode('{"type":"chunk","chunk_index":4}');
        const bytes = new Uint8Array(4 + head.length + 3);
        new DataView(bytes.buffer).setUint32(0, head.length);
        bytes.set(head, 4);
        bytes.set([7, 8, 9], 4 + head.length);
        const {header, payload} = m.parseFrame(bytes.buffer);
        return [header.chunk_index, [...payload]];""",
    )
    assert header == [4, [7, 8, 9]]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ([0, 0], "expected at least 4"),
        ([0, 0, 0, 9, 123, 125], "its header alone claims 9"),
        ([0, 0, 0, 2, 123, 125], "type undefined"),
    ],
)
def test_a_bad_binary_frame_is_named(modules: WatchedPage, frame: list[int], words: str) -> None:
    body = "try { m.parseFrame(new Uint8Array(argument).buffer); return '' } catch (error) { return error.message }"
    assert words in run(modules, "protocol.js", body, frame)


def test_a_socket_that_is_being_closed_is_not_pinged(modules: WatchedPage) -> None:
    """The other side may take its time, and an attempt to send to such a socket is an error in the console."""
    sent = run(
        modules,
        "connection.js",
        """const sent = []; const pings = []; const kept = [window.WebSocket, window.setInterval];
        class Socket extends EventTarget {
          static OPEN = 1;
          readyState = 1;
          send(text) { sent.push(JSON.parse(text).type); }
          close() { this.readyState = 2; }
          say(message) { this.dispatchEvent(new MessageEvent('message', {data: JSON.stringify(message)})); }
        }
        window.WebSocket = Socket; window.setInterval = (run) => pings.push(run);
        try {
          const nothing = () => {};
          const handlers = {onState: nothing, onStarted: nothing, onMessage: nothing, resumePoint: () => null};
          const connection = new m.Connection({url: '', protocols: [], handlers});
          connection.begin({type: 'session.start'});
          const socket = connection._socket;
          socket.dispatchEvent(new Event('open'));
          socket.say({type: 'session.started'}); socket.say({type: 'pong', t: 0});
          pings[0](); socket.say({type: 'pong', t: 0});
          connection.drop(); pings[0]();
        } finally {
          [window.WebSocket, window.setInterval] = kept;
        }
        return sent;""",
    )
    assert sent == ["session.start", "ping", "ping"]


def test_a_quick_tap_travels_as_two_transitions_of_one_event(modules: WatchedPage) -> None:
    sent = run(
        modules,
        "controls.js",
        """const sent = []; const later = []; let now = 0;
        const sender = new m.ControlSender({
          send: (transitions) => sent.push(transitions.map(({actions}) => actions.join(''))) > 0,
          pendingEvents: () => 0, now: () => now, later: (run) => later.push(run),
        });
        sender.change(['w']);
        now = 5; sender.change([]);
        now = 9; sender.change(['d']);
        now = 12; sender.change([]);
        now = 40; later.forEach((run) => run());
        return sent;""",
    )
    assert sent == [["w"], ["", "d", ""]]


def test_what_counts_is_the_union_of_all_sources(modules: WatchedPage) -> None:
    seen = run(
        modules,
        "controls.js",
        """const seen = []; const held = new m.HeldActions((actions) => seen.push(actions.join('')));
        held.hold('keyboard', ['w']); held.hold('pointer 1', ['w', 'l']); held.hold('keyboard', []);
        held.hold('pointer 1', ['l', 'w']); held.releaseAll();
        return seen;""",
    )
    assert seen == ["w", "wl", ""]


def test_a_gamepad_moves_with_the_left_stick_and_looks_with_the_right(modules: WatchedPage) -> None:
    body = "return m.gamepadActions({axes: [0.1, -0.9, 0.7, 0.2], buttons: []})"
    assert run(modules, "controls.js", body) == ["w", "l"]


def test_the_frame_that_shows_an_event_is_found(modules: WatchedPage) -> None:
    shown = run(
        modules,
        "applied.js",
        """const tracker = new m.AppliedTracker();
        tracker.sent(5, [{actions: ['w'], client_ts_ms: 10}, {actions: [], client_ts_ms: 11}]);
        const {held, landings} = tracker.chunk({chunk_index: 3, applied: [{event_id: 5, latent_frame: 1}]});
        return {at: [0, 3, 4, 7, 8, 11].map((frame) => m.actionsAt(held, frame).join('')), landings,
                opening: [0, 1, 2].map((latent) => m.firstMediaFrame(latent, true))};""",
    )
    assert shown["at"] == ["", "", "w", "w", "", ""]
    assert shown["landings"] == [{"eventId": 5, "atFrame": 4, "pressedMs": 10}]
    assert shown["opening"] == [0, 1, 5]


def test_reports_wait_while_chunks_come_early_and_hurry_when_they_come_late(modules: WatchedPage) -> None:
    delays = run(
        modules,
        "pacing.js",
        """const delay = new m.ReportDelay(); const delays = [delay.delayMs];
        for (let chunk = 0; chunk < 20; chunk += 1) delay.arrived(1.3 - delay.delayMs / 1000, 1);
        delays.push(delay.delayMs); delay.arrived(0.1, 1); delays.push(delay.delayMs);
        for (let chunk = 0; chunk < 20; chunk += 1) delay.arrived(0, 1);
        return [...delays, delay.delayMs];""",
    )
    assert delays[0] == delays[3] == 0
    assert 700 < delays[1] < 950
    assert delays[2] == pytest.approx(delays[1] - 300)


def test_percentiles_are_nearest_rank(modules: WatchedPage) -> None:
    body = "return [m.percentile([], 0.5), m.percentile([3, 1, 2], 0.5), m.percentile([1, 2, 3, 4], 0.95)]"
    assert run(modules, "hud.js", body) == [None, 2, 4]


def test_a_chunk_is_cut_into_units_and_those_into_their_parts(modules: WatchedPage) -> None:
    cut = run(
        modules,
        "annexb.js",
        """const unit = [0, 0, 0, 1, 0x67, 9, 0, 0, 0, 1, 0x68, 8, 0, 0, 1, 0x65, 0, 0, 3, 7];
        const units = m.cutUnits(Uint8Array.from([...unit, 0, 0, 1, 0x41]), [20, 4]);
        return units.map((unit) => m.nalsOf(unit).map((nal) => [m.nalType(nal), [...nal]]));""",
    )
    assert cut == [[[7, [0x67, 9]], [8, [0x68, 8]], [5, [0x65, 0, 0, 3, 7]]], [[1, [0x41]]]]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ([[0, 0, 1, 9], [3]], "byte lengths that add up to 4, got [3]"),
        ([[0, 0, 1, 9], None], "byte lengths that add up to 4"),
        ([[0, 0, 1, 9, 5, 0, 1, 9], [4, 4]], "frame 1 of the chunk: expected a start code"),
    ],
)
def test_a_bad_chunk_is_named(modules: WatchedPage, argument: list[Any], words: str) -> None:
    body = "try { m.cutUnits(Uint8Array.from(argument[0]), argument[1]); } catch (error) { return error.message }"
    assert words in run(modules, "annexb.js", body, argument)


def test_a_walk_follows_the_poses_frame_by_frame(modules: WatchedPage) -> None:
    walk = run(
        modules,
        "walk.js",
        """const pose = (x, z, turn) =>
          [Math.cos(turn), 0, Math.sin(turn), x, 0, 1, 0, 0, -Math.sin(turn), 0, Math.cos(turn), z, 0, 0, 0, 1];
        const walk = new m.Walk(); const seen = []; const names = [];
        const show = (run, chunkIndex, frame, numFrames) =>
          seen.push([walk.shown({run, chunkIndex, numFrames}, frame), ...Object.values(walk.place)]);
        walk.begins(0, 'day');
        walk.chunk({run: 0, chunk_index: 0, pose: pose(0, 1, 3)});
        walk.chunk({run: 0, chunk_index: 1, pose: pose(2, 1, -3)});
        show(0, 0, 0, 2); show(0, 0, 1, 2); show(0, 1, 0, 2); show(0, 2, 0, 2);
        const trail = walk.trail.length;
        walk.begins(1, null); names.push(walk.startImage);
        walk.chunk({run: 1, chunk_index: 0, pose: pose(0, 4, 0)});
        show(1, 0, 0, 4); names.push(walk.startImage);
        for (let chunk = 1; chunk < 6000; chunk += 1) {
          walk.chunk({run: 1, chunk_index: chunk, pose: pose(0, 4 + chunk, 0)});
          walk.shown({run: 1, chunkIndex: chunk, numFrames: 1}, 0);
        }
        return {seen, trail, long: walk.trail.length, ends: walk._ends.size, names};""",
    )
    half_turn = walk["seen"][2][3]
    assert walk["seen"][0] == [True, 0, 0.5, 1.5]
    assert walk["seen"][1] == [True, 0, 1, 3]
    assert walk["seen"][2][:3] == [True, 1, 1]
    # From 3 to -3 the short way, past half a turn.
    assert abs(half_turn) == pytest.approx(3.14159, abs=1e-4)
    assert walk["seen"][3][0] is False
    assert walk["trail"] == 4
    assert walk["seen"][4][:3] == [True, 0, 1]
    assert 200 < walk["long"] <= 500
    assert walk["ends"] <= 2
    # The name is that of the run on screen.
    assert walk["names"] == ["day", None]


def test_north_is_where_the_layout_says(modules: WatchedPage) -> None:
    body = """const layout = {starts: {west: {x: 0, z: 0, heading_deg: 270}}};
      return [[layout, 'west'], [layout, 'else'], [layout, null], [null, 'west']]
        .map((each) => m.northRad(...each) * 180 / Math.PI);"""
    # Who looks west has north to the right, three quarters of a turn to the left.
    assert run(modules, "layout.js", body) == [-270, 0, 0, 0]


def test_who_joins_late_has_no_way_behind(modules: WatchedPage) -> None:
    trail = run(
        modules,
        "walk.js",
        """const pose = [1, 0, 0, 2, 0, 1, 0, 0, 0, 0, 1, 5, 0, 0, 0, 1]; const walk = new m.Walk();
        walk.chunk({run: 0, chunk_index: 7, pose});
        walk.shown({run: 0, chunkIndex: 7, numFrames: 1}, 0);
        return walk.trail;""",
    )
    assert trail == [{"x": 2, "z": 5}]


def test_a_crop_stays_on_its_picture(modules: WatchedPage) -> None:
    boxes = run(
        modules,
        "crop.js",
        """const crop = new m.CropWindow({width: 1000, height: 300}, {width: 160, height: 96});
        const boxes = [crop.box];
        crop.move(9, 9); boxes.push(crop.box);
        crop.zoom = 2; boxes.push(crop.box); crop.move(-1, -9); boxes.push(crop.box);
        crop.zoom = 0.1; boxes.push(crop.box);
        return boxes.map(({x, y, width, height}) => [x, y, width, height]);""",
    )
    assert boxes[0] == [250, 0, 500, 300]
    assert boxes[1] == [500, 0, 500, 300]
    assert boxes[2] == [625, 75, 250, 150]
    assert boxes[3] == [375, 0, 250, 150]
    assert boxes[4] == [250, 0, 500, 300]


def test_playback_slows_down_hurries_and_jumps_with_what_is_left(modules: WatchedPage) -> None:
    paces = run(
        modules,
        "timeline.js",
        """const timeline = new m.Timeline(() => {});
        return [0.5, 0.01, 0.01, 0.5, 2.4, 2.6, 4.1].map((slack) => timeline.pace(slack, 1));""",
    )
    rates = [pace["rate"] for pace in paces]
    assert rates == pytest.approx([1, 0.95, 0.9, 0.95, 1, 1.08, 1.08])
    assert [pace["isFarBehind"] for pace in paces] == [False] * 6 + [True]


def test_the_frame_on_screen_is_found_and_each_chunk_reported_once(modules: WatchedPage) -> None:
    shown = run(
        modules,
        "timeline.js",
        """const seen = [];
        const timeline = new m.Timeline(({segment, frame, isFirstOfChunk}) =>
          seen.push([segment.chunkIndex, frame, isFirstOfChunk]));
        timeline.add({epoch: 0, run: 0, chunk_index: 0, num_frames: 9}, 0, 0.75);
        timeline.add({epoch: 0, run: 0, chunk_index: 1, num_frames: 12}, 0.75, 1.75);
        for (const mediaS of [0, 0.0833, 0.7499, 1.7499, 5, -1]) timeline.shown(mediaS, 0);
        return {seen, edges: [timeline.liveEdge(0.1), timeline.liveEdge(-0.5)]};""",
    )
    assert shown["seen"] == [[0, 0, True], [0, 1, False], [1, 0, True], [1, 11, False], [1, 11, False]]
    assert shown["edges"] == [None, 0.75]


def test_places_of_a_world_are_metres_from_where_the_run_began(modules: WatchedPage) -> None:
    found = run(
        modules,
        "layout.js",
        """const layout = {metres_per_unit: 10}; const start = {x: 6, z: 9, heading_deg: 90};
        return [m.metresOf(layout, start, {x: 0, z: 0.5}), m.metresOf(layout, start, {x: 0.1, z: 0}),
                m.repeats(2, 12, -11, 26)];""",
    )
    forward, right, repeats = found
    # Looking along x, forward is x and right is back along z.
    assert (forward["x"], forward["z"]) == pytest.approx((11, 9))
    assert (right["x"], right["z"]) == pytest.approx((6, 8))
    assert repeats == [-10, 2, 14, 26]
