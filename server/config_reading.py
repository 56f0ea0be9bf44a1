"""TOML files, environment variables and flags are read here and nowhere else.

Precedence: flag > environment > file > default. A key `lead_chunks` of section `[session]` is `--session.lead-chunks`
on the command line and `WORLDSERVE_SESSION_LEAD_CHUNKS` in the environment. Unknown keys are errors that name the
nearest match.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from server.config import SECTIONS, ServerConfig
from server.config_values import (
    ConfigError,
    build_section,
    check_numbers,
    flag_of,
    is_variable,
    nearest,
    parse_text,
    placed,
    text_form,
    variable_of,
)

DEMO_OPTIONS = ("reference_intrinsics", "camera_scale")
"""Keys of `[demo]` that are options of the model rather than of every model."""


def load_config(
    path: Path, *, environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> ServerConfig:
    """Read a configuration file and merge environment variables and flags over it.

    `flags` maps "section.key" to the text given on the command line. Raises `ConfigError`.
    """
    tables = _read_file(path)
    origins: dict[str, str] = {}
    for key, text, origin in _overrides(os.environ if environment is None else environment, flags or {}):
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = parse_text(text, SECTIONS[section], name, origin)
        origins[key] = origin
    if "model" not in tables:
        raise ConfigError(f"{path}: expected a [model] or a [demo] section")
    for section, table in tables.items():
        for name, value in table.items():
            check_numbers(value, f"{section}.{name}", str(path), origins)
    sections = {name: build_section(SECTIONS[name], name, table, str(path), origins) for name, table in tables.items()}
    try:
        return ServerConfig(**sections)
    except ConfigError as error:
        raise ConfigError(placed(str(error), error.key or "", str(path), origins), key=error.key) from error


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    known = (*SECTIONS, "demo")
    for name, table in raw.items():
        if name not in known:
            raise ConfigError(f"{path}: unknown section [{name}]{nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a section")
    if "demo" in raw:
        if "model" in raw:
            raise ConfigError(f"{path}: [demo] describes the model, so [model] cannot stand beside it")
        raw["model"] = _demo_as_model(raw.pop("demo"))
    return raw


def _demo_as_model(demo: dict[str, Any]) -> dict[str, Any]:
    """Turn the `[demo]` section, which holds what no checkpoint file says, into a `[model]` section."""
    model: dict[str, Any] = {"name": "lingbot_world_v2", "precision": "fp32", **demo}
    model["options"] = {key: model.pop(key) for key in DEMO_OPTIONS if key in model}
    return model


def _overrides(environment: Mapping[str, str], flags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """List (section.key, text, where it came from) in the order in which they win."""
    keys = {variable_of(key): key for key in settable_keys()}
    found = []
    for variable, text in sorted(environment.items()):
        if not is_variable(variable):
            continue
        if variable not in keys:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, list(keys))}")
        found.append((keys[variable], text, variable))
    found.extend((key, text, flag_of(key)) for key, text in flags.items())
    return found


def settable_keys() -> list[str]:
    """List every "section.key" that a flag or an environment variable can set: all but tables."""
    keys = []
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        keys += [f"{section}.{entry.name}" for entry in fields(kind) if text_form(hints[entry.name]) is not None]
    return keys
