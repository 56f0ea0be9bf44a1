"""From event logs to steps: assignment to chunks, runs, images, and every way a log can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from server.event_log import LoggedImage, LogStart, encode_line, start_line
from server.generate import GenerateJob, GenerateStep, NewRun
from server.replay import (
    differing_circumstances,
    differing_facts,
    is_recorded,
    read_plain,
    read_recorded,
)
from server.uploads import RawImage
from tests.support.server_worker import model_info
from worldmodel.lingbot.controls import parse_control
from worldmodel.messages import Control, ControlEvent, ImageSize

CONTROL = {"track": "camera", "schema": "lingbot.camera_actions.v1", "data": {"mode": "state", "held": ["w"]}}
OPTIONS = b'{"window": 9}'
FIRST = RawImage(size=ImageSize(width=1, height=1), pixels=b"\x01\x01\x01")
SECOND = RawImage(size=ImageSize(width=1, height=1), pixels=b"\x02\x02\x02")


def start(**changes: Any) -> LogStart:
    return start_line(
        replace(model_info(), **changes),
        session_id="s-1",
        created_at="2026-01-01T00:00:00+00:00",
        model_options=OPTIONS,
        version="0.1",
        prompt="a town",
        seed=3,
        image=LoggedImage(file="image-0.png", sha256="first"),
    )


def load_image(logged: LoggedImage) -> RawImage:
    images = {"first": FIRST, "second": SECOND}
    if logged.sha256 not in images:
        raise ValueError("no such image")
    return images[logged.sha256]


def tick(run: int, chunk_index: int, **fields: Any) -> dict[str, Any]:
    return {"run": run, "chunk_index": chunk_index, "events": [], "num_media_frames": 12, **fields}


def reset(run: int, *, sha256: str | None = None, **fields: Any) -> dict[str, Any]:
    image = {} if sha256 is None else {"image": {"file": "x.png", "sha256": sha256}}
    return {"run": run, "reset": {"prompt": "", "seed": 4, **image, **fields}}


def log(*lines: dict[str, Any]) -> bytes:
    return encode_line(start()) + b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def steps(*lines: dict[str, Any]) -> tuple[GenerateStep, ...]:
    return read_recorded(log(*lines), parse_control, load_image).steps


# ---------------------------------------------------------------- recorded


def test_events_stay_with_their_chunk() -> None:
    event = {"event_id": 5, "controls": [CONTROL]}
    replay = read_recorded(
        log(tick(0, 0), tick(0, 1, events=[event, {"event_id": 6}], prompt="night"), tick(0, 2)),
        parse_control,
        load_image,
    )
    data = parse_control("camera", CONTROL["schema"], CONTROL["data"])
    control = Control(track="camera", schema="lingbot.camera_actions.v1", data=data)
    steered = GenerateStep(
        events=(ControlEvent(event_id=5, controls=(control,)), ControlEvent(event_id=6, controls=())), prompt="night"
    )
    assert replay.steps == (GenerateStep(), steered, GenerateStep())
    assert (replay.start.prompt, replay.start.seed, replay.image) == ("a town", 3, FIRST)


def test_a_reset_begins_a_run_with_the_image_it_has() -> None:
    kept = NewRun(prompt="", seed=4)
    changed = NewRun(prompt="day", seed=4, image=SECOND.size, image_rgb=SECOND.pixels)
    found = steps(tick(0, 0), reset(1), tick(1, 0), tick(1, 1), reset(2, sha256="second", prompt="day"), tick(2, 0))
    assert [step.new_run for step in found] == [None, kept, None, changed]


def test_runs_without_chunks_leave_their_image() -> None:
    found = steps(tick(0, 0), reset(1, sha256="second"), reset(2, prompt="day"), tick(2, 0))
    assert found[1].new_run == NewRun(prompt="day", seed=4, image=SECOND.size, image_rgb=SECOND.pixels)


def test_a_job_counts_chunks_and_frames_of_each_run() -> None:
    job = GenerateJob(
        prompt="",
        seed=0,
        image=FIRST.size,
        image_rgb=FIRST.pixels,
        steps=steps(tick(0, 0), tick(0, 1), reset(1), tick(1, 0), tick(1, 1), tick(1, 2)),
    )
    assert job.chunk_indices == (0, 1, 0, 1, 2)
    assert job.num_media_frames(model_info()) == 9 + 12 + 9 + 12 + 12


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((tick(0, 0), tick(0, 2)), "line 3: expected chunk 1 of run 0, got chunk 2 of run 0"),
        ((tick(0, 0), tick(1, 0)), "line 3: expected chunk 1 of run 0, got chunk 0 of run 1"),
        ((tick(0, 0), reset(2)), "line 3: run: expected 1, got 2"),
        ((tick(0, 0), reset(1), tick(1, 1)), "line 4: expected chunk 0 of run 1, got chunk 1 of run 1"),
        ((tick(0, 0), reset(1, sha256="third")), "line 3: no such image"),
        ((tick(0, 0, events=[{"event_id": 1, "controls": [CONTROL | {"schema": "x"}]}]),), "line 2: unknown schema"),
        ((tick(0, 0), json.loads(encode_line(start()))), "line 3: a second session"),
        ((), "the log has no chunk"),
    ],
)
def test_a_log_with_a_hole_is_refused(lines: tuple[dict[str, Any], ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        steps(*lines)


def test_a_log_without_its_start_is_refused() -> None:
    with pytest.raises(ValueError, match="how its session began"):
        read_recorded(json.dumps(tick(0, 0)).encode(), parse_control, load_image)


# ---------------------------------------------------------------- plain


def plain(*lines: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(line).encode() for line in lines)


def test_a_plain_log_has_a_chunk_on_each_line() -> None:
    replay = read_plain(
        plain(
            {"event_id": 0, "prompt": "a town", "frames": [["w"], ["w", "l"], []]},
            {"event_id": 1, "prompt": "a town"},
            {"event_id": 3, "prompt": "night", "frames": []},
            {"event_id": 4, "frames": [["j"]]},
            {"event_id": 5, "prompt": "night"},
        ),
        parse_control,
    )
    assert replay.prompt == "a town"
    assert [step.prompt for step in replay.steps] == [None, None, "night", None, None]
    assert [[event.event_id for event in step.events] for step in replay.steps] == [[0], [], [], [4], []]
    (control,) = replay.steps[0].events[0].controls
    assert json.loads(control.data) == {"mode": "script", "frames": [["w"], ["w", "l"], []]}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (({"event_id": 0},), "line 1: prompt: the first line must have one"),
        (({"event_id": 1, "prompt": ""}, {"event_id": 1}), "line 2: event_id: expected a number above 1, got 1"),
        (({"event_id": 0, "prompt": "", "frames": [["x"]]},), "line 1: .*frames"),
        (({"event_id": 0, "prompt": "", "keys": []},), "line 1: .*unknown field `keys`"),
        (({"event_id": 0, "prompt": "", "frames": "w"},), "line 1: Expected `array`"),
        ((), "empty"),
    ],
)
def test_a_wrong_plain_log_is_refused(lines: tuple[dict[str, Any], ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_plain(plain(*lines), parse_control)


def test_the_forms_are_told_apart() -> None:
    assert is_recorded(log())
    assert not is_recorded(b"\n" + plain({"event_id": 0, "prompt": ""}))
    with pytest.raises(ValueError, match="empty"):
        is_recorded(b"\n\n")


# ---------------------------------------------------------------- the same model


def test_the_same_model_differs_in_nothing() -> None:
    assert differing_facts(start(), model_info(), b'{ "window": 9 }') == []
    assert differing_circumstances(start(), model_info(), "0.1") == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "other"}, "model: the log has other, this is fake"),
        ({"checkpoint_digest": "abc"}, "model_digest: the log has abc, this is 0000000000000000"),
        ({"width": 64}, "size: the log has 64x32, this is 32x32"),
        ({"noise_layout": "running"}, "noise_layout: the log has running, this is per_chunk"),
        ({"sampler": "official"}, "sampler: the log has official, this is nominal"),
    ],
)
def test_another_model_is_named_with_both_values(changes: dict[str, Any], text: str) -> None:
    assert differing_facts(start(**changes), model_info(), OPTIONS) == [text]


def test_other_options_are_another_model() -> None:
    (text,) = differing_facts(start(), model_info(), b'{"window": 8}')
    assert text.startswith("model_options: ")


def test_other_circumstances_are_named() -> None:
    found = differing_circumstances(start(device="cuda", versions={"torch": "2"}), model_info(), "0.2")
    assert found == [
        "device: the log has cuda, this is cpu",
        "python: the log has None, this is 3",
        "torch: the log has 2, this is None",
        "worldserve: the log has 0.1, this is 0.2",
    ]
