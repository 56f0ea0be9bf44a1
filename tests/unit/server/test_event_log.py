"""Lines of an event log: what is written is what is read, and what can't be read says why."""

from __future__ import annotations

import json

import msgspec
import pytest

from server.event_log import (
    LoggedImage,
    LoggedReset,
    LogReset,
    LogStart,
    LogTick,
    control_events,
    decode_line,
    encode_line,
    image_digest,
    image_file_name,
    start_line,
    tick_line,
)
from tests.support.server_client import png
from tests.support.server_worker import model_info
from tests.support.spectators import ready_chunk
from worldmodel.messages import Control, ControlEvent, RequestId, SessionId, Tick

DATA = b'{"mode":"script","frames":[["w"],[]]}'
EVENT = ControlEvent(event_id=7, controls=(Control(track="camera", schema="keys.v1", data=DATA),), age_ms=12.5)
IMAGE = LoggedImage(file="image-0.png", sha256="ab")


def start() -> LogStart:
    return start_line(
        model_info(),
        session_id="s-1",
        created_at="2026-01-01T00:00:00+00:00",
        model_options=b'{"window": 9}',
        version="0.1",
        prompt="a town",
        seed=3,
        image=IMAGE,
    )


def test_the_first_line_says_what_computed_it() -> None:
    line = encode_line(start())
    fields = json.loads(line)
    assert line.endswith(b"}\n")
    assert fields["protocol"] == 1
    assert fields["model_digest"] == "0" * 16
    assert fields["noise_layout"] == "per_chunk"
    assert (fields["width"], fields["height"], fields["seed"], fields["prompt"]) == (32, 32, 3, "a town")
    assert fields["model_options"] == {"window": 9}
    assert fields["build"] == {"worldserve": "0.1", "python": "3"}
    assert fields["image"] == {"file": "image-0.png", "sha256": "ab"}
    assert decode_line(line) == msgspec.convert(start(), LogStart)


@pytest.mark.parametrize("prompt", [None, "", "night \u2603"])
def test_a_tick_keeps_its_events_byte_by_byte(prompt: str | None) -> None:
    plain = ControlEvent(event_id=8, controls=())
    tick = Tick(
        request_id=RequestId("r"), session_id=SessionId("s"), chunk_index=4, prompt=prompt, events=(EVENT, plain)
    )
    line = encode_line(tick_line(tick, ready_chunk(4, run=2, num_frames=12).chunk))
    read = decode_line(line)
    assert isinstance(read, LogTick)
    assert (read.run, read.chunk_index, read.prompt, read.num_media_frames) == (2, 4, prompt, 12)
    assert control_events(read) == (EVENT, plain)


@pytest.mark.parametrize("image", [None, IMAGE])
def test_a_reset(image: LoggedImage | None) -> None:
    line = LogReset(run=1, reset=LoggedReset(prompt="", seed=0, image=image))
    assert decode_line(encode_line(line)) == line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "truncated"),
        (b"[]", "expected a JSON object, got list"),
        (b'{"event": 1}', "expected a line with one of log, reset, chunk_index, got"),
        (b'{"run": 0, "chunk_index": "1", "events": [], "num_media_frames": 1}', r"Expected `int`.*chunk_index"),
        (b'{"run": 0, "chunk_index": 1, "events": [], "num_media_frames": 1, "x": 1}', "unknown field `x`"),
        (b'{"run": 0, "chunk_index": 1, "num_media_frames": 1}', "missing required field `events`"),
        (encode_line(start()).replace(b'"log":1', b'"log":2'), "expected version 1, got 2"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_line(text)


def test_images_keep_their_kind() -> None:
    assert image_file_name(png(), run=0) == "image-0.png"
    assert image_file_name(png(format="JPEG"), run=2) == "image-2.jpg"
    assert image_file_name(png(format="WEBP"), run=1) == "image-1.webp"
    assert image_digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
