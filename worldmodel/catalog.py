"""The models we serve: one literal row per model. Torch-free, so the server may import it.

A row names code by "module:attribute"; resolving a row imports that module and nothing else. The control module is
torch-free, the adapter module is for the worker only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, cast

from worldmodel.clips import ClipPlanner
from worldmodel.errors import RequestRefused


class ControlParser(Protocol):
    """Check one control of a client and return its canonical JSON bytes.

    `data` is parsed JSON. Raises `RequestRefused` whose `field` is a path below `data`, such as
    ``transitions[0].actions[1]``.
    """

    def __call__(self, track: str, schema: str, data: object) -> bytes: ...


class OptionsParser(Protocol):
    """Check a model's own options from the configuration file and return them as JSON bytes."""

    def __call__(self, options: dict[str, object]) -> bytes: ...


class SettingsCheck(Protocol):
    """Check what a model makes of the settings that every model has, as far as no checkpoint is needed for it.

    Raises `RequestRefused` whose `field` is the argument, with which the text begins.
    """

    def __call__(self, *, width: int, height: int, precision: str) -> None: ...


class ModelKind(StrEnum):
    """What clients do with a model, and so which dialects the server speaks for it.

    WORLD: controls in, media out. ROBOT: camera pictures and joint states in, actions out.
    """

    WORLD = "world"
    ROBOT = "robot"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model. `control_schemas` are shown to clients in `session.started` (JSON Schema per control schema name).

    `plan_clip` is None for a model that makes no clips.
    """

    name: str
    title: str
    kind: ModelKind
    parse_control: str
    parse_options: str
    check_settings: str
    control_schemas: str
    adapter: str
    plan_clip: str | None = None


ENTRIES: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name="lingbot_world_v2",
        title="LingBot-World v2",
        kind=ModelKind.WORLD,
        parse_control="worldmodel.lingbot.controls:parse_control",
        parse_options="worldmodel.lingbot.config:parse_options",
        check_settings="worldmodel.lingbot.settings:check_settings",
        control_schemas="worldmodel.lingbot.control_schemas:control_schemas",
        adapter="worldmodel.lingbot.adapter:create_adapter",
        plan_clip="worldmodel.lingbot.clip_plan:plan_clip",
    ),
    CatalogEntry(
        name="dreamzero",
        title="DreamZero",
        kind=ModelKind.ROBOT,
        parse_control="worldmodel.dreamzero.controls:parse_control",
        parse_options="worldmodel.dreamzero.config:parse_options",
        check_settings="worldmodel.dreamzero.settings:check_settings",
        control_schemas="worldmodel.dreamzero.controls:control_schemas",
        adapter="worldmodel.dreamzero.adapter:create_adapter",
    ),
    CatalogEntry(
        name="fake_robot",
        title="Deterministic test robot",
        kind=ModelKind.ROBOT,
        parse_control="worldmodel.fake_robot_options:parse_control",
        parse_options="worldmodel.fake_robot_options:parse_options",
        check_settings="worldmodel.fake_robot_options:check_settings",
        control_schemas="worldmodel.fake_robot_options:control_schemas",
        adapter="worldmodel.fake_robot:create_adapter",
    ),
    CatalogEntry(
        name="fake",
        title="Deterministic test model",
        kind=ModelKind.WORLD,
        parse_control="worldmodel.lingbot.controls:parse_control",
        parse_options="worldmodel.fake_options:parse_options",
        check_settings="worldmodel.fake_options:check_settings",
        control_schemas="worldmodel.lingbot.control_schemas:control_schemas",
        adapter="worldmodel.fake:create_adapter",
        plan_clip="worldmodel.fake_options:plan_clip",
    ),
)


def lookup(name: str) -> CatalogEntry:
    """Find a model by name. Raises `RequestRefused` naming the known models."""
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in ENTRIES)
    raise RequestRefused(f"unknown model {name!r}: expected one of {known}", code="unknown_model", field="model")


def resolve(path: str) -> Callable[..., Any]:
    """Import "module:attribute" and return the attribute."""
    module_name, _, attribute = path.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module_name), attribute))


def control_parser(name: str) -> ControlParser:
    return cast(ControlParser, resolve(lookup(name).parse_control))


def options_parser(name: str) -> OptionsParser:
    return cast(OptionsParser, resolve(lookup(name).parse_options))


def settings_check(name: str) -> SettingsCheck:
    return cast(SettingsCheck, resolve(lookup(name).check_settings))


def clip_planner(name: str) -> ClipPlanner:
    """Return the planner of clips of a model. Raises `RequestRefused` if it makes none."""
    path = lookup(name).plan_clip
    if path is None:
        raise RequestRefused(f"model {name!r} makes no clips", code="unknown_model", field="model")
    return cast(ClipPlanner, resolve(path))


def control_schemas(name: str) -> dict[str, object]:
    """JSON Schema of each control schema of the model, keyed by schema name."""
    return cast("dict[str, object]", resolve(lookup(name).control_schemas)())
