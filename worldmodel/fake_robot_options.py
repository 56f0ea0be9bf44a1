"""Options of the deterministic test robot. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from worldmodel.errors import RequestRefused
from worldmodel.json_checks import JsonReader
from worldmodel.setting_checks import check_precision
from worldmodel.wan.precision_names import Precision

_READER = JsonReader(code="bad_options", root="options")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRobotOptions:
    """Speed and failures of the test robot.

    `chunk_ms` and `load_ms` are how long a call and the load take at least. `prompt_commands`: the prompt "!KIND", with
    a word of `worldmodel.fake_options.FailureKind`, makes its call fail that way.
    """

    chunk_ms: float = 0.0
    load_ms: float = 0.0
    prompt_commands: bool = False

    @classmethod
    def from_json(cls, data: bytes) -> FakeRobotOptions:
        """Read back what `parse_options` wrote. Raises `RequestRefused` for anything else."""
        try:
            options = json.loads(data)
        except ValueError as error:
            raise _READER.refusal("", "expected JSON") from error
        return _read(options)


def parse_options(options: dict[str, object]) -> bytes:
    """Check the option table and return it complete, as canonical JSON. Raises `RequestRefused`."""
    return json.dumps(asdict(_read(options)), separators=(",", ":"), sort_keys=True).encode()


def check_settings(*, width: int, height: int, precision: str) -> None:
    """Refuse nothing but a precision that is none; it has no effect. Raises `RequestRefused`."""
    check_precision(precision, [each.value for each in Precision])


def parse_control(track: str, schema: str, data: object) -> bytes:
    """Refuse every control: a robot is steered by observations and prompts."""
    raise RequestRefused(f"schema {schema!r}: this model takes no controls", code="bad_control", field="schema")


def control_schemas() -> dict[str, object]:
    """Return no schema."""
    return {}


def _read(value: object) -> FakeRobotOptions:
    table = _READER.read_object(value, "", known=tuple(FakeRobotOptions.__dataclass_fields__))

    def milliseconds(key: str) -> float:
        return _READER.read_number(table.get(key, 0.0), key, minimum=0.0, maximum=600_000.0)

    return FakeRobotOptions(
        chunk_ms=milliseconds("chunk_ms"),
        load_ms=milliseconds("load_ms"),
        prompt_commands=_READER.read_bool(table.get("prompt_commands", False), "prompt_commands"),
    )
