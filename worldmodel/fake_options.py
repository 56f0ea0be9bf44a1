"""Options of the deterministic test model, among them the failures it is told to have. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from worldmodel.clips import ClipPlan, ClipWish
from worldmodel.errors import RequestRefused
from worldmodel.json_checks import JsonReader
from worldmodel.lingbot.clip_plan import plan_with
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.setting_checks import check_precision, check_sides
from worldmodel.wan.precision_names import Precision

LATENT_FRAMES_PER_CHUNK = 3
PIXELS_PER_LATENT = 8

_READER = JsonReader(code="bad_options", root="options")


class FailureKind(StrEnum):
    """What goes wrong in a chunk.

    REFUSE: input the client can correct. EARLY, LATE: an exception before and after K/V was written. TRANSIENT: LATE,
    but a retry may help.
    INCOMPLETE: K/V of the last layer is missing at the commit. WRONG_EVENTS: other events than the tick's are reported.
    NOT_FINITE: latents and pictures, or actions, are reported as not finite.
    MEDIA: the media is lost after the commit. CRASH: the process dies. HANG: the chunk never ends.
    """

    REFUSE = "refuse"
    EARLY = "early"
    LATE = "late"
    TRANSIENT = "transient"
    INCOMPLETE = "incomplete"
    WRONG_EVENTS = "wrong_events"
    NOT_FINITE = "not_finite"
    MEDIA = "media"
    CRASH = "crash"
    HANG = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFailure:
    """A failure of the first `times` chunks with this index, counted over all sessions of the process."""

    kind: FailureKind
    chunk_index: int
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Geometry, speed and failures of the test model.

    `chunk_ms` and `load_ms` are how long a chunk and the load take at least. `prompt_commands`: a new prompt "!KIND",
    with a word of `FailureKind`, makes its chunk fail that way. `load_error`: the load fails with this text.
    `warm_up_failure`: every chunk of the warm-up fails that way.
    """

    chunk_ms: float = 0.0
    load_ms: float = 0.0
    sink_latent_frames: int = 3
    window_latent_frames: int = 6
    failures: tuple[PlannedFailure, ...] = ()
    prompt_commands: bool = False
    load_error: str | None = None
    warm_up_failure: FailureKind | None = None

    @classmethod
    def from_json(cls, data: bytes) -> FakeOptions:
        """Read back what `parse_options` wrote. Raises `RequestRefused` for anything else."""
        try:
            options = json.loads(data)
        except ValueError as error:
            raise _READER.refusal("", "expected JSON") from error
        return _read(options)


def plan_clip(wish: ClipWish) -> ClipPlan:
    """Plan a clip for the test model, whose chunks have the published length. Raises `RequestRefused`."""
    return plan_with(wish, LingBotOptions(), latent_frames_per_chunk=LATENT_FRAMES_PER_CHUNK)


def parse_options(options: dict[str, object]) -> bytes:
    """Check the option table and return it complete, as canonical JSON. Raises `RequestRefused`."""
    return json.dumps(asdict(_read(options)), separators=(",", ":"), sort_keys=True).encode()


def check_settings(*, width: int, height: int, precision: str) -> None:
    """Refuse pictures of broken latents; the precision has no effect but must be one. Raises `RequestRefused`."""
    check_sides(width, height, step_px=PIXELS_PER_LATENT)
    check_precision(precision, [each.value for each in Precision])


def command_of(prompt: str | None) -> FailureKind | None:
    """Return the failure that a prompt orders. Raises `RequestRefused` for an unknown word."""
    if prompt is None or not prompt.startswith("!"):
        return None
    kinds = [str(kind) for kind in FailureKind]
    if prompt[1:] not in kinds:
        raise RequestRefused(f"prompt: expected ! and one of {', '.join(kinds)}", code="bad_prompt", field="prompt")
    return FailureKind(prompt[1:])


def _read(value: object) -> FakeOptions:
    table = _READER.read_object(value, "", known=tuple(FakeOptions.__dataclass_fields__))
    default = FakeOptions()

    def milliseconds(key: str) -> float:
        return _READER.read_number(table.get(key, 0.0), key, minimum=0.0, maximum=600_000.0)

    failures = _READER.read_list(table.get("failures", []), "failures", minimum=0, maximum=64, of="failures")
    load_error = table.get("load_error")
    if load_error is not None and not isinstance(load_error, str):
        raise _READER.expected("load_error", "a text", load_error)
    return FakeOptions(
        chunk_ms=milliseconds("chunk_ms"),
        load_ms=milliseconds("load_ms"),
        sink_latent_frames=_READER.read_integer(
            table.get("sink_latent_frames", default.sink_latent_frames), "sink_latent_frames", minimum=0, maximum=64
        ),
        window_latent_frames=_READER.read_integer(
            table.get("window_latent_frames", default.window_latent_frames),
            "window_latent_frames",
            minimum=3,
            maximum=64,
        ),
        failures=tuple(_read_failure(item, f"failures[{index}]") for index, item in enumerate(failures)),
        prompt_commands=_READER.read_bool(table.get("prompt_commands", False), "prompt_commands"),
        load_error=load_error,
        warm_up_failure=_read_optional_kind(table.get("warm_up_failure"), "warm_up_failure"),
    )


def _read_optional_kind(value: object, path: str) -> FailureKind | None:
    if value is None:
        return None
    return FailureKind(_READER.read_choice(value, path, [str(kind) for kind in FailureKind]))


def _read_failure(value: object, path: str) -> PlannedFailure:
    table = _READER.read_object(value, path, known=("kind", "chunk_index", "times"), required=("kind", "chunk_index"))
    kind = _READER.read_choice(table["kind"], f"{path}.kind", [str(kind) for kind in FailureKind])
    return PlannedFailure(
        kind=FailureKind(kind),
        chunk_index=_READER.read_integer(table["chunk_index"], f"{path}.chunk_index", minimum=0, maximum=2**31),
        times=_READER.read_integer(table.get("times", 1), f"{path}.times", minimum=1, maximum=2**31),
    )
