"""What a client of the `world` dialect did right and wrong, by the frames that went both ways. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from clients.conformance.runner import Outcome, Result
from server.wire.messages import ChunkHeader, ClientMessage, Pacing, WireModel

CUT_AFTER_CHUNK = 4
"""The link is cut once, right behind this chunk of the first run."""

_RULES: dict[str, tuple[str, str]] = {
    "client.messages": ("The world protocol", "every frame is a message of the protocol"),
    "client.start": ("session.start", "session.start comes first and is accepted"),
    "client.refusals": ("Error codes", "nothing that is sent is refused"),
    "client.events": ("session.event", "ids rise, and are sent again only after a lost link"),
    "client.steering": ("session.event", "an event is applied"),
    "client.playback": ("Pacing", "chunks are reported in order, once they have come"),
    "client.resume": ("Resume", "a lost link is resumed with the newest token"),
    "client.epoch": ("Resume", "what comes after a resume is reported in the new epoch"),
    "client.close": ("session.close", "session.close ends the session"),
}

_MUST_BE_SEEN = ("client.events", "client.steering", "client.resume")
"""Without these nothing is known of what makes a client: that it steers, and that it comes back."""

_MODELS: dict[str, list[type[WireModel]]] = {}
for _model in get_args(ClientMessage):
    _MODELS.setdefault(get_args(_model.model_fields["type"].annotation)[0], []).append(_model)


@dataclass(slots=True)
class _Link:
    """One connection of the client."""

    is_first: bool
    num_sent: int = 0
    epoch: int | None = None
    event_ids: set[int] = field(default_factory=set)
    reported: dict[int, int] = field(default_factory=dict)


class ClientJudge:
    """Tell it all that happens on the links of one session, in order; `results` says what came of it."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}
        self._links: list[_Link] = []
        self._pacing: str = Pacing.PLAYBACK
        self._resume_token: str | None = None
        self._highest_event_id = -1
        self._answered: set[int] = set()
        self._last_chunk: tuple[int, int] = (0, -1)
        self._sent: dict[int, int] = {}
        self._was_cut = False
        self._was_started = self._was_applied = self._was_resumed = False
        self._sent_close = self._was_closed = False

    # ------------------------------------------------------------ what happens

    def connected(self) -> None:
        self._links.append(_Link(is_first=not self._links))

    def cut(self) -> None:
        """Note that the link was cut, by no fault of the client."""
        self._was_cut = True

    def from_client(self, frame: str | bytes) -> None:
        self._link.num_sent += 1
        if isinstance(frame, bytes):
            return self._fail("client.messages", f"a binary frame of {len(frame)} bytes: clients send text only")
        try:
            message = json.loads(frame)
            kind = message["type"]
            errors = [_error(model, frame) for model in _MODELS[kind]]
        except (ValueError, KeyError, TypeError):
            return self._fail("client.messages", f"no message of the protocol: {frame[:120]}")
        if all(errors):
            return self._fail("client.messages", f"{kind}: {errors[-1]}")
        if self._link.num_sent == 1:
            self._first(message)
        match kind:
            case "session.event":
                self._event(message["event_id"])
            case "playback":
                self._report(message["epoch"], message["run"], message["chunk_index"])
            case "session.close":
                self._sent_close = True

    def from_server(self, text: str) -> None:
        message = json.loads(text)
        match message["type"]:
            case "session.started":
                self._was_resumed = self._was_started
                self._was_started = True
                self._resume_token = message["resume_token"]
                self._pacing = message["pacing"]
                self._link.epoch = message["epoch"]
            case "event.queued" | "event.dropped":
                self._answered.add(message["event_id"])
            case "session.closed":
                self._was_closed = True
            case "error":
                self._refused(message)

    def chunk(self, header: ChunkHeader) -> bool:
        """Note a chunk on its way to the client; returns whether the link is to be cut behind it."""
        if header.chunk_index is None:
            return False
        self._sent[header.run] = header.chunk_index
        self._last_chunk = (header.run, header.chunk_index)
        self._answered.update(event.event_id for event in header.applied)
        self._was_applied = self._was_applied or bool(header.applied)
        return not self._was_cut and header.chunk_index >= CUT_AFTER_CHUNK

    @property
    def is_over(self) -> bool:
        return self._was_closed

    # ------------------------------------------------------------ rules

    @property
    def _link(self) -> _Link:
        return self._links[-1]

    def _first(self, message: dict[str, Any]) -> None:
        if message["type"] not in ("session.start", "ping"):
            self._fail("client.start", f"the first message is {message['type']}")
        if self._link.is_first or message["type"] != "session.start":
            return
        if message.get("resume_token") != self._resume_token:
            return self._fail("client.resume", "after a lost link came a session.start without the newest resume_token")
        run, index = self._last_chunk
        if message["last_chunk_index"] > index and message.get("run", run) == run:
            self._fail(
                "client.resume", f"last_chunk_index {message['last_chunk_index']}: the last chunk sent is {index}"
            )

    def _event(self, event_id: int) -> None:
        if event_id > self._highest_event_id:
            self._highest_event_id = event_id
        elif self._link.is_first or event_id in self._link.event_ids or event_id in self._answered:
            self._fail("client.events", f"event_id {event_id} after {self._highest_event_id}")
        self._link.event_ids.add(event_id)

    def _report(self, epoch: int, run: int, chunk_index: int) -> None:
        if epoch != self._link.epoch:
            return self._fail("client.epoch", f"a report of epoch {epoch} in epoch {self._link.epoch}")
        before, sent = self._link.reported.get(run, -1), self._sent.get(run, -1)
        if chunk_index < before:
            self._fail("client.playback", f"chunk {chunk_index} of run {run} is reported after {before}")
        elif chunk_index > sent:
            self._fail("client.playback", f"chunk {chunk_index} of run {run} is reported, the last that came is {sent}")
        self._link.reported[run] = chunk_index

    def _refused(self, error: dict[str, Any]) -> None:
        if error["code"] == "duplicate" and not self._link.is_first:
            self._answered.add(error["event_id"])
        elif error["code"] != "resume_gap":
            self._fail("client.refusals", f"{error['code']}: {error['message']}")

    def _fail(self, name: str, reason: str) -> None:
        """Keep the first failure of a rule."""
        self._failures.setdefault(name, reason)

    # ------------------------------------------------------------ verdict

    def results(self) -> list[Result]:
        if not self._was_started:
            self._fail("client.start", "no session was started")
        if self._was_cut and not self._was_resumed:
            self._fail("client.resume", "the link was cut, and the client did not come back")
        if self._reports and not any(link.reported for link in self._links):
            self._fail("client.playback", "not one chunk was reported, and pacing is playback")
        if self._was_resumed and self._reports and not self._links[-1].reported:
            self._fail("client.epoch", "nothing was reported after the resume")
        if not (self._sent_close and self._was_closed):
            self._fail("client.close", "the client left without session.close and its answer")
        return [self._result(name) for name in _RULES]

    @property
    def _reports(self) -> bool:
        return self._pacing == Pacing.PLAYBACK and self._was_started

    def _result(self, name: str) -> Result:
        section, rule = _RULES[name]
        reason = self._failures.get(name)
        outcome = Outcome.PASS if reason is None else Outcome.FAIL
        if reason is None and (missing := self._not_seen(name)):
            outcome = Outcome.NOT_SEEN if name in _MUST_BE_SEEN else Outcome.NOT_APPLICABLE
            reason = missing
        return Result(name=name, section=section, rule=rule, outcome=outcome, reason=reason or "", took_s=0.0)

    def _not_seen(self, name: str) -> str:
        """Say why a rule could not be seen, if it could not."""
        if name in ("client.events", "client.steering") and self._highest_event_id < 0:
            return "the client sent no event"
        if name == "client.steering" and not self._was_applied:
            return "the client left before its event was applied"
        if name in ("client.playback", "client.epoch") and not self._reports:
            return f"pacing is {self._pacing}"
        if name in ("client.resume", "client.epoch") and not self._was_cut:
            return f"the client left before chunk {CUT_AFTER_CHUNK}, behind which its link is cut"
        return ""


def _error(model: type[WireModel], frame: str) -> str | None:
    """Return what is wrong with a frame as this message, None if nothing is."""
    try:
        TypeAdapter(model).validate_json(frame)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return None
