"""The test model: deterministic pictures, and options that are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tests.support.fake_model import image, keys, load_fake, open_session, pixels, tick
from worldmodel.errors import LoadFailed, RequestRefused, TickRolledBack
from worldmodel.fake_options import FailureKind, FakeOptions, PlannedFailure, parse_options
from worldmodel.messages import MediaFormat


def first_two_chunks(*, seed: int = 1, prompt: str = "a street", picture: int = 0, key: str = "w") -> list[bytes]:
    runtime = load_fake()
    runtime.open(open_session("a", seed=seed, prompt=prompt), image(picture))
    return [pixels(runtime, tick("a", index, keys(index, key))) for index in range(2)]


def test_equal_inputs_give_equal_pictures() -> None:
    assert first_two_chunks() == first_two_chunks()


@pytest.mark.parametrize(
    "changed",
    [
        partial(first_two_chunks, seed=2),
        partial(first_two_chunks, prompt="a beach"),
        partial(first_two_chunks, picture=1),
        partial(first_two_chunks, key="l"),
        partial(first_two_chunks, key="i"),
    ],
)
def test_every_input_shows_in_the_pictures(changed: Callable[[], list[bytes]]) -> None:
    assert all(ours != theirs for ours, theirs in zip(first_two_chunks(), changed(), strict=True))


def test_a_prompt_of_a_tick_stays_in_force() -> None:
    runtime = load_fake()
    runtime.open(open_session("a", prompt="a street"), image())
    runtime.tick(tick("a", 0, prompt="a beach"))
    later = pixels(runtime, tick("a", 1))
    other = load_fake()
    other.open(open_session("a", prompt="a beach"), image())
    other.tick(tick("a", 0))
    assert pixels(other, tick("a", 1)) == later


def test_formats_show_the_same_picture() -> None:
    runtime = load_fake()
    runtime.open(open_session("a", outputs=(MediaFormat.RGB24, MediaFormat.YUV420)), image())
    media, (rgb, yuv) = runtime.tick(tick("a", 0)).to_host()
    frames_THW3 = np.frombuffer(rgb, np.uint8).reshape(media.parts[0].shape)
    luma_THW = np.frombuffer(yuv, np.uint8).reshape(media.parts[1].shape)[:, : frames_THW3.shape[1]]
    # ITU-R BT.709: Y = 16 + 219 * (0.2126 R + 0.7152 G + 0.0722 B) / 255.
    expected = 16 + 219 / 255 * (frames_THW3 @ np.array([0.2126, 0.7152, 0.0722]))
    assert np.abs(luma_THW - expected).max() <= 1.0


def test_a_mix_up_of_history_fails_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    runtime.tick(tick("a", 0))
    # The history now holds numbers that the model would write no more.
    monkeypatch.setattr("worldmodel.fake.NUMBERS_PER_SEED", 4096)
    with pytest.raises(TickRolledBack) as caught:
        runtime.tick(tick("a", 1))
    assert "sees K/V it did not write" in str(caught.value.__cause__)


def test_prompt_commands_fail_their_chunk_only() -> None:
    runtime = load_fake(prompt_commands=True)
    runtime.open(open_session("a"), image())
    with pytest.raises(TickRolledBack):
        runtime.tick(tick("a", 0, prompt="!late"))
    with pytest.raises(RequestRefused, match="expected ! and one of"):
        runtime.tick(tick("a", 0, prompt="!explode"))
    runtime.tick(tick("a", 0, prompt="plain"))


def test_options_come_back_complete() -> None:
    data = parse_options({"chunk_ms": 5, "failures": [{"kind": "crash", "chunk_index": 3}]})
    assert json.loads(data)["window_latent_frames"] == 6
    options = FakeOptions.from_json(data)
    assert options.chunk_ms == 5.0
    assert options.failures == (PlannedFailure(kind=FailureKind.CRASH, chunk_index=3, times=1),)
    assert FakeOptions.from_json(b"{}") == FakeOptions()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chunk_sm": 5}, "chunk_sm"),
        ({"chunk_ms": -1}, "chunk_ms"),
        ({"window_latent_frames": 2}, "window_latent_frames"),
        ({"failures": [{"kind": "explode", "chunk_index": 0}]}, "failures[0].kind"),
        ({"failures": [{"kind": "crash"}]}, "failures[0].chunk_index"),
        ({"load_error": 5}, "load_error"),
        ({"prompt_commands": 1}, "prompt_commands"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_options(options)
    assert caught.value.field == field


def test_a_load_error_is_what_was_ordered() -> None:
    with pytest.raises(LoadFailed, match="out of coffee"):
        load_fake(load_error="out of coffee")
