"""Check the model's part of a configuration before a worker is started for it, with what the catalog knows."""

from __future__ import annotations

from server.config import ModelSection, ServerConfig
from server.config_values import ConfigError
from worldmodel import catalog
from worldmodel.errors import RequestRefused


def check_model(config: ServerConfig) -> None:
    """Raise `ConfigError` that names the key whose value the model refuses."""
    model = config.model
    try:
        catalog.lookup(model.name)
    except RequestRefused as error:
        raise ConfigError(f"model.name: {error.message}", key="model.name") from error
    _check_settings(model)
    _check_options(model)
    _check_checkpoint(config)


def _check_settings(model: ModelSection) -> None:
    check = catalog.settings_check(model.name)
    try:
        check(width=model.width, height=model.height, precision=model.precision)
    except RequestRefused as error:
        raise ConfigError(f"model.{error.message}", key=f"model.{error.field}") from error


def _check_options(model: ModelSection) -> None:
    try:
        catalog.options_parser(model.name)(model.options)
    except RequestRefused as error:
        inside = "options." if error.field else ""
        raise ConfigError(f"model.{inside}{error.message}", key="model.options") from error


def _check_checkpoint(config: ServerConfig) -> None:
    """Find what is no folder; whether one is there and whole is for the worker to say."""
    key = "model.checkpoint"
    try:
        path = config.checkpoint_path
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{key}: {config.model.checkpoint!r} is no path: {error}", key=key) from error
    if is_file:
        raise ConfigError(f"{key}: expected a folder, got the file {path}", key=key)
