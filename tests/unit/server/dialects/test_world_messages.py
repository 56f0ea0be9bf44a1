"""Text of the `world` dialect: what parses, and for everything else one error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.config import LimitsSection
from server.dialects.world_messages import parse_client_message, read_controls
from server.errors import BadInput, ErrorCode, EventRefused, ServerError
from server.wire.messages import ControlMessage, Pacing, Ping, Playback, SessionResume, SessionStart, StreamFormat
from worldmodel.errors import RequestRefused

LIMITS = LimitsSection(max_prompt_chars=20)

START: dict[str, Any] = {"type": "session.start", "protocol": 1, "prompt": "a town", "image": {"name": "day"}}
RESUME: dict[str, Any] = {"type": "session.start", "protocol": 1, "resume_token": "t", "last_chunk_index": 3}
EVENT: dict[str, Any] = {"type": "session.event", "event_id": 1, "prompt": "night"}
CONTROL: dict[str, Any] = {"track": "camera", "schema": "s", "data": {}}
PLAYBACK: dict[str, Any] = {"type": "playback", "epoch": 1, "run": 0, "chunk_index": 2, "buffered_ms": 10}
RESET: dict[str, Any] = {"type": "session.reset"}
LEAVE_OUT = object()


def parse(fields: dict[str, Any]) -> object:
    return parse_client_message(json.dumps(fields), LIMITS)


def test_start_with_its_defaults() -> None:
    start = parse(START)
    assert isinstance(start, SessionStart)
    assert (start.format, start.pacing, start.event_base, start.seed) == (StreamFormat.FMP4, Pacing.PLAYBACK, 0, None)


def test_resume_is_told_apart_by_its_token() -> None:
    assert isinstance(parse(RESUME), SessionResume)


def test_whole_numbers_are_fine_where_a_fraction_may_be() -> None:
    assert parse(PLAYBACK) == Playback(type="playback", epoch=1, run=0, chunk_index=2, buffered_ms=10.0)
    assert parse({"type": "ping", "t": 5}) == Ping(type="ping", t=5.0)


@pytest.mark.parametrize(
    ("base", "change", "code", "field"),
    [
        (START, {"type": LEAVE_OUT}, "bad_message", "type"),
        (START, {"type": "session.stop"}, "bad_message", "type"),
        (START, {"type": 3}, "bad_message", "type"),
        (START, {"type": ["session.start"]}, "bad_message", "type"),
        (START, {"protocol": LEAVE_OUT}, "bad_message", "protocol"),
        (START, {"protocol": 2}, "bad_protocol", "protocol"),
        (START, {"protocol": "1"}, "bad_protocol", "protocol"),
        (START, {"protocol": True}, "bad_message", "protocol"),
        (START, {"model": 1}, "bad_message", "model"),
        (START, {"prompt": LEAVE_OUT}, "bad_message", "prompt"),
        (START, {"prompt": None}, "bad_message", "prompt"),
        (START, {"prompt": "x" * 21}, "prompt_too_long", "prompt"),
        (START, {"image": LEAVE_OUT}, "bad_message", "image"),
        (START, {"image": "day"}, "bad_image", "image"),
        (START, {"image": {}}, "bad_image", "image"),
        (START, {"image": {"url": "http://x"}}, "bad_image", "image"),
        (START, {"image": {"name": "a", "upload_id": "b"}}, "bad_image", "image"),
        (START, {"image": {"name": 3}}, "bad_image", "image.name"),
        (START, {"image": {"name": "day", "x": 1}}, "bad_image", "image.x"),
        (START, {"image": {"upload_id": "u-1", "names": "day"}}, "bad_image", "image.names"),
        (START, {"image": {"base64": None}}, "bad_image", "image.base64"),
        (START, {"seed": -1}, "bad_message", "seed"),
        (START, {"seed": 1.5}, "bad_message", "seed"),
        (START, {"seed": True}, "bad_message", "seed"),
        (START, {"seed": 2**53}, "bad_message", "seed"),
        (START, {"size": "832"}, "bad_size", "size"),
        (START, {"size": "0x480"}, "bad_size", "size"),
        (START, {"size": [832, 480]}, "bad_size", "size"),
        (START, {"format": "avi"}, "bad_message", "format"),
        (START, {"pacing": "fast"}, "bad_message", "pacing"),
        (START, {"event_base": -1}, "bad_message", "event_base"),
        (START, {"event_base": False}, "bad_message", "event_base"),
        (START, {"colour": "red"}, "bad_message", "colour"),
        (RESUME, {"resume_token": 3}, "bad_message", "resume_token"),
        (RESUME, {"last_chunk_index": LEAVE_OUT}, "bad_message", "last_chunk_index"),
        (RESUME, {"last_chunk_index": -2}, "bad_message", "last_chunk_index"),
        (RESUME, {"prompt": "x"}, "bad_message", "prompt"),
        (RESUME, {"protocol": 7}, "bad_protocol", "protocol"),
        (EVENT, {"event_id": LEAVE_OUT}, "bad_message", "event_id"),
        (EVENT, {"event_id": True}, "bad_message", "event_id"),
        (EVENT, {"event_id": "1"}, "bad_message", "event_id"),
        (EVENT, {"event_id": 1.0}, "bad_message", "event_id"),
        (EVENT, {"event_id": -1}, "bad_message", "event_id"),
        (EVENT, {"event_id": 2**53}, "bad_message", "event_id"),
        (EVENT, {"prompt": "x" * 21}, "prompt_too_long", "prompt"),
        (EVENT, {"controls": {}}, "bad_message", "controls"),
        (EVENT, {"controls": [CONTROL, 3]}, "bad_message", "controls[1]"),
        (EVENT, {"controls": [{**CONTROL, "track": 3}]}, "bad_message", "controls[0].track"),
        (EVENT, {"controls": [{"track": "t", "data": {}}]}, "bad_message", "controls[0].schema"),
        (EVENT, {"controls": [{**CONTROL, "data": []}]}, "bad_message", "controls[0].data"),
        (EVENT, {"controls": [{**CONTROL, "more": 1}]}, "bad_message", "controls[0].more"),
        (RESET, {"prompt": 5}, "bad_message", "prompt"),
        (RESET, {"prompt": "x" * 21}, "prompt_too_long", "prompt"),
        (RESET, {"image": {"path": "/etc/passwd"}}, "bad_image", "image"),
        (RESET, {"seed": "1"}, "bad_message", "seed"),
        ({"type": "session.close"}, {"now": True}, "bad_message", "now"),
        ({"type": "ping", "t": 1}, {"t": "1"}, "bad_message", "t"),
        (PLAYBACK, {"epoch": -1}, "bad_message", "epoch"),
        (PLAYBACK, {"run": None}, "bad_message", "run"),
        (PLAYBACK, {"chunk_index": -2}, "bad_message", "chunk_index"),
        (PLAYBACK, {"buffered_ms": -0.5}, "bad_message", "buffered_ms"),
    ],
)
def test_each_bad_field_is_named(base: dict[str, Any], change: dict[str, Any], code: str, field: str) -> None:
    parse(base)
    fields = {name: value for name, value in {**base, **change}.items() if value is not LEAVE_OUT}
    with pytest.raises(BadInput) as caught:
        parse(fields)
    assert (caught.value.code, caught.value.field) == (code, field)
    assert field.split("[")[0].split(".")[0] in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("field", ["prompt", "image", "format", "event_base"])
def test_a_resume_that_is_also_a_start_is_told_so(field: str) -> None:
    """Also where `last_chunk_index` is missing, which a start does not have."""
    fields = {"type": "session.start", "protocol": 1, "resume_token": "t", field: START.get(field, 1)}
    with pytest.raises(BadInput) as caught:
        parse(fields)
    assert (caught.value.message, caught.value.field) == (f"{field}: not together with resume_token", field)


@pytest.mark.parametrize(
    "rest",
    [
        '"prompt": 7',
        '"prompt": "a", "prompt": "b"',
        '"prompt": "a prompt of more than twenty characters"',
        '"promt": "night"',
        '"controls": [3]',
        '"controls": [{"track": "t", "schema": "s", "data": {"x": NaN}}]',
        '"prompt": 1e999',
        '"prompt": ' + "9" * 5000,
    ],
    ids=lambda rest: rest[:40],
)
def test_a_malformed_event_is_named_by_its_id(rest: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_client_message(f'{{"type": "session.event", "event_id": 5, {rest}}}', LIMITS)
    assert caught.value.event_id == 5
    assert caught.value.field


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "session.event", "event_id": -1, "prompt": 7}',
        '{"type": "session.event", "event_id": true, "prompt": 7}',
        '{"type": "session.event", "event_id": 1.0, "prompt": 7}',
        '{"type": "session.event", "event_id": 9007199254740992, "prompt": NaN}',
        '{"type": "session.event", "event_id": NaN}',
        '{"type": "session.event", "event_id": 5, "event_id": 5}',
        '{"type": "session.reset", "event_id": 5}',
        '{"type": "session.evnt", "event_id": 5}',
    ],
)
def test_an_id_that_is_none_is_not_repeated(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_client_message(text, LIMITS)
    assert caught.value.event_id is None


@pytest.mark.parametrize(
    "rest",
    [
        '"prompt": ',
        '"controls": ' + "[" * 99 + "]" * 99,
        '"controls": [' + "{}," * LimitsSection().max_json_parts + "{}]",
    ],
)
def test_a_text_of_which_nothing_is_read_names_neither_field_nor_event(rest: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_client_message(f'{{"type": "session.event", "event_id": 5, {rest}}}', LIMITS)
    assert (caught.value.code, caught.value.field, caught.value.event_id) == (ErrorCode.BAD_JSON, None, None)


def test_too_long_a_message_is_fatal() -> None:
    limits = LimitsSection(max_message_bytes=10)
    with pytest.raises(ServerError) as caught:
        parse_client_message('{"type": "ping", "t": 1}', limits)
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert caught.value.kind.close_code == 1009


@given(text=st.text(max_size=80) | st.text(alphabet='{}[]":,truefalsn0123456789\\u', max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_message_or_one_clear_error(text: str) -> None:
    with pytest.raises(BadInput):
        parse_client_message(text, LIMITS)


# ---------------------------------------------------------------- controls


def refuse(field: str | None) -> Any:
    def parse_control(track: str, schema: str, data: object) -> bytes:
        if track == "bad":
            raise RequestRefused("no good", field=field)
        return json.dumps(data).encode()

    return parse_control


def test_controls_become_canonical_bytes() -> None:
    controls = read_controls([ControlMessage(track="t", schema="s", data={"a": 1})], refuse(None), event_id=1)
    assert [(it.track, it.schema, it.data) for it in controls] == [("t", "s", b'{"a": 1}')]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("transitions[0].actions[1]", "controls[1].data.transitions[0].actions[1]"),
        ("[3]", "controls[1].data[3]"),
        ("track", "controls[1].track"),
        ("schema", "controls[1].schema"),
        ("data", "controls[1].data"),
        (None, "controls[1]"),
    ],
)
def test_a_refused_control_is_named_in_the_message(field: str | None, expected: str) -> None:
    controls = [ControlMessage(track=track, schema="s", data={}) for track in ("good", "bad")]
    with pytest.raises(EventRefused) as caught:
        read_controls(controls, refuse(field), event_id=7)
    assert (caught.value.code, caught.value.field, caught.value.event_id) == (ErrorCode.BAD_CONTROL, expected, 7)
