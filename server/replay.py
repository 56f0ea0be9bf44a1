"""From the lines of an event log to the steps of a job: which events belong to which chunk. No clock, no I/O.

Two forms, told apart by the first line:

    recorded    as the server writes it, see `server/event_log.py`
    plain       {"event_id": 0, "prompt": "a town", "frames": [["w"], ["w", "l"], []]}, one line for each chunk
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.event_log import LoggedImage, LogReset, LogStart, LogTick, control_events, decode_line, decode_object
from server.generate import ACTIONS_SCHEMA, TRACK, GenerateStep, NewRun
from server.uploads import RawImage
from worldmodel.catalog import ControlParser
from worldmodel.errors import RequestRefused
from worldmodel.messages import Control, ControlEvent, ModelInfo

ImageLoader = Callable[[LoggedImage], RawImage]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReplay:
    """A recorded session: how it began, and one step for each of its chunks."""

    start: LogStart
    image: RawImage
    steps: tuple[GenerateStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReplay:
    """A plain log: the prompt of its first line, and one step for each line."""

    prompt: str
    steps: tuple[GenerateStep, ...]


def is_recorded(text: bytes) -> bool:
    """Tell the two forms apart. Raises `ValueError` if the first line is no JSON object."""
    for _, line in _lines(text):
        return "log" in decode_object(line)
    raise ValueError("the log is empty")


def read_recorded(text: bytes, parse_control: ControlParser, load_image: ImageLoader) -> RecordedReplay:
    """Read a recorded log. Raises `ValueError` that names the line."""
    start: LogStart | None = None
    image: RawImage | None = None
    steps = _Steps(parse_control, load_image)
    for number, line in _lines(text):
        try:
            entry = decode_line(line)
            match entry:
                case LogStart():
                    if start is not None:
                        raise ValueError("a second session starts here; a log has one")
                    start, image = entry, load_image(entry.image)
                case LogReset():
                    steps.reset(entry)
                case LogTick():
                    steps.tick(entry)
        except (ValueError, RequestRefused) as error:
            raise ValueError(f"line {number}: {error}") from error
    if start is None or image is None:
        raise ValueError("the log does not say how its session began")
    if not steps.steps:
        raise ValueError("the log has no chunk")
    return RecordedReplay(start=start, image=image, steps=tuple(steps.steps))


class _Steps:
    """Collects steps and checks that runs and chunks follow each other."""

    def __init__(self, parse_control: ControlParser, load_image: ImageLoader) -> None:
        self.steps: list[GenerateStep] = []
        self._parse_control = parse_control
        self._load_image = load_image
        self._run = 0
        self._next_chunk_index = 0
        self._new_run: NewRun | None = None

    def reset(self, entry: LogReset) -> None:
        if entry.run != self._run + 1:
            raise ValueError(f"run: expected {self._run + 1}, got {entry.run}")
        image = None if entry.reset.image is None else self._load_image(entry.reset.image)
        before = self._new_run
        # A run without chunks leaves nothing but its image.
        self._new_run = NewRun(
            prompt=entry.reset.prompt,
            seed=entry.reset.seed,
            image=image.size if image else before.image if before else None,
            image_rgb=image.pixels if image else before.image_rgb if before else None,
        )
        self._run, self._next_chunk_index = entry.run, 0

    def tick(self, entry: LogTick) -> None:
        if (entry.run, entry.chunk_index) != (self._run, self._next_chunk_index):
            raise ValueError(
                f"expected chunk {self._next_chunk_index} of run {self._run}, "
                f"got chunk {entry.chunk_index} of run {entry.run}"
            )
        events = tuple(self._checked(event) for event in control_events(entry))
        self.steps.append(GenerateStep(events=events, prompt=entry.prompt, new_run=self._new_run))
        self._new_run = None
        self._next_chunk_index += 1

    def _checked(self, event: ControlEvent) -> ControlEvent:
        controls = tuple(
            Control(track=it.track, schema=it.schema, data=self._parse_control(it.track, it.schema, _json(it.data)))
            for it in event.controls
        )
        return ControlEvent(event_id=event.event_id, controls=controls, age_ms=event.age_ms)


# ---------------------------------------------------------------- plain


class _PlainLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chunk. `prompt` None keeps the one before; `frames` has the keys of each latent frame."""

    event_id: int
    prompt: str | None = None
    frames: list[list[str]] = []


def read_plain(text: bytes, parse_control: ControlParser) -> PlainReplay:
    """Read a plain log. Raises `ValueError` that names the line."""
    steps: list[GenerateStep] = []
    first_prompt: str | None = None
    prompt: str | None = None
    last_event_id = -1
    for number, text_line in _lines(text):
        try:
            line = msgspec.json.decode(text_line, type=_PlainLine)
            if line.event_id <= last_event_id:
                raise ValueError(f"event_id: expected a number above {last_event_id}, got {line.event_id}")
            if first_prompt is None:
                if line.prompt is None:
                    raise ValueError("prompt: the first line must have one")
                first_prompt = prompt = line.prompt
            changed = line.prompt if line.prompt != prompt else None
            prompt = line.prompt if line.prompt is not None else prompt
            steps.append(GenerateStep(events=_plain_events(line, parse_control), prompt=changed))
        except (ValueError, RequestRefused) as error:
            raise ValueError(f"line {number}: {error}") from error
        last_event_id = line.event_id
    if first_prompt is None:
        raise ValueError("the log is empty")
    return PlainReplay(prompt=first_prompt, steps=tuple(steps))


def _plain_events(line: _PlainLine, parse_control: ControlParser) -> tuple[ControlEvent, ...]:
    if not line.frames:
        return ()
    data = parse_control(TRACK, ACTIONS_SCHEMA, {"mode": "script", "frames": line.frames})
    return (ControlEvent(event_id=line.event_id, controls=(Control(track=TRACK, schema=ACTIONS_SCHEMA, data=data),)),)


# ---------------------------------------------------------------- is it the same model


def differing_facts(start: LogStart, info: ModelInfo, model_options: bytes) -> list[str]:
    """List what makes other chunks than those of the log: "name: the log has A, this is B"."""
    pairs: Sequence[tuple[str, object, object]] = (
        ("model", start.model, info.model),
        ("model_digest", start.model_digest, info.checkpoint_digest),
        ("size", f"{start.width}x{start.height}", f"{info.width}x{info.height}"),
        ("noise_layout", start.noise_layout, info.noise_layout),
        ("sampler", start.sampler, info.sampler),
        ("model_options", _json(bytes(start.model_options)), _json(model_options)),
    )
    return _differences(pairs)


def differing_circumstances(start: LogStart, info: ModelInfo, version: str) -> list[str]:
    """List what may change the last bits: device, precision, kernels, versions."""
    build = {"worldserve": version, **info.versions}
    pairs: list[tuple[str, object, object]] = [
        ("device", start.device, info.device),
        ("precision", start.precision, info.precision),
        ("attention_backend", start.attention_backend, info.attention_backend),
    ]
    pairs += [(name, start.build.get(name), build.get(name)) for name in sorted(start.build.keys() | build.keys())]
    return _differences(pairs)


def _differences(pairs: Sequence[tuple[str, object, object]]) -> list[str]:
    return [f"{name}: the log has {logged}, this is {ours}" for name, logged, ours in pairs if logged != ours]


# ---------------------------------------------------------------- text


def _lines(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Give lines that are not empty, with their numbers from 1."""
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _json(text: bytes) -> Any:
    return json.loads(text)
