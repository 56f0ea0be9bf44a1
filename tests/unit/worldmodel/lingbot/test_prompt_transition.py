"""A new prompt that comes into force over several chunks: rows, interruptions, and what the transformer is given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.fake_model import image, open_session, reset_session, tick
from tests.support.lingbot_tiny import cache_of, snapshot, text_kv, tiny_adapter
from worldmodel.errors import RequestRefused
from worldmodel.lingbot.controls import TRANSITION_SCHEMA, parse_control
from worldmodel.lingbot.prompt_transition import PromptCourse, blend_rows, transition_chunks
from worldmodel.lingbot.prompts import Prompt
from worldmodel.messages import Control, ControlEvent, MediaFormat
from worldmodel.runtime import Runtime

OLD = Prompt(text="old", rows_LC=torch.tensor([[8.0, 4.0]]))
NEW = Prompt(text="new", rows_LC=torch.tensor([[0.0, 8.0], [4.0, -4.0]]))
LATENT = (MediaFormat.LATENT,)


def over(chunks: int, event_id: int = 0) -> ControlEvent:
    data = parse_control("prompt", TRANSITION_SCHEMA, {"chunks": chunks})
    return ControlEvent(event_id=event_id, controls=(Control(track="prompt", schema=TRANSITION_SCHEMA, data=data),))


def rows_of(course: PromptCourse, num_chunks: int) -> list[list[list[float]]]:
    found = []
    for _ in range(num_chunks):
        course = course.advanced()
        found.append(course.rows_LC.tolist())
    return found


def test_rows_go_linearly_to_the_prompt_and_missing_rows_are_zero() -> None:
    course = PromptCourse(prompt=OLD).toward(NEW, 4)
    assert rows_of(course, 5) == [
        [[6.0, 5.0], [1.0, -1.0]],
        [[4.0, 6.0], [2.0, -2.0]],
        [[2.0, 7.0], [3.0, -3.0]],
        [[0.0, 8.0], [4.0, -4.0]],
        [[0.0, 8.0], [4.0, -4.0]],
    ]
    back = PromptCourse(prompt=NEW).toward(OLD, 2)
    assert rows_of(back, 2) == [[[4.0, 6.0], [2.0, -2.0]], [[8.0, 4.0]]]


def test_one_chunk_is_a_switch() -> None:
    course = PromptCourse(prompt=OLD).toward(NEW, 1).advanced()
    assert course.is_reached
    assert course.rows_LC is NEW.rows_LC


def test_a_new_way_begins_where_the_old_one_stood() -> None:
    half = PromptCourse(prompt=OLD).toward(NEW, 2).advanced()
    assert rows_of(half.toward(OLD, 2), 2) == [[[6.0, 5.0], [1.0, -1.0]], [[8.0, 4.0]]]


def test_rows_keep_the_type_of_the_prompt() -> None:
    rows = blend_rows(OLD.rows_LC.bfloat16(), NEW.rows_LC.bfloat16(), 0.5)
    assert rows.dtype is torch.bfloat16
    assert rows.tolist() == [[4.0, 6.0], [2.0, -2.0]]


def test_the_last_control_says_how_long() -> None:
    assert transition_chunks([]) == 1
    assert transition_chunks([over(5, 7), over(3, 2)]) == 5
    bad = ControlEvent(event_id=0, controls=(Control(track="prompt", schema=TRANSITION_SCHEMA, data=b'{"chunks":0}'),))
    with pytest.raises(RequestRefused, match="from 1 to 256"):
        transition_chunks([bad])


# ---------------------------------------------------------------- through the runtime


class World:
    """One session of a tiny model, tick by tick."""

    def __init__(self, prompt: str, **options: object) -> None:
        self.adapter = tiny_adapter(**options)
        self.kv = cache_of(self.adapter)
        self.runtime = Runtime(self.adapter, self.kv)
        self.runtime.open(open_session("a", prompt=prompt, outputs=LATENT), image())
        self.index = 0

    def chunk(self, *events: ControlEvent, prompt: str | None = None) -> bytes:
        _, (latents,) = self.runtime.tick(tick("a", self.index, *events, prompt=prompt)).to_host()
        self.index += 1
        return bytes(latents.tobytes())

    def text(self) -> list[torch.Tensor]:
        return text_kv(self.kv, "a")


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_transformer_attends_to_the_way_and_then_to_the_prompt() -> None:
    slow, sudden = World("a street"), World("a street")
    assert slow.chunk() == sudden.chunk()
    assert slow.chunk(over(3), prompt="a forest") != sudden.chunk(prompt="a forest")
    first = slow.text()
    assert not same(first, sudden.text())
    slow.chunk()
    assert not same(slow.text(), first)
    slow.chunk()
    assert same(slow.text(), sudden.text())
    slow.chunk()
    assert same(slow.text(), sudden.text())


def test_a_way_of_one_chunk_and_a_length_without_a_prompt_change_nothing() -> None:
    plain, told = World("a street"), World("a street")
    assert plain.chunk() == told.chunk(over(4))
    assert plain.chunk(prompt="a forest") == told.chunk(over(1), prompt="a forest")
    assert plain.chunk() == told.chunk(over(4, 1), prompt="a forest")


def test_the_prompt_under_way_is_not_set_out_for_again() -> None:
    once, again = World("a street"), World("a street")
    for world in (once, again):
        world.chunk(over(3), prompt="a forest")
    assert once.chunk() == again.chunk(over(9, 1), prompt="a forest")
    assert once.chunk() == again.chunk()


def test_a_failed_chunk_does_not_advance_the_way() -> None:
    world, twin = World("a street"), World("a street")
    for each in (world, twin):
        each.chunk(over(3), prompt="a forest")
    before = snapshot(world.runtime, world.kv, "a")
    bad = ControlEvent(event_id=1, controls=(Control(track="camera", schema="x", data=b"{}"),))
    with pytest.raises(RequestRefused):
        world.chunk(bad)
    assert snapshot(world.runtime, world.kv, "a") == before
    assert world.chunk() == twin.chunk()


def test_a_reset_forgets_the_way() -> None:
    world, fresh = World("a street"), World("a town")
    world.chunk(over(4), prompt="a forest")
    world.runtime.reset(reset_session("a", prompt="a town"), None)
    world.index = 0
    assert [world.chunk() for _ in range(2)] == [fresh.chunk() for _ in range(2)]


def test_history_is_encoded_anew_once_the_prompt_is_reached() -> None:
    """With `recache_on_prompt` only the last chunk of the way sees another history than without."""
    kept, anew = World("a street"), World("a street", recache_on_prompt=True)
    for world in (kept, anew):
        world.chunk()
    for index in range(3):
        chunks = [world.chunk(*(over(3),) * (index == 0), prompt="a forest") for world in (kept, anew)]
        latents = [np.frombuffer(chunk, np.float32) for chunk in chunks]
        assert np.array_equal(*latents) == (index < 2), f"chunk {index} of the way"
