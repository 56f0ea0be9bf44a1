"""The judge of clients: a right client passes every rule, and each wrong one is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from clients.conformance.client_judge import CUT_AFTER_CHUNK, ClientJudge
from clients.conformance.runner import Outcome, Result
from clients.conformance.table import conforms, to_json, verdict
from server.wire.messages import AppliedEventHeader, ChunkHeader


class Story:
    """One session as the judge hears of it; tests leave parts out or change them."""

    def __init__(self) -> None:
        self.judge = ClientJudge()
        self.epoch = 0

    def say(self, type: str, **fields: Any) -> None:
        self.judge.from_client(json.dumps({"type": type, **fields}))

    def hear(self, type: str, **fields: Any) -> None:
        self.judge.from_server(json.dumps({"type": type, **fields}))

    def connect(self, **fields: Any) -> None:
        """Start, or with a resume token resume."""
        self.epoch += 1
        self.judge.connected()
        begin = fields or {"prompt": "a town", "image": {"name": "day"}}
        self.say("session.start", protocol=1, **begin)
        pacing = fields.get("pacing", "playback")
        self.hear("session.started", epoch=self.epoch, resume_token=f"t-{self.epoch}", pacing=pacing)

    def chunk(self, index: int, *applied: int, report: bool = True) -> None:
        events = [AppliedEventHeader(event_id=each, latent_frame=0, wait_ms=1.0) for each in applied]
        fields = {"session_id": "s", "epoch": self.epoch, "run": 0, "timescale": 12}
        header = ChunkHeader(kind="media", chunk_index=index, num_frames=12, applied=events, **fields)
        if self.judge.chunk(header):
            self.judge.cut()
        if report:
            self.say("playback", epoch=self.epoch, run=0, chunk_index=index, buffered_ms=0)

    def event(self, event_id: int) -> None:
        self.say("session.event", event_id=event_id, prompt="night")

    def close(self) -> None:
        self.say("session.close")
        self.hear("session.closed", session_id="s", reason="client")

    def until_cut(self) -> None:
        self.connect()
        self.event(0)
        self.hear("event.queued", event_id=0)
        for index in range(CUT_AFTER_CHUNK + 1):
            self.chunk(index, *([0] if index == 1 else []))

    def resume(self, **fields: Any) -> None:
        self.connect(**{"resume_token": "t-1", "last_chunk_index": CUT_AFTER_CHUNK, "run": 0, **fields})

    def results(self) -> dict[str, Result]:
        return {result.name: result for result in self.judge.results()}


def whole() -> Story:
    story = Story()
    story.until_cut()
    story.event(1)
    story.resume()
    story.event(1)
    story.chunk(CUT_AFTER_CHUNK + 1, 1)
    story.close()
    return story


def test_a_right_client_passes_every_rule() -> None:
    story = whole()
    assert story.judge.is_over
    assert {result.outcome for result in story.results().values()} == {Outcome.PASS}


def found(story: Story) -> set[str]:
    return {name for name, result in story.results().items() if result.outcome is Outcome.FAIL}


WRONG: dict[str, tuple[Callable[[Story], None], str, str]] = {
    "binary": (lambda story: story.judge.from_client(b"\0"), "client.messages", "binary frame of 1 bytes"),
    "no JSON": (lambda story: story.judge.from_client("{"), "client.messages", "no message of the protocol: {"),
    "an unknown field": (lambda story: story.say("ping", t=1, u=2), "client.messages", "ping: u: Extra inputs"),
    "an id twice": (lambda story: story.event(0), "client.events", "event_id 0 after 1"),
    "a report of an old epoch": (
        lambda story: story.say("playback", epoch=1, run=0, chunk_index=4, buffered_ms=0),
        "client.epoch",
        "a report of epoch 1 in epoch 2",
    ),
    "a report backwards": (
        lambda story: story.say("playback", epoch=2, run=0, chunk_index=0, buffered_ms=0),
        "client.playback",
        f"chunk 0 of run 0 is reported after {CUT_AFTER_CHUNK + 1}",
    ),
    "a report of what has not come": (
        lambda story: story.say("playback", epoch=2, run=0, chunk_index=CUT_AFTER_CHUNK + 2, buffered_ms=0),
        "client.playback",
        f"chunk {CUT_AFTER_CHUNK + 2} of run 0 is reported, the last that came is {CUT_AFTER_CHUNK + 1}",
    ),
    "something refused": (
        lambda story: story.hear("error", code="bad_control", message="held[0]: x", event_id=2),
        "client.refusals",
        "bad_control: held[0]: x",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_found(name: str) -> None:
    act, rule, reason = WRONG[name]
    story = whole()
    act(story)
    assert found(story) == {rule}
    assert reason in story.results()[rule].reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resume_token": "t-0"}, "without the newest resume_token"),
        ({"last_chunk_index": CUT_AFTER_CHUNK + 1}, f"the last chunk sent is {CUT_AFTER_CHUNK}"),
    ],
)
def test_a_wrong_resume_is_found(fields: dict[str, Any], reason: str) -> None:
    story = Story()
    story.until_cut()
    story.resume(**fields)
    story.chunk(CUT_AFTER_CHUNK + 1)
    story.close()
    assert found(story) == {"client.resume"}
    assert reason in story.results()["client.resume"].reason


def test_who_stays_away_or_leaves_without_a_word_is_found() -> None:
    story = Story()
    story.until_cut()
    assert found(story) == {"client.resume", "client.close"}
    assert found(Story()) == {"client.start", "client.close"}


def test_who_reports_nothing_is_found_unless_its_pacing_needs_none() -> None:
    for pacing, wrong in (("playback", {"client.playback"}), ("clock", set())):
        story = Story()
        story.connect(prompt="a town", image={"name": "day"}, pacing=pacing)
        story.chunk(0, report=False)
        story.close()
        assert found(story) == wrong
        outcomes = {name: result.outcome for name, result in story.results().items()}
        not_seen = {"client.events", "client.steering", "client.resume"}
        assert {outcomes[name] for name in not_seen} == {Outcome.NOT_SEEN}


def test_who_leaves_early_or_sends_no_event_is_incomplete() -> None:
    story = Story()
    story.connect()
    story.chunk(0)
    story.close()
    results = story.judge.results()
    assert not conforms(results)
    assert not json.loads(to_json(results, url="u"))["conforming"]
    assert verdict(results).startswith("incomplete: not seen client.events, client.steering, client.resume; 5 checks")
    results = whole().judge.results()
    assert conforms(results)
    assert verdict(results) == "conforming: 9 checks passed"
